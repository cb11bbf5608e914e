"""What autograd calls: `pack` for every tensor it saves, `unpack` for every one it needs again."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.activations._engine import Engine
from penstock.activations._owners import ModuleStorages, hide_from_dynamo
from penstock.activations._record import ResidentHandle, SavedHandle
from penstock.activations._routes import Route
from penstock.activations._small import SmallHandle

_ALIGNMENT = 16  # the widest element; a storage at an odder address stays
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_KINDS: dict[tuple[type, int], bool] = {}  # by class and dispatch keys
_dispatch_keys = torch._C._dispatch_keys


class Hooks:
    """The pair of saved-tensor hooks of one `Offload`, and the choice of what may leave.

    routes: by device type. min_bytes: smaller storages stay.
    """

    def __init__(
        self, engine: Engine, modules: ModuleStorages, routes: dict[str, Route], *, min_bytes: int
    ) -> None:
        self.device = "none"  # device type of what was last offloaded
        self._engine = engine
        self._modules = modules
        self._routes = routes
        self._small_bytes = engine.small_bytes
        # Under a budget what is smaller leaves too, when room is needed.
        self._min_bytes = engine.small_bytes if engine.has_budget else min_bytes
        self._save_small, self._restore_small = engine.small.save, engine.small.restore
        # Dynamo traces the Python that runs around a compiled region; this is not for it.
        hidden = hide_from_dynamo(Hooks.pack) and hide_from_dynamo(Hooks.unpack)
        self._pack_hook: Any = self.pack if hidden else torch.compiler.disable(self.pack)
        self._unpack_hook: Any = self.unpack if hidden else torch.compiler.disable(self.unpack)

    def context(self) -> saved_tensors_hooks:
        """A context manager that installs the hooks in the current thread."""
        return saved_tensors_hooks(self._pack_hook, self._unpack_hook)

    def pack(self, tensor: torch.Tensor) -> SavedHandle | ResidentHandle | SmallHandle:
        """What autograd keeps in place of `tensor`."""
        kind = type(tensor), _dispatch_keys(tensor).raw_repr()
        plain = _PLAIN_KINDS.get(kind)
        if plain is None:
            plain = _PLAIN_KINDS[kind] = _has_plain_storage(tensor)
        if not plain or self._engine.disowned:
            return ResidentHandle(tensor)
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if (
            not num_bytes
            or self._modules.owns(tensor, storage)
            or _is_window_on_input(tensor, storage)
        ):
            return ResidentHandle(tensor)
        if num_bytes < self._small_bytes and (tensor.is_cpu or not self._engine.has_budget):
            return self._save_small(tensor, storage._cdata, num_bytes)
        route = self._routes.get(tensor.device.type)
        offloadable = (
            route is not None
            and num_bytes >= self._min_bytes
            and storage.data_ptr() % _ALIGNMENT == 0
            and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        )
        if offloadable:
            self.device = tensor.device.type
        return self._engine.save(tensor, route, offloadable=offloadable)

    def unpack(self, handle: SavedHandle | ResidentHandle | SmallHandle) -> torch.Tensor:
        """The tensor that `handle` stands for."""
        if isinstance(handle, SmallHandle):
            return self._restore_small(handle)
        if isinstance(handle, ResidentHandle):
            return handle.restore()
        return self._engine.restore(handle)


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether the bytes of one storage are all there is to `tensor`; told by its dispatch keys."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_inference()
        and not is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage]
        and not tensor._is_zerotensor()
        and tensor.device.type != "meta"
    )


def _is_window_on_input(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether this is a small window on data that was not computed here, such as a data set.

    Its storage belongs to somebody who keeps it: moving it would free nothing. Slices of what was
    computed (`qkv.chunk(3, -1)`, in compiled code too) reach over most of their storage.
    """
    if tensor.requires_grad:
        return False
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 2 * (reach + 1) * tensor.element_size() < storage.nbytes()
