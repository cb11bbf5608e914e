"""DTensors that autograd saves: this rank's part leaves as a plain tensor, and comes back as one.

An operator on a DTensor changes the version of the whole, not that of the part. So the part is
saved as a tensor with a version counter of its own, and the handle compares that of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from penstock.activations._record import changed_in_place, restore_view, view_of
from penstock.compat.version_counter import shares_version_counter

_MIN_SWEEP = 256  # storages


def is_shard(tensor: Any) -> bool:
    """Return whether this is a DTensor, whose class need not be loaded.

    One whose part a collective operation is still making has a part of another class.
    """
    return hasattr(tensor, "device_mesh") and type(tensor._local_tensor) is torch.Tensor


class ShardHandle:
    """Object that autograd keeps in place of a DTensor.

    `empty` is the DTensor without its part; it shares the version counter of the one that was
    saved. `part` is the handle of the part; `counter` shares the counter that the part has here.
    """

    __slots__ = ("__weakref__", "counter", "empty", "part", "version")

    def __init__(
        self, tensor: Any, known: ShardHandle | None, pack: Callable[[torch.Tensor], Any]
    ) -> None:
        self.empty: Any = tensor.detach()
        self.version: int = tensor._version
        local = self.empty._local_tensor
        if known is not None and known.describes(tensor):
            self.counter: torch.Tensor = known.counter
        else:
            self.counter = torch.empty(0, dtype=local.dtype, device=local.device)
        self.part = pack(restore_view(self.counter, local.untyped_storage(), view_of(local)))
        self.empty._local_tensor = self.counter

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether the part's storage is as `tensor`, a DTensor over it, shows it."""
        return (
            self.version == tensor._version
            and self.empty.dtype == tensor.dtype
            and shares_version_counter(self.empty, tensor)
        )

    def restore(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return the DTensor; raise, as stock autograd does, if it was changed in place."""
        empty = self.empty
        if empty._version != self.version:
            raise changed_in_place(empty._version, self.version, empty.dtype, empty.shape)
        names, context = empty.__tensor_flatten__()
        inner = {name: getattr(empty, name) for name in names}
        inner["_local_tensor"] = unpack(self.part)
        with torch.inference_mode(False):  # its tensors have no version
            return type(empty).__tensor_unflatten__(inner, context, empty.shape, empty.stride())


class ShardSaves:
    """DTensors that were saved; those that show one storage alike share its transfer."""

    def __init__(self) -> None:
        self._last: dict[int, weakref.ref[ShardHandle]] = {}  # by the storage's address
        self._sweep_at = _MIN_SWEEP

    def save(self, tensor: Any, pack: Callable[[torch.Tensor], Any]) -> ShardHandle:
        """Return the handle of a DTensor; `pack` returns that of its part."""
        key = tensor._local_tensor.untyped_storage()._cdata
        weak = self._last.get(key)
        handle = ShardHandle(tensor, None if weak is None else weak(), pack)
        self._last[key] = weakref.ref(handle)
        if len(self._last) > self._sweep_at:
            self._last = {key: weak for key, weak in self._last.copy().items() if weak()}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._last))
        return handle
