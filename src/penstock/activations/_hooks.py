"""What autograd calls: `pack` for every tensor it saves, `unpack` for every one it needs again.

The methods of `Hooks` decide every case. What they decide for parameters and for most small tensors
common_saves.cpp decides alike, several times as fast, and leaves the rest to them.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.activations._engine import Engine
from penstock.activations._owners import ModuleStorages, hide_from_dynamo
from penstock.activations._record import Record, SavedHandle
from penstock.activations._resident import Resident, keep, raise_changed
from penstock.activations._routes import Route
from penstock.activations._small import Chunk, SmallHandle
from penstock.codegen import load_optional_library

_ALIGNMENT = 16  # the widest element; a storage at an odder address stays
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_KINDS: dict[tuple[type, int], bool] = {}  # by class and dispatch keys
_dispatch_keys = torch._C._dispatch_keys
_SOURCE = Path(__file__).with_name("common_saves.cpp")


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
        self._stay_bytes = 0 if engine.has_budget else engine.small_bytes  # smaller ones stay
        self._save_small, self._restore_small = engine.small.save, engine.small.restore
        self._note_small = engine.small.note
        # Dynamo traces the Python that runs around a compiled region; this is not for it.
        hidden = hide_from_dynamo(Hooks.pack) and hide_from_dynamo(Hooks.unpack)
        hooks: Any = self.pack, self.unpack
        if not hidden:
            hooks = tuple(map(torch.compiler.disable, hooks))
        library = common_saves()
        self.language = "Python" if library is None else "C++"  # of the common cases
        if library is not None:
            shared = modules.known, engine.small.filling, engine.small_bytes, engine.has_budget
            hooks = library.penstock_common_saves(_CLASSES, (*hooks, *shared))
            # Compiled autograd breaks its graph at our hooks, in whichever language.
            warnings.filterwarnings(
                "ignore", "Dynamo does not know .* `penstock.activations.tuple.", UserWarning
            )
        self._hooks = hooks

    def context(self) -> saved_tensors_hooks:
        """A context manager that installs the hooks in the current thread."""
        return saved_tensors_hooks(*self._hooks)

    def pack(self, tensor: torch.Tensor) -> SavedHandle | Resident | SmallHandle:
        """What autograd keeps in place of `tensor`.

        Called thousands of times a step for what stays anyway (parameters, small tensors without a
        budget), so those come first, with few operations and a tuple for a handle.
        """
        if type(tensor) in _PLAIN:
            if tensor.requires_grad and tensor.is_leaf:
                self._modules.remember(tensor)
                return keep(tensor)
            if self._stay_bytes and not tensor.is_meta:
                resident = self._keep_small(tensor)
                if resident is not None:
                    return resident
        kind = type(tensor), _dispatch_keys(tensor).raw_repr()
        plain = _PLAIN_KINDS.get(kind)
        if plain is None:
            plain = _PLAIN_KINDS[kind] = _has_plain_storage(tensor)
        if not plain or self._engine.disowned:
            return keep(tensor)
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if (
            not num_bytes
            or self._modules.owns(tensor, storage)
            or _is_window_on_input(tensor, storage)
        ):
            return keep(tensor)
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

    def _keep_small(self, tensor: torch.Tensor) -> Resident | None:
        """A handle for a tensor that is too small to leave; None if it is not, or is no plain one.

        Sparse tensors have no storage, inference tensors no version: PyTorch raises for them.
        """
        try:
            version = tensor._version
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        num_bytes = storage.nbytes()
        if num_bytes >= self._stay_bytes or not num_bytes or self._engine.disowned:
            return None
        # Others than leaves may own the graph node that will own the handle.
        alias = tensor.detach() if tensor.requires_grad else tensor
        if self._modules.owns(tensor, storage) or _is_window_on_input(tensor, storage):
            return alias, version, None
        return alias, version, self._note_small(tensor, storage._cdata, num_bytes)

    def unpack(self, handle: SavedHandle | Resident | SmallHandle) -> torch.Tensor:
        """The tensor that `handle` stands for."""
        if type(handle) is tuple:
            tensor, version, chunk = handle
            if chunk is not None and not chunk.used:
                self._engine.use_chunk(chunk)
            if version is not None and tensor._version != version:
                raise_changed(tensor, version)
            return tensor
        if isinstance(handle, SmallHandle):
            return self._restore_small(handle)
        assert isinstance(handle, SavedHandle)
        return self._engine.restore(handle)


@functools.cache
def common_saves() -> ctypes.CDLL | None:
    """The hooks' common cases in C++; the first `Offload` of a user builds them, in seconds."""
    return load_optional_library(
        "penstock_common_saves",
        _SOURCE,
        include_torch=True,
        include_python=True,
        functions={"penstock_common_saves": (ctypes.py_object, [ctypes.py_object] * 2)},
        work="small saved tensors are kept",
        otherwise="by Python",
    )


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
    if tensor.is_contiguous() and 2 * tensor.nbytes >= storage.nbytes():  # as most: told quickly
        return False
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 2 * (reach + 1) * tensor.element_size() < storage.nbytes()


hide_from_dynamo(_has_plain_storage)  # the C++ calls it
_CLASSES = (_PLAIN, _has_plain_storage, torch._C.TensorBase, Record, Chunk, SmallHandle)
