"""Constants of a step: values that no data can change, and what follows from them.

Programs branch on positions and on masks of fixed shape (`if (position_ids.diff() != 1).any()`),
and the answer is the same at every step, so a capture can give it. Such values are computed beside
the fake ones. Tensors that are neither the model's nor the batch's become constants, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from penstock.compat.dispatch import no_dispatch
from penstock.compat.user_line import user_line
from penstock.graph.capturing._drafts import Draft
from penstock.graph.capturing._program_lines import describe_line, error_here
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    decode_arguments,
    flat_results,
    make,
    resolve,
    view_memory,
)
from penstock.graph.step_graph import TensorView

_MAX_BYTES = 2**20  # of a value that is worth computing during a capture
_MAX_OUTSIDE_BYTES = 2**16  # of a tensor from outside of the step that becomes a constant


class ConstantValues:
    """The small values that are constant.

    Attributes:
        memory: Their real memory, with the numbers of a contiguous tensor.
        sources: The names of tensors from outside of the step that they are computed from.
    """

    def __init__(self) -> None:
        self.memory: dict[int, torch.UntypedStorage] = {}
        self.sources: defaultdict[int, frozenset[str]] = defaultdict(frozenset)

    def tensor(self, view: TensorView) -> torch.Tensor:
        """Return the tensor of a view; to be called without dispatch modes."""
        return view_memory(self.memory[view.value], view, "cpu")

    def propagate(self, draft: Draft, num_bytes: Callable[[int], int]) -> None:
        """Compute an operator's results, if all values that it needs are constant."""
        needed = draft.needs
        if draft.target == EMPTY or any(value not in self.memory for value in needed):
            return
        if sum(map(num_bytes, draft.creates)) > _MAX_BYTES:
            return
        sources = frozenset[str]().union(*(self.sources[each] for each in needed))
        if sources:
            self.sources.update(dict.fromkeys(draft.makes, sources))
        with no_dispatch(), torch.no_grad():
            for old, new in draft.mutates:  # a value never changes: write into a copy
                self.memory[new] = self.memory[old].clone()
            results = flat_results(self._call(draft))
            for view, tensor in zip(draft.outputs, results, strict=True):
                if view is not None and view.value in draft.creates:
                    made = torch.empty_strided(
                        view.shape, view.stride, dtype=tensor.dtype, device="cpu"
                    )
                    self.memory[view.value] = made.copy_(tensor).untyped_storage()

    def _call(self, draft: Draft) -> Any:
        current, cpu = dict(draft.mutates), torch.device("cpu")

        def tensor(view: TensorView) -> torch.Tensor:
            return self.tensor(view._replace(value=current.get(view.value, view.value)))

        args, kwargs = decode_arguments(draft, cpu, tensor, _refuse_number)
        if draft.target in (FULL, CONSTANT):
            (view,) = draft.outputs
            assert view is not None
            return make(draft.target, args, view, cpu)
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = cpu
        return resolve(draft.target)(*args, **kwargs)


def _refuse_number(expression: object) -> float:
    raise AssertionError("a number of the optimizer in the forward pass")


class OutsideTensors:
    """Real tensors that become constants of a graph.

    Attributes:
        by_name: The tensors by the operators that make constants of them.
        used: All that the step has used, by their identities.
        observed: Tensors whose numbers have decided the course of the step, with these numbers and
            the line, by the identities of the tensors.
    """

    def __init__(self, replaced: Iterable[torch.Tensor]) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self.observed: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self._replaced = {each.untyped_storage()._cdata for each in replaced}
        self.used: dict[int, torch.Tensor] = {}
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
        self.used[id(tensor)] = tensor

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
        self.observed.setdefault(id(tensor), (tensor, content, line))


def copy_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor that becomes a constant.

    Raises:
        CaptureError: It has too many bytes, or none at all (meta device).
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if tensor.is_meta or num_bytes > _MAX_OUTSIDE_BYTES:
        raise error_here(
            f"a tensor of shape {tuple(tensor.shape)} ({num_bytes} bytes) is used that is neither "
            "a parameter, a buffer nor part of the batch; register it with "
            "register_buffer(..., persistent=False), or make it in forward()"
        )
    with no_dispatch():
        return tensor.detach().clone(memory_format=torch.contiguous_format)
