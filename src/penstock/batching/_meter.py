"""Peaks of memory: read from the GPU's allocator, or counted on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from penstock.compat.dispatch import TorchDispatchMode, tree_leaves
from penstock.memory import Ledger, Tier


class _Watch(TorchDispatchMode):
    """A mode that enters every storage that operators make into a ledger, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(max_events_per_step=0)
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._enter(leaf.untyped_storage(), args, kwargs)
        return result

    def _enter(self, storage: Any, args: Any, kwargs: Any) -> None:
        known = self._known.get(storage._cdata)
        if known is not None and known() is storage:
            return
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        for leaf in inputs:  # a view or a result in place is nothing new
            is_plain = leaf.layout == torch.strided
            if is_plain and leaf.untyped_storage()._cdata == storage._cdata:
                return
        self._known[storage._cdata] = weakref.ref(storage)
        self.ledger.add(Tier.DEVICE, storage.nbytes())
        weakref.finalize(storage, self.ledger.add, Tier.DEVICE, -storage.nbytes()).atexit = False


def measured_peak(
    run: Callable[[], Any],
    device: torch.device | str = "cpu",
    *,
    then: Callable[[Any], Any] | None = None,
) -> tuple[int, int]:
    """Run a function and return the memory that it took on a device.

    Args:
        run: The function; its result counts as long as it lives.
        device: The device. On a GPU the allocator is asked; on the CPU the storages that operators
            make are counted, without the memory that a kernel uses for itself.
        then: A function of the result of `run` that is part of the peak: its backward pass, say.

    Returns:
        Bytes at the peak, and bytes that were left while the result of `run` was alive, both
        beyond those before.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        left = torch.cuda.memory_allocated(device) - before
        if then is not None:
            then(result)
            torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before, left
    with _Watch() as watch:
        result = run()
        left = watch.ledger.resident(Tier.DEVICE)
        if then is not None:
            then(result)
    del result
    return watch.ledger.peak(Tier.DEVICE), left
