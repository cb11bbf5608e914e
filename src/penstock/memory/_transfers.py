"""Transfers between raw memory and a file, whole or not at all.

A transfer either moves every byte or raises. The operating system may move fewer bytes than it was
asked to, at any count; direct I/O can only go on from an aligned position, so what lies beyond the
last aligned one is moved again. A throttle shares a disk fairly, or stands for a slower one.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import StoreError, StoreFullError, StoreReadError, StoreWriteError
from penstock.memory import _fork
from penstock.memory._extents import FULL_ERRNOS
from penstock.memory._read_queue import QueuedReads, can_queue_reads
from penstock.memory.pages import round_up
from penstock.memory.raw_memory import MAX_VIEW_BYTES, BounceBuffers, copy_bytes, view_at

_logger = logging.getLogger(__name__)

_MAX_READ_RETRIES = 3
_MAX_MOVES_WITHOUT_PROGRESS = 3
_BURST_SECONDS = 0.010


def _pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write; every byte to the file goes through here, so that tests can make it fail."""
    return os.pwritev(fd, buffers, offset)


def _preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read; every byte from the file goes through here or `_queue_reads`, so that tests can make it
    fail.
    """
    return os.preadv(fd, buffers, offset)


def _queue_reads(fd: int, requests: np.ndarray, alignment: int, memory: object) -> QueuedReads:
    return QueuedReads(fd, requests, alignment, memory)


class Throttle:
    """Limit on the rate at which bytes pass, first come first served; thread-safe.

    A request of n bytes takes n / rate seconds, as it would on a device of that rate, so that the
    rate measured over busy time is the rate asked for. Idle time is credited up to 10 ms, which
    covers the real transfer between two requests.

    Example:
        >>> throttle = Throttle(1e9)
        >>> throttle.acquire(1_000_000)  # returns within 1 ms

    Args:
        bytes_per_second: The rate, above 0.

    Raises:
        ValueError: The rate is not above 0.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be above 0; got {bytes_per_second}")
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._booked_until = time.monotonic()  # all time before this belongs to earlier requests

    def acquire(self, num_bytes: int) -> None:
        """Sleep until a request's bytes may have passed; also more than a second's worth."""
        with self._lock:
            now = time.monotonic()
            begin = max(self._booked_until, now - _BURST_SECONDS)
            self._booked_until = end = begin + num_bytes / self.bytes_per_second
        # Outside the lock: the turn is booked, later requests only need to book theirs behind it.
        if end > now:
            time.sleep(end - now)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfers between raw memory and one file; thread-safe."""

    path: str  # for messages
    address_alignment: int  # of memory that needs no copy, in bytes
    length_alignment: int  # of file offsets and lengths, in bytes
    write_throttle: Throttle | None
    read_throttle: Throttle | None
    bounce: BounceBuffers = field(default_factory=BounceBuffers)

    def split(self, address: int, num_bytes: int) -> tuple[int, int]:
        """Return how long the head and the aligned middle of a memory range are, in bytes.

        A range without an aligned middle counts as all middle: it moves through a padded buffer.
        """
        head_bytes = -address % self.address_alignment
        middle_bytes = num_bytes - head_bytes
        middle_bytes -= middle_bytes % self.length_alignment
        return (head_bytes, middle_bytes) if middle_bytes > 0 else (0, num_bytes)

    def write(self, fd: int, offset: int, address: int, num_bytes: int) -> None:
        """Write memory to the file; its blocks are written whole, so padding follows the end."""
        direct_bytes = self._direct_bytes(address, num_bytes)
        self._move(fd, offset, address, direct_bytes, writes=True)
        for at, length in _chunks(direct_bytes, num_bytes):
            with self.bounce.take() as buffer:
                copy_bytes(buffer, address + at, length)
                padded = round_up(length, self.length_alignment)
                self._move(fd, offset + at, buffer, padded, writes=True)

    def read(self, fd: int, offset: int, address: int, num_bytes: int) -> None:
        """Read from an aligned offset of the file into memory."""
        direct_bytes = self._direct_bytes(address, num_bytes)
        self._move(fd, offset, address, direct_bytes, writes=False)
        for at, length in _chunks(direct_bytes, num_bytes):
            with self.bounce.take() as buffer:
                padded = round_up(length, self.length_alignment)
                self._move(fd, offset + at, buffer, padded, writes=False)
                copy_bytes(address + at, buffer, length)

    @property
    def queues_reads(self) -> bool:
        """True if there are reads that go on by themselves."""
        return self.read_throttle is None and can_queue_reads()

    def start_reads(self, fd: int, requests: np.ndarray, memory: object) -> QueuedReads:
        """Start reads that go on by themselves; those that then were not whole are to be repeated.

        Args:
            fd: The file, open until they have ended.
            requests: Offset, address and bytes of each, int64 `(n, 3)`.
            memory: What they read into.

        Raises:
            ValueError: An address or length is not aligned.
            StoreError: There is no queue for this file.
        """
        length_alignment = self.length_alignment
        if not self.queues_reads:
            raise StoreError(
                f"reads of store {self.path!r} cannot be queued: call `read` in threads",
                path=self.path,
            )
        _, addresses, lengths = requests.T.tolist()
        # Numbers are multiples of one if their greatest common divisor is.
        if math.gcd(*addresses) % self.address_alignment or math.gcd(*lengths) % length_alignment:
            raise ValueError(
                f"queued reads need addresses that are multiples of {self.address_alignment} and "
                f"lengths of {length_alignment}; got {requests[:5, 1:].tolist()}"
            )
        return _queue_reads(fd, requests, length_alignment, memory)

    def _direct_bytes(self, address: int, num_bytes: int) -> int:
        if address % self.address_alignment:
            return 0
        return num_bytes - num_bytes % self.length_alignment

    def _move(self, fd: int, offset: int, address: int, num_bytes: int, *, writes: bool) -> None:
        """Move all bytes by requests of at most 8 MiB; a short one is continued where aligned."""
        move_once = self._write_once if writes else self._read_once
        throttle = self.write_throttle if writes else self.read_throttle
        num_done = num_stuck = 0
        while num_done < num_bytes:
            view = view_at(address + num_done, min(num_bytes - num_done, MAX_VIEW_BYTES))
            if throttle is not None:
                throttle.acquire(len(view))
            num_moved = move_once(fd, view, offset + num_done)
            num_new = num_moved - num_moved % self.length_alignment
            num_done += num_new
            num_stuck = 0 if num_new else num_stuck + 1
            if num_stuck > _MAX_MOVES_WITHOUT_PROGRESS:
                problem = "file system refuses it" if writes else "file is shorter than it was"
                raise (StoreWriteError if writes else StoreReadError)(
                    f"store {self.path!r} moved {num_moved} of {len(view)} bytes at offset "
                    f"{offset + num_done} and would not move more; the {problem}",
                    path=self.path,
                    offset=offset + num_done,
                )

    def _write_once(self, fd: int, view: memoryview, offset: int) -> int:
        try:
            return _pwritev(fd, [view], offset)
        except OSError as error:
            is_full = error.errno in FULL_ERRNOS
            problem = "ran full while writing" if is_full else "could not write"
            remedy = "check the disk or pass another one"
            if is_full:
                remedy = "free space there, lift the limit, or offload less"
            raise (StoreFullError if is_full else StoreWriteError)(
                f"store {self.path!r} {problem} {len(view)} bytes at offset {offset}: "
                f"{error.strerror} (errno {error.errno}); {remedy}",
                path=self.path,
                offset=offset,
                errno=error.errno,
            ) from error

    def _read_once(self, fd: int, view: memoryview, offset: int) -> int:
        num_retries = 0
        while True:
            try:
                # A fork must wait for reads: see _fork.
                with _fork.read_gate:
                    return _preadv(fd, [view], offset)
            except OSError as error:
                if error.errno == errno.EIO and num_retries < _MAX_READ_RETRIES:
                    num_retries += 1
                    _logger.warning("store %r: EIO at offset %d, reading again", self.path, offset)
                    continue
                raise StoreReadError(
                    f"store {self.path!r} could not read {len(view)} bytes at offset {offset}: "
                    f"{error.strerror} (errno {error.errno}), after {num_retries} retries; check "
                    "the disk",
                    path=self.path,
                    offset=offset,
                    errno=error.errno,
                ) from error


def _chunks(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut `[start, end)` into pieces that fit a bounce buffer, as (start, length)."""
    for at in range(start, end, BounceBuffers.NUM_BYTES):
        yield at, min(BounceBuffers.NUM_BYTES, end - at)
