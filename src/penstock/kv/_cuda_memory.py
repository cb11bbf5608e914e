"""Memory of pools on CUDA devices: slots on the GPU, registered pages in RAM, and their streams.

A pool launches on two streams, the caller's and one for transfers. Memory that both use is given
from one to the other by events, in the order in which the host launched the uses.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.kv._areas import Area
from penstock.memory.pages import PAGE_BYTES, map_anonymous, round_up
from penstock.memory.pinned import pin, unpin
from penstock.memory.raw_memory import address_of

_REMEDY = "lower host_memory=, or close other caches"


class DeviceArea(Area):
    """Memory of a GPU, of PyTorch's allocator; freed, it is given out again after both streams.

    Args:
        num_bytes: Its length.
        device: The GPU.
        home: Stream on which it is allocated.
        side: Another stream that uses it.
    """

    def __init__(self, num_bytes: int, device: torch.device, home: Any, side: Any) -> None:
        with torch.cuda.stream(home):
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._bytes.record_stream(side)  # its work until the memory is freed is waited for
        self.address = self._bytes.data_ptr()
        self.num_bytes = num_bytes


class _Registration:
    """Mapping that is registered with CUDA, until nothing refers to it and its uses have ended."""

    def __init__(self, num_bytes: int, streams: Sequence[Any]) -> None:
        # Shared memory stays where it is when the process forks, and so does what the GPU reads.
        mapping = map_anonymous(round_up(num_bytes, PAGE_BYTES))
        self.address, self.num_bytes = address_of(mapping), len(mapping)
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        pin(self.address, self.num_bytes, remedy=_REMEDY)
        # At the interpreter's end nothing is undone: kernels may run then, and all memory goes.
        end = weakref.finalize(self, _unregister, os.getpid(), self.bytes, tuple(streams))
        end.atexit = False


def _unregister(process: int, content: torch.Tensor, streams: Sequence[Any]) -> None:
    """End a registration; `content` keeps the memory mapped until then."""
    if process == os.getpid():
        for stream in streams:
            stream.synchronize()
        unpin(content.data_ptr())


class RegisteredArea(Area):
    """Host memory that the GPU reads and writes at its address.

    Args:
        num_bytes: Its length.
        streams: Streams that use it; they are waited for before the memory goes.

    Raises:
        PenstockError: CUDA refuses to register it.
    """

    def __init__(self, num_bytes: int, streams: Sequence[Any]) -> None:
        self.registration = _Registration(num_bytes, streams)
        self._bytes = self.registration.bytes
        self.address = self.registration.address
        self.num_bytes = num_bytes


class HostRanges:
    """Addresses of registered areas that live."""

    def __init__(self) -> None:
        self._registrations: weakref.WeakSet[_Registration] = weakref.WeakSet()

    def add(self, area: RegisteredArea) -> RegisteredArea:
        """Count an area among them, and return it."""
        self._registrations.add(area.registration)
        return area

    def contain(self, addresses: np.ndarray) -> np.ndarray:
        """Return which addresses, int64 `(n,)`, are in one of the areas, bool."""
        ranges = sorted((each.address, each.num_bytes) for each in self._registrations)
        if not ranges:
            return np.zeros(len(addresses), dtype=bool)
        begins, lengths = np.array(ranges, dtype=np.int64).T
        area = np.searchsorted(begins, addresses, side="right") - 1
        return (area >= 0) & (addresses < begins[area] + lengths[area])


class StreamOrder:
    """Order of the uses of a memory by two streams: each waits for those of the other before it.

    A stream that waited for an event of the other one need not wait for it again, because what it
    launches later is behind that.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Any, Any]] = []  # stream and event of uses not yet waited for

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Launch uses on a stream in this context."""
        self.begin(stream)
        try:
            yield
        finally:
            self.end(stream)

    def begin(self, stream: Any) -> None:
        """Have what a stream launches from now on wait for the uses of the other one."""
        for other, event in self._last:
            if other != stream:
                stream.wait_event(event)
        self._last = [each for each in self._last if each[0] == stream]

    def end(self, stream: Any) -> None:
        """Count what a stream has launched up to now as a use."""
        self._last = [each for each in self._last if each[0] != stream]
        self._last.append((stream, stream.record_event()))


class DeviceChunk:
    """Part of the budget that blocks pass: written by one stream and read by the other.

    Attributes:
        area: Its memory.
        address: Where it begins.
        order: Order of its uses.
    """

    def __init__(
        self,
        area: DeviceArea,
        home: Any,
        copy: Callable[[np.ndarray, np.ndarray, int, DeviceChunk], None],
    ) -> None:
        self.area, self.address, self.order = area, area.address, StreamOrder()
        self._home, self._copy = home, copy

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `num_bytes` bytes from `offset` on as a flat tensor."""
        return self.area.view(offset, num_bytes, dtype)

    def copy(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy records to it, on the stream of transfers; a source is read only once."""
        self._copy(destinations, sources, num_bytes, self)

    def begin_reading(self) -> None:
        """Have what is launched now read what was copied before."""
        self.order.begin(self._home)

    def end_reading(self) -> None:
        """Let the memory be written again after what was launched up to now."""
        self.order.end(self._home)
