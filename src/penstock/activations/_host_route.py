"""Route from GPU memory to pinned host memory, and from there to the file.

Host memory is a staging pool whose slabs are registered with the device; storages lie in it at
page-aligned addresses, so that they can go on to the file with O_DIRECT. With a file, the pool is
a write-back cache: when it is full, the oldest copies are spilled. The backward pass needs these
last, since it runs in reverse.

Ownership: a storage's memory belongs to the engine until `store` returns; a staging buffer belongs
to the `HostCopy` until `discard`. Copies run on two streams of their own, one per direction, each
ordered against the computation by events.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Any

import torch

from penstock.activations._cuda import CudaCopies
from penstock.activations._routes import Declined, Route
from penstock.memory import (
    ExtentFile,
    Ledger,
    Link,
    StagingBuffer,
    StagingPool,
    StoredSpan,
    Tier,
    available_ram,
)
from penstock.memory.pages import DIRECT_IO_BYTES, round_up
from penstock.memory.pinned import pin, unpin

_SLAB_BYTES = 256 * 1024**2
_BOUNCE_BYTES = 16 * 1024**2  # a file read on its way to the device passes through this much
_DEFAULT_SHARE = 0.5  # of the RAM that is available, where host_memory is not given


class HostCopy:
    """Copy of one storage: in a staging buffer, or in the file, piece by piece."""

    __slots__ = ("buffer", "busy", "discarded", "num_bytes", "ready", "spans", "token")

    def __init__(self, buffer: StagingBuffer) -> None:
        self.num_bytes = buffer.num_bytes
        self.ready: Any = None  # the mark that it was stored with
        self.buffer: StagingBuffer | None = buffer
        self.spans: list[StoredSpan] = []
        self.token: Any = None  # the last copy to the device that reads the buffer
        self.busy = False  # being spilled or read: must not be spilled
        self.discarded = False  # discarded while it was busy: when that ends, it is freed


class HostRoute(Route):
    """Route from device to host, on to the file when the host budget is used up, and back."""

    def __init__(
        self,
        ledger: Ledger,
        copies: CudaCopies,
        *,
        file: ExtentFile | None,
        host_memory: int | None,
    ) -> None:
        self._ledger = ledger
        self._copies = copies
        self.mark, self.mark_again, self.settle = copies.mark, copies.mark_again, copies.settle
        self.mark_part = copies.mark_part
        self._file = file
        budget = int(available_ram() * _DEFAULT_SHARE) if host_memory is None else host_memory
        self._bounce_bytes = 0
        if file is not None:
            self._bounce_bytes = min(
                _BOUNCE_BYTES, 2 * max(1, budget // 8 // DIRECT_IO_BYTES) * DIRECT_IO_BYTES
            )
        self._pool = self._make_pinned_pool(max(0, budget - self._bounce_bytes))
        self._bounce = self._make_pinned_pool(self._bounce_bytes)
        self._lock = threading.Condition()
        self._cached: OrderedDict[int, HostCopy] = OrderedDict()  # oldest first
        self._num_arriving = 0  # buffers that are being filled, and can be spilled afterwards
        self._leaving: deque[HostCopy] = deque()  # discarded, and still read by the device

    def store(self, storage: torch.UntypedStorage, ready: Any) -> HostCopy:
        """Copy the storage to host memory, making room there first.

        Raises:
            Declined: The host budget is used up, and there is no file to spill to.
        """
        num_bytes = storage.nbytes()
        copy = self._allocate(num_bytes)  # which counts it as arriving
        copy.ready = ready
        start = time.perf_counter_ns()
        arrived = False
        try:
            assert copy.buffer is not None
            self._copies.to_host(storage, copy.buffer.address, ready)
            arrived = True
        finally:
            with self._lock:
                self._num_arriving -= 1
                if arrived:
                    self._cached[id(copy)] = copy
                self._lock.notify_all()
            if not arrived:
                self.discard(copy)
        self._ledger.record_transfer(Link.DEVICE_TO_HOST, num_bytes, start)
        return copy

    def load(self, copy: HostCopy, device: torch.device) -> tuple[torch.UntypedStorage, int, Any]:
        """Start the copy to the device, reading the file first if the bytes are there."""
        with self._lock:
            while copy.busy:
                self._lock.wait()
            copy.busy = True
        try:
            storage = self._copies.allocate(copy.num_bytes, device, copy.ready)
            start = time.perf_counter_ns()
            if copy.buffer is not None:
                copy.token = self._copies.to_device(
                    copy.buffer.address, storage, 0, copy.num_bytes, copy.ready
                )
            else:
                copy.token = self._load_from_file(copy, storage)
            self._ledger.record_transfer(Link.HOST_TO_DEVICE, copy.num_bytes, start)
            return storage, 0, copy.token
        finally:
            self._end_busy(copy)

    def discard(self, copy: HostCopy) -> None:
        """Free the copy's bytes, wherever they are, now or when what uses them has ended."""
        with self._lock:
            self._cached.pop(id(copy), None)
            copy.discarded = True
            if copy.busy:
                return
        self._discard_spans(copy)
        if copy.token is not None and not self._copies.has_ended(copy.token):
            self._leaving.append(copy)  # the device still reads it, and must not be waited for here
        else:
            self._free_host(copy)

    def _end_busy(self, copy: HostCopy) -> None:
        with self._lock:
            copy.busy = False
            if copy.buffer is None:
                self._cached.pop(id(copy), None)
            self._lock.notify_all()
        if copy.discarded:
            self.discard(copy)

    def close(self) -> None:
        """Unregister and free the host memory, close the file."""
        while self._free_leaving():
            pass
        self._pool.close()
        self._bounce.close()
        if self._file is not None:
            self._file.close()

    # ------------------------------------------------------------- host memory

    def _make_pinned_pool(self, budget_bytes: int) -> StagingPool:
        def register(address: int, num_bytes: int) -> None:
            pin(address, num_bytes, remedy="lower host_memory")
            self._ledger.add(Tier.HOST, num_bytes)

        def unregister(address: int, num_bytes: int) -> None:
            unpin(address)
            self._ledger.add(Tier.HOST, -num_bytes)

        return StagingPool(
            budget_bytes, slab_bytes=_SLAB_BYTES, on_map=register, on_unmap=unregister
        )

    def _allocate(self, num_bytes: int) -> HostCopy:
        """Allocate host memory; where there is none, spill the oldest copies."""
        fits = round_up(num_bytes) <= self._pool.budget_bytes
        while fits:
            with self._lock:
                buffer = self._pool.try_acquire(num_bytes)
                if buffer is not None:
                    self._num_arriving += 1
                    return HostCopy(buffer)
            if self._free_leaving():
                continue
            victim = self._next_victim()
            if victim is None:
                break
            self._spill(victim)
        raise Declined(f"host_memory of {self._pool.budget_bytes} bytes is used up")

    def _next_victim(self) -> HostCopy | None:
        """Return the oldest copy in host memory, now busy; wait for one while all are in use."""
        with self._lock:
            while self._file is not None and (self._cached or self._num_arriving):
                for copy in self._cached.values():
                    if not copy.busy:
                        copy.busy = True
                        return copy
                self._lock.wait()
        return None

    def _free_leaving(self) -> bool:
        """Free the first discarded copy that the device still reads; False if there is none."""
        try:
            copy = self._leaving.popleft()
        except IndexError:
            return False
        self._copies.finish(copy.token)
        self._free_host(copy)
        return True

    def _spill(self, copy: HostCopy) -> None:
        assert self._file is not None and copy.buffer is not None
        address = copy.buffer.address
        try:
            if copy.token is not None:
                self._copies.finish(copy.token)
            start = time.perf_counter_ns()
            for begin, end in self._pieces(copy):
                copy.spans.append(self._file.store(address + begin, end - begin))
                self._ledger.add(Tier.FILE, end - begin)
            self._ledger.record_transfer(Link.HOST_TO_FILE, copy.num_bytes, start)
            self._free_host(copy)
        except BaseException:
            self._discard_spans(copy)
            raise
        finally:
            self._end_busy(copy)

    def _free_host(self, copy: HostCopy) -> None:
        buffer, copy.buffer = copy.buffer, None
        if buffer is not None:
            buffer.release()

    # -------------------------------------------------------------------- file

    def _pieces(self, copy: HostCopy) -> list[tuple[int, int]]:
        """Return the ranges in which it is written and read: half a bounce buffer each."""
        half = self._bounce_bytes // 2
        return [
            (begin, min(begin + half, copy.num_bytes)) for begin in range(0, copy.num_bytes, half)
        ]

    def _discard_spans(self, copy: HostCopy) -> None:
        for span in copy.spans:
            assert self._file is not None
            self._file.discard(span)
            self._ledger.add(Tier.FILE, -span.num_bytes)
        copy.spans = []

    def _load_from_file(self, copy: HostCopy, storage: torch.UntypedStorage) -> Any:
        """Load by way of a bounce buffer: one half is read while the other is copied."""
        assert self._file is not None and copy.spans
        with self._bounce.acquire(self._bounce_bytes) as bounce:
            halves = bounce.address, bounce.address + self._bounce_bytes // 2
            tokens: list[Any] = [None, None]
            try:
                for index, (begin, end) in enumerate(self._pieces(copy)):
                    side = index % 2
                    if tokens[side] is not None:
                        self._copies.finish(tokens[side])
                    start = time.perf_counter_ns()
                    self._file.load(copy.spans[index], halves[side])
                    self._ledger.record_transfer(Link.FILE_TO_HOST, end - begin, start)
                    tokens[side] = self._copies.to_device(
                        halves[side], storage, begin, end, copy.ready
                    )
            finally:  # the next storage may have the buffer, and after an error the memory
                for token in tokens:
                    if token is not None:
                        self._copies.finish(token)
            return tokens[0]
