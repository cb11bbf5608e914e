"""Routes out of the device tier, and back.

A route moves one storage at a time, blocking the worker thread that calls it; which storage, when
and under which budget is the engine's business. On a machine without a GPU the device tier is
RAM, and `FileRoute` takes a storage straight to the file. `penstock.activations._host_route` has
the route from a GPU.
"""

from __future__ import annotations

import abc
import threading
import time
from typing import Any

import torch

from penstock.memory import ExtentFile, Ledger, Link, StoredSpan, Tier
from penstock.memory.pages import DIRECT_IO_BYTES

_RAM_BYTES = 512 + DIRECT_IO_BYTES  # at most this much of an unaligned storage stays in RAM
_CONGRUENT = 512  # O_DIRECT: file and memory addresses agree modulo this


class Declined(Exception):
    """Refusal of a route without room at present: the storage stays, and nothing failed."""


class Route(abc.ABC):
    """Way of one device type's storages out and back.

    Tokens order transfers with what a device computes. The tokens of this class order nothing: a
    processor has computed what it saves, and has read all bytes when a load returns.
    """

    def mark(self, device: torch.device) -> Any:
        """Return a token for all that was launched on `device` until now, which is a saving."""
        return None

    def mark_again(self, ready: Any) -> Any:
        """Return a token that includes the operator that did the saving."""
        return None

    def mark_part(self, ready: Any, device: torch.device) -> Any:
        """Return a token for all until now, for another part of a storage that has `ready`.

        None: another stream computes it, and no token orders a transfer with both.
        """
        return None

    @abc.abstractmethod
    def store(self, storage: torch.UntypedStorage, ready: Any) -> Any:
        """Copy the storage out after `ready`; the copy is complete on return."""

    @abc.abstractmethod
    def load(self, copy: Any, device: torch.device) -> tuple[torch.UntypedStorage, int, Any]:
        """Return a storage with the copy's bytes, their offset in it, and a token for `settle`."""

    def settle(self, ready: Any, storage: torch.UntypedStorage | None) -> None:
        """Order the current computation, which may use `storage`, after the transfer `ready`."""
        return

    @abc.abstractmethod
    def discard(self, copy: Any) -> None:
        """Free the copy's bytes in every tier, as soon as they are not in use; never waits."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the route's resources; no copy is alive."""


class FileRoute(Route):
    """Route from RAM to the file and back, without a staging copy.

    Writes go from the storage's own memory, reads land in the memory that becomes the tensor. The
    few bytes before the first and after the last aligned address stay in RAM: they count for the
    host tier, whose budget is `host_memory`.
    """

    def __init__(self, file: ExtentFile, ledger: Ledger, *, host_memory: int | None) -> None:
        self.file = file
        self._ledger = ledger
        self._host_memory = host_memory
        self._lock = threading.Lock()
        self._num_storing = 0  # each of them may take _RAM_BYTES

    def store(self, storage: torch.UntypedStorage, ready: None) -> StoredSpan:
        """Write the storage; raise StoreError and keeps nothing if that fails."""
        self._admit()
        try:
            start = time.perf_counter_ns()
            span = self.file.store(storage.data_ptr(), storage.nbytes())
            self._ledger.record_transfer(Link.DEVICE_TO_FILE, span.num_bytes, start)
            self._ledger.add(Tier.FILE, span.num_bytes)
            self._ledger.add(Tier.HOST, span.ram_bytes)
            return span
        finally:
            with self._lock:
                self._num_storing -= 1

    def _admit(self) -> None:
        """Count one more storage that is being written; raise Declined if it may not fit."""
        limit = self._host_memory
        with self._lock:
            needed = (self._num_storing + 1) * _RAM_BYTES
            if limit is not None and self._ledger.resident(Tier.HOST) + needed > limit:
                raise Declined(f"host_memory of {limit} bytes holds no more unaligned ends")
            self._num_storing += 1

    def load(
        self, copy: StoredSpan, device: torch.device
    ) -> tuple[torch.UntypedStorage, int, None]:
        """Read the span into fresh memory; raises StoreReadError if a byte is missing."""
        storage, shift = congruent_storage(copy.num_bytes, copy.address_offset)
        start = time.perf_counter_ns()
        self.file.load(copy, storage.data_ptr() + shift)
        self._ledger.record_transfer(Link.FILE_TO_DEVICE, copy.num_bytes, start)
        return storage, shift, None

    def discard(self, copy: StoredSpan) -> None:
        """Free the extent."""
        self.file.discard(copy)
        self._ledger.add(Tier.FILE, -copy.num_bytes)
        self._ledger.add(Tier.HOST, -copy.ram_bytes)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def congruent_storage(num_bytes: int, address_offset: int) -> tuple[torch.UntypedStorage, int]:
    """Return a CPU storage with `num_bytes` bytes from an address `address_offset` modulo 512.

    Kernels see the alignment they saw in the source, so they take the same code path and give
    the same bits. The second result is where in the storage those bytes begin.
    """
    storage = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    if storage.data_ptr() % _CONGRUENT == address_offset:
        return storage, 0
    storage = torch.empty(num_bytes + _CONGRUENT, dtype=torch.uint8, device="cpu").untyped_storage()
    return storage, (address_offset - storage.data_ptr()) % _CONGRUENT
