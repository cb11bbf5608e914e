"""Hooks of autograd: `pack` for every tensor it saves, `unpack` for every one it needs again.

The methods of `Hooks` decide every case. What they decide for parameters and for most small tensors
common_saves.cpp decides alike, several times as fast, and leaves the rest to them.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import weakref
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.activations._chunks import Chunk, SmallHandle
from penstock.activations._engine import Engine
from penstock.activations._record import Record, SavedHandle, changed_in_place
from penstock.activations._routes import Route
from penstock.activations._shards import ShardHandle, ShardSaves, is_shard
from penstock.codegen import load_optional_library
from penstock.compat.dispatch import (
    TensorBase,
    dispatch_keys,
    is_functional_tensor,
    is_functorch_wrapped_tensor,
)
from penstock.compat.dynamo import skip_frames
from penstock.compat.fake_tensors import FakeTensor

_MIN_SWEEP = 256  # storages
_ALIGNMENT = 16  # the widest element; a storage at an odder address stays
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN_KINDS: dict[tuple[type, int], bool] = {}  # by class and dispatch keys
_SOURCE = Path(__file__).with_name("common_saves.cpp")

# Handle of what stays as it is: parameters, buffers, small tensors, and what cannot leave. Autograd
# saves thousands of them a step; a tuple takes a third of the time of an object with attributes
# (and `Kept` of common_saves.cpp a third of the memory).
# The tensor; its version when it was saved, if it has one; the chunk that counts its bytes, if any.
Resident: TypeAlias = tuple[torch.Tensor, int | None, Chunk | None]


class ModuleStorages:
    """Parameters and buffers, which autograd saves too, of all modules called while it watches.

    Offloading them would free nothing, since their module keeps them. A global forward-pre hook
    sees every module that is called. Of the outermost one all are noted, of those inside what is
    theirs alone: each time, because `.to()` and sharding replace storages between steps.
    """

    def __init__(self) -> None:
        # By identity: a module may compare by its values, and have no hash.
        self._children: weakref.WeakValueDictionary[int, torch.nn.Module]
        self._children = weakref.WeakValueDictionary()
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
        if _is_parameter(tensor) or _is_view_of_parameter(tensor):
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
        noted = {id(module): module}
        if self._children.get(id(module)) is not module:
            _add_children(module, noted)
            self._children.update(noted)
            self._children.pop(id(module), None)
        for each in noted.values():
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if tensor is not None:
                    self.remember(getattr(tensor, "_local_tensor", tensor))  # a DTensor has a shard
        if len(self.known) > self._sweep_at:
            for key, weak in list(self.known.items()):
                if weak() is None and self.known.get(key) is weak:
                    del self.known[key]
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self.known))


class Hooks:
    """Pair of saved-tensor hooks of one `Offload`, and the choice of what may leave.

    Args:
        engine: Takes what may leave.
        modules: Storages that their modules keep.
        routes: By device type.

    Attributes:
        device: Device type of what was last offloaded.
        language: Language of the common cases.
    """

    def __init__(self, engine: Engine, modules: ModuleStorages, routes: dict[str, Route]) -> None:
        self.device = "none"
        self._kinds: dict[tuple[type, int], str] = {}  # as `_PLAIN_KINDS`: names of what stays
        self._shards = ShardSaves()
        self._engine = engine
        self._modules = modules
        self._routes = routes
        limits = engine.limits
        self._has_budget, self._small_bytes = limits.has_budget, limits.small_bytes
        # Under a budget what is smaller leaves too, when room is needed.
        self._min_bytes = limits.small_bytes if limits.has_budget else limits.min_bytes
        self._stay_bytes = 0 if limits.has_budget else limits.small_bytes  # smaller ones stay
        self._save_small, self._restore_small = engine.small.save, engine.small.restore
        self._note_small = engine.small.note
        # Dynamo traces the Python that runs around a compiled region; this is not for it.
        hidden = skip_frames(Hooks.pack) and skip_frames(Hooks.unpack)
        hooks: Any = self.pack, self.unpack
        if not hidden:
            hooks = tuple(map(torch.compiler.disable, hooks))
        library = load_common_saves()
        self.language = "Python" if library is None else "C++"
        if library is not None:
            shared = modules.known, engine.small.filling, limits.small_bytes
            hooks = library.penstock_common_saves(_CLASSES, (*hooks, *shared))
            # Compiled autograd breaks its graph at our hooks, in whichever language.
            warnings.filterwarnings(
                "ignore", "Dynamo does not know .* `penstock.activations.tuple.", UserWarning
            )
        self._hooks = hooks

    @property
    def kinds(self) -> list[str]:
        """Kinds of tensors that were saved and stay, whatever their size, and are not counted."""
        return sorted({name for name in self._kinds.copy().values() if name})

    def context(self) -> saved_tensors_hooks:
        """Return a context manager that installs the hooks in the current thread."""
        return saved_tensors_hooks(*self._hooks)

    def pack(self, tensor: torch.Tensor) -> SavedHandle | Resident | SmallHandle | ShardHandle:
        """Return the handle that autograd keeps in place of `tensor`.

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
        kind = type(tensor), dispatch_keys(tensor).raw_repr()
        plain = _PLAIN_KINDS.get(kind)
        if plain is None:
            plain = _PLAIN_KINDS[kind] = _has_plain_storage(tensor)
        if self._engine.disowned:
            return keep(tensor)
        if not plain:
            return self._pack_other(tensor, kind)
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if (
            not num_bytes
            or self._modules.owns(tensor, storage)
            or _is_window_on_input(tensor, storage)
        ):
            return keep(tensor)
        if num_bytes < self._small_bytes and (tensor.is_cpu or not self._has_budget):
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

    def _pack_other(self, tensor: torch.Tensor, kind: tuple[type, int]) -> Resident | ShardHandle:
        """Return a handle for what has no plain storage."""
        if not _is_parameter(tensor) and not _is_view_of_parameter(tensor):
            if is_shard(tensor):
                return self._shards.save(tensor, self.pack)
            if kind not in self._kinds:
                self._kinds[kind] = _name_kind(tensor)
        return keep(tensor)

    def _keep_small(self, tensor: torch.Tensor) -> Resident | None:
        """Return a handle for a tensor that is too small to leave; None for others.

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

    def unpack(self, handle: SavedHandle | Resident | SmallHandle | ShardHandle) -> torch.Tensor:
        """Return the tensor that `handle` stands for."""
        if type(handle) is tuple:
            tensor, version, chunk = handle
            if chunk is not None and not chunk.used:
                self._engine.use_chunk(chunk)
            if version is not None and tensor._version != version:
                _raise_changed(tensor, version)
            return tensor
        if isinstance(handle, SmallHandle):
            return self._restore_small(handle)
        if isinstance(handle, ShardHandle):
            return handle.restore(self.unpack)
        assert isinstance(handle, SavedHandle)
        return self._engine.restore(handle)


def _add_children(module: torch.nn.Module, found: dict[int, torch.nn.Module]) -> None:
    """Add the modules inside of one, which may have given names such as `modules` to its data."""
    for child in module._modules.values():
        if child is not None and id(child) not in found:
            found[id(child)] = child
            _add_children(child, found)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _is_view_of_parameter(tensor: torch.Tensor) -> bool:
    return tensor._base is not None and _is_parameter(tensor._base)


def keep(tensor: torch.Tensor) -> Resident:
    """Return a handle for a tensor that is not counted."""
    # A leaf is kept itself, as autograd does: its data may be replaced and gathered again. Any
    # other tensor may own the graph node that will own this handle.
    alias = tensor if tensor.grad_fn is None else tensor.detach()
    try:
        return alias, tensor._version, None
    except (RuntimeError, NotImplementedError):  # inference tensors and wrappers without one
        return alias, None, None


def _raise_changed(tensor: torch.Tensor, version: int) -> NoReturn:
    shape = None if tensor.is_nested else tensor.shape
    raise changed_in_place(tensor._version, version, tensor.dtype, shape)


@functools.cache
def load_common_saves() -> ctypes.CDLL | None:
    """Load the common cases in C++; the first `Offload` of a user builds them, in seconds."""
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
    """Return whether the bytes of one storage are all of `tensor`; its dispatch keys decide."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_inference()
        and not is_functorch_wrapped_tensor(tensor)
        and not is_functional_tensor(tensor)
        and not tensor._is_zerotensor()
        and tensor.device.type != "meta"
    )


