"""What autograd calls: `pack` for every tensor it saves, `unpack` for every one it needs again."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.activations._engine import Engine
from penstock.activations._owners import ModuleStorages
from penstock.activations._record import ResidentHandle, SavedHandle
from penstock.activations._routes import Route

_ALIGNMENT = 16  # the widest element; a storage at an odder address stays
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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
        self._min_bytes = min_bytes
        # Dynamo traces the Python that runs around a compiled region; this is not for it.
        self._pack_hook: Any = torch.compiler.disable(self.pack)
        self._unpack_hook: Any = torch.compiler.disable(self.unpack)

    def context(self) -> saved_tensors_hooks:
        """A context manager that installs the hooks in the current thread."""
        return saved_tensors_hooks(self._pack_hook, self._unpack_hook)

    def pack(self, tensor: torch.Tensor) -> SavedHandle | ResidentHandle:
        """What autograd keeps in place of `tensor`."""
        if self._engine.disowned or not _has_plain_storage(tensor):
            return ResidentHandle(tensor)
        storage = tensor.untyped_storage()
        if self._modules.owns(tensor, storage) or _is_window_on_input(tensor, storage):
            return ResidentHandle(tensor)
        route = self._routes.get(tensor.device.type)
        offloadable = (
            route is not None
            and storage.nbytes() >= self._min_bytes
            and storage.data_ptr() % _ALIGNMENT == 0
            and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
        )
        if offloadable:
            self.device = tensor.device.type
        return self._engine.save(tensor, route, offloadable=offloadable)

    def unpack(self, handle: SavedHandle | ResidentHandle) -> torch.Tensor:
        """The tensor that `handle` stands for."""
        if isinstance(handle, ResidentHandle):
            return handle.restore()
        return self._engine.restore(handle)


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether the bytes of one storage are all there is to `tensor`, and there are some."""
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
        and tensor.untyped_storage().nbytes() > 0
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
