"""Tensors that a step uses and that are neither the model's nor the batch's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.compat.user_line import user_line
from penstock.graph.capturing._errors import describe_line, error_here

_MAX_BYTES = 2**16  # of a tensor that becomes a constant of the graph


class Observation(NamedTuple):
    """A real tensor whose numbers have decided the course of the step, and these numbers."""

    tensor: torch.Tensor
    content: torch.Tensor
    line: str


class OutsideTensors:
    """Real tensors that become constants of a graph.

    Attributes:
        by_name: The tensors by the operators that make constants of them.
        observed: By the identities of the tensors.
    """

    def __init__(self, replaced: Iterable[torch.Tensor]) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self.observed: dict[int, Observation] = {}
        self._replaced = {each.untyped_storage()._cdata for each in replaced}
        self._used: dict[int, torch.Tensor] = {}
        self._storages: set[int] = set()

    def use(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was there before the step.

        Raises:
            CaptureError: It views a tensor of the model.
        """
        if tensor.untyped_storage()._cdata in self._replaced:
            raise error_here(
                f"a tensor of shape {tuple(tensor.shape)} is used that views a parameter or "
                "buffer past the model; use the model's own attribute"
            )
        self._used[id(tensor)] = tensor

    def is_used(self, tensor: object) -> bool:
        """Return whether the step has used a tensor."""
        return id(tensor) in self._used

    def add(self, name: str, tensor: torch.Tensor, storage: int) -> None:
        """Note the constant that a tensor has become, and the index of its storage."""
        self.by_name[name] = tensor
        self._storages.add(storage)

    def check_unchanged(self, storage: int, tensor: torch.Tensor) -> None:
        """Raise if a tensor that is written lies in the storage of such a constant."""
        if storage in self._storages:
            raise error_here(
                f"a tensor of shape {tuple(tensor.shape)} is changed in place that was there "
                "before the step and is neither a parameter nor a buffer, so that it would change "
                "in this step only: register it with register_buffer()"
            )

    def observe(self, tensor: torch.Tensor) -> None:
        """Note that the course of the step depends on a tensor's numbers."""
        with no_dispatch():
            content = tensor.detach().clone()
        line = describe_line(user_line())
        self.observed.setdefault(id(tensor), Observation(tensor, content, line))


def copy_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor that becomes a constant.

    Raises:
        CaptureError: It has too many bytes, or none at all (meta device).
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_meta or num_bytes > _MAX_BYTES:
        raise error_here(
            f"a tensor of shape {tuple(tensor.shape)} ({num_bytes} bytes) is used that is neither "
            "a parameter, a buffer nor part of the batch; register it with "
            "register_buffer(..., persistent=False), or make it in forward()"
        )
    with no_dispatch():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