def _name_kind(tensor: torch.Tensor) -> str:
    """Return the name of a kind that has no plain storage; "" where it is no data of a program."""
    if isinstance(tensor, FakeTensor) or is_functional_tensor(tensor) or tensor.is_meta:
        return ""
    if is_functorch_wrapped_tensor(tensor):
        return "those of torch.func"
    if type(tensor) not in _PLAIN:
        return type(tensor).__name__
    if tensor.is_quantized or tensor.is_nested:
        return "quantized" if tensor.is_quantized else "nested"
    return str(tensor.layout) if tensor.layout is not torch.strided else ""


def _is_window_on_input(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether this is a small window on data not computed here, such as a data set.

    Its storage is kept elsewhere: moving it would free nothing. Slices of what was
    computed (`qkv.chunk(3, -1)`, in compiled code too) reach over most of their storage.
    """
    if tensor.requires_grad:
        return False
    if tensor.is_contiguous() and 2 * tensor.nbytes >= storage.nbytes():  # as most: told quickly
        return False
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 2 * (reach + 1) * tensor.element_size() < storage.nbytes()


skip_frames(ModuleStorages._on_forward)
skip_frames(_has_plain_storage)  # the C++ calls it
_CLASSES = (_PLAIN, _has_plain_storage, TensorBase, Record, Chunk, SmallHandle)
