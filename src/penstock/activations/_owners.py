"""Storages that belong to modules: parameters and buffers, which autograd saves too.

Offloading them would free nothing, since their module keeps them. A global forward-pre hook sees
every module that is called. Of the outermost one all are noted, of those inside what is theirs
alone: each time, because `.to()` and sharding replace storages between steps.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.compat.dynamo import skip_frames

_MIN_SWEEP = 256


class ModuleStorages:
    """Storages of all modules called while it watches."""

    def __init__(self) -> None:
        self._children: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # By address, which names a storage only as long as the weak reference is alive.
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sweep_at = _MIN_SWEEP
        self._hook: Any = None
        self._num_watching = 0

    def watch(self) -> None:
        """Start watching; calls nest."""
        self._num_watching += 1
        if self._hook is None:
            # Our hook does nothing in compiled code and may well fire twice.
            warnings.filterwarnings(
                "ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning
            )
            self._hook = register_module_forward_pre_hook(self._on_forward)

    def unwatch(self) -> None:
        """Undo one `watch`."""
        self._num_watching -= 1
        if self._num_watching == 0 and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def owns(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether `tensor` is, or is a view of, a parameter, a buffer or another leaf.

        A leaf that requires a gradient is a parameter, with or without a module around it.
        """
        base = tensor._base
        if _is_parameter(tensor) or (base is not None and _is_parameter(base)):
            self.remember(tensor)
            return True
        return self._is_known(storage)

    def remember(self, tensor: torch.Tensor) -> None:
        """Note a parameter: compiled code also saves views that do not name their base."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError, ValueError):
            return  # a layout without a storage, or a lazy module's parameter before its first call
        known = self.known.get(storage._cdata)
        if known is None or known() is not storage:
            self.known[storage._cdata] = weakref.ref(storage)

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        known = self.known.get(storage._cdata)
        return known is not None and known() is storage

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module in self._children:
            own = (*module._parameters.values(), *module._buffers.values())
        else:
            self._children.update(child for child in module.modules() if child is not module)
            own = (*module.parameters(), *module.buffers())
        for tensor in own:
            if tensor is not None:
                self.remember(getattr(tensor, "_local_tensor", tensor))  # a DTensor has a shard
        if len(self.known) > self._sweep_at:
            for key, weak in list(self.known.items()):
                if weak() is None and self.known.get(key) is weak:
                    del self.known[key]
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self.known))


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


skip_frames(ModuleStorages._on_forward)
