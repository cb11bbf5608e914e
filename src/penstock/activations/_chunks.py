"""Storages too small to move by themselves: saved at little cost, packed when room is needed.

Autograd saves thousands of them a step, so saving one takes no lock and makes no record. A thread
notes them in its *chunk*; to the engine the chunk is one record, whose bytes are in the tensors of
its handles (`unpacked`) until a device budget demands their room. Then they are copied one behind
the other into one storage, which leaves as any other does. The first handle that is needed again
brings back the whole chunk.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from penstock.activations._record import (
    Record,
    View,
    changed_in_place,
    restore_view,
    version_probe,
    view_of,
)

_get_ident = threading.get_ident


class Chunk:
    """Small storages that one thread has saved, in order; dies with the last of its handles."""

    __slots__ = ("__weakref__", "capacity_bytes", "handles", "kept", "record", "used")

    def __init__(self, record: Record, capacity_bytes: int, *, may_leave: bool) -> None:
        self.record = record  # which counts its storages and their bytes
        self.capacity_bytes = capacity_bytes
        self.used = False  # a handle was unpacked: what is saved now is of another step
        self.handles: list[weakref.ref[SmallHandle]] | None = [] if may_leave else None
        self.kept: Any = None  # those of common_saves.cpp, where it has any

    def living(self) -> list[SmallHandle]:
        """Return its handles that are alive."""
        handles = [weak() for weak in self.handles or ()]
        handles = [handle for handle in handles if handle is not None]
        return handles if self.kept is None else handles + self.kept.living()


class SmallHandle:
    """Object that autograd keeps in place of a small tensor.

    `alias` is the tensor, or None while its bytes are in the chunk's pack, `place` bytes behind its
    beginning; `probe` shares its version counter and none of its memory then, and `view` is how it
    looks at its storage.
    """

    __slots__ = ("__weakref__", "alias", "chunk", "place", "probe", "version", "view")

    alias: torch.Tensor | None
    chunk: Chunk
    place: tuple[int, int]  # in the pack; bytes of the whole storage
    probe: torch.Tensor
    version: int
    view: View


class SmallSaves:
    """Chunks that threads are filling.

    Args:
        open_chunk: Called where a thread needs another one, with its last one.
        use_chunk: Called when the first tensor of a chunk is needed.
        reload: Called where a tensor's bytes are not in memory.
    """

    def __init__(
        self,
        open_chunk: Callable[[torch.Tensor, Chunk | None], Chunk],
        use_chunk: Callable[[Chunk], None],
        reload: Callable[[SmallHandle], torch.Tensor],
    ) -> None:
        self._open_chunk, self._use_chunk, self._reload = open_chunk, use_chunk, reload
        self.filling: dict[int, weakref.ref[Chunk]] = {}  # by thread

    def note(self, tensor: torch.Tensor, key: int, num_bytes: int) -> Chunk:
        """Return the chunk that takes `tensor`; `key` and length are its storage's."""
        thread = _get_ident()
        weak = self.filling.get(thread)
        chunk = None if weak is None else weak()
        if (
            chunk is None
            or chunk.used
            or chunk.record.small_bytes + num_bytes > chunk.capacity_bytes
            or chunk.record.device != tensor.device
        ):
            chunk = self._open_chunk(tensor, chunk)
            self.filling[thread] = weakref.ref(chunk)
        record = chunk.record
        if key not in record.small_keys:
            record.small_keys.add(key)
            record.small_bytes += num_bytes
        return chunk

    def save(self, tensor: torch.Tensor, key: int, num_bytes: int) -> SmallHandle:
        """Return a handle for `tensor` that lets its bytes leave; arguments as for `note`."""
        chunk = self.note(tensor, key, num_bytes)
        handle = SmallHandle()
        # A leaf is kept itself, as autograd does; others may own the node that will own the handle.
        handle.alias = tensor.detach() if tensor.requires_grad else tensor
        handle.version = tensor._version
        handle.chunk = chunk
        if chunk.handles is not None:
            chunk.handles.append(weakref.ref(handle))
        return handle

    def restore(self, handle: SmallHandle) -> torch.Tensor:
        """Return the tensor; raise if it was changed in place."""
        if not handle.chunk.used:
            self._use_chunk(handle.chunk)
        alias = handle.alias
        if alias is None:
            alias = self._reload(handle)
        if alias._version != handle.version:
            raise changed_in_place(alias._version, handle.version, alias.dtype, alias.shape)
        return alias

    def open_chunks(self) -> list[Chunk]:
        """Return the chunks that threads are filling."""
        chunks = [weak() for weak in list(self.filling.values())]
        return [chunk for chunk in chunks if chunk is not None and not chunk.used]


def pack(chunk: Chunk) -> tuple[torch.UntypedStorage, int] | None:
    """Copy a chunk's bytes into one storage, and take them from its handles.

    RAM only: on a GPU each of them would have to be ordered behind its stream.

    Returns:
        That storage, and the number of those in it; None if the chunk is empty.
    """
    handles = [handle for handle in chunk.living() if handle.alias is not None]
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    num_bytes = 0
    for handle in handles:
        assert handle.alias is not None
        storage = handle.alias.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage, num_bytes
            num_bytes += storage.nbytes()
    if not num_bytes:
        return None
    packed = torch.UntypedStorage(num_bytes)
    address = packed.data_ptr()
    for storage, place in storages.values():
        ctypes.memmove(address + place, storage.data_ptr(), storage.nbytes())
    for handle in handles:
        alias = handle.alias
        assert alias is not None
        storage = alias.untyped_storage()
        handle.place = storages[storage._cdata][1], storage.nbytes()
        handle.view, handle.probe = view_of(alias), version_probe(alias)
        handle.alias = None
    return packed, len(storages)


def unpack(chunk: Chunk, packed: torch.UntypedStorage, shift: int) -> None:
    """Give a chunk's handles their bytes back, which begin `shift` bytes behind `packed`."""
    address = packed.data_ptr() + shift
    storages: dict[int, torch.UntypedStorage] = {}
    for handle in chunk.living():
        if handle.alias is not None:
            continue
        place, num_bytes = handle.place
        storage = storages.get(place)
        if storage is None:
            storage = storages[place] = torch.UntypedStorage(num_bytes)
            ctypes.memmove(storage.data_ptr(), address + place, num_bytes)
        handle.alias = restore_view(handle.probe, storage, handle.view)
        del handle.probe, handle.view
