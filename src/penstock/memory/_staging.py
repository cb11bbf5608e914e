"""Buffers that bytes pass through on their way between tiers, under a budget that is never
exceeded.

Whoever wants a buffer beyond the budget waits: this is the back-pressure that keeps a fast producer
from filling the memory ahead of a slow link.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from queue import Empty, SimpleQueue

from penstock.errors import CapacityError
from penstock.memory._extents import round_up
from penstock.memory._mailbox import Mailbox
from penstock.memory._raw_memory import address_of
from penstock.units import format_bytes, parse_bytes


class StagingBuffer:
    """Page-aligned memory lent by a `StagingPool`, until `release` or until it dies.

    Usable in a `with` block, which releases it.

    Attributes:
        address: Where it begins, a multiple of the page size.
        num_bytes: Bytes asked for.
        view: The same memory as a writable view. After `release` it belongs to someone else.
    """

    def __init__(self, pool: StagingPool, memory: mmap.mmap, num_bytes: int) -> None:
        self._pool = pool
        self._memory: mmap.mmap | None = memory
        self.num_bytes = num_bytes
        self.address = address_of(memory)
        self.view = memoryview(memory)[:num_bytes]

    def release(self) -> None:
        """Give the memory back to the pool, without waiting; further calls do nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pool._give_back(memory)

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class StagingPool:
    """Lends page-aligned buffers whose sum, idle ones included, stays within a budget; thread-safe.

    Buffers are kept for requests of the same length and dropped when another length needs the room.
    Who waits is served first come first served, so a large request is not starved by small ones.

    Example:
        >>> pool = StagingPool("1MiB")
        >>> with pool.acquire(5000) as buffer:
        ...     buffer.view[:3] = b"abc"
        >>> pool.used_bytes, pool.peak_bytes
        (0, 8192)

    Args:
        budget_bytes: The most bytes to hold, as an int or text such as `"256MiB"`.

    Raises:
        ValueError, TypeError: `budget_bytes` is not a size.
    """

    def __init__(self, budget_bytes: int | str) -> None:
        self.budget_bytes = parse_bytes(budget_bytes, name="budget_bytes")
        self._mailbox: Mailbox[mmap.mmap] = Mailbox(self._take_back)
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        # Whoever waits, in order of arrival; SimpleQueue, because its put is safe in destructors.
        self._waiting: deque[SimpleQueue[None]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers that are lent out, each rounded up to 4096."""
        with self._mailbox:
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the pool has held, idle buffers included."""
        with self._mailbox:
            return self._peak_bytes

    def acquire(self, num_bytes: int, timeout: float | None = None) -> StagingBuffer:
        """Borrow a buffer; waits while the budget has no room for it.

        Args:
            num_bytes: Bytes, at least 1; what counts is this rounded up to 4096.
            timeout: Seconds to wait at most; 0 does not wait, None waits for as long as it takes.

        Returns:
            The buffer, with arbitrary contents.

        Raises:
            ValueError: `num_bytes` is below 1.
            CapacityError: It is more than the whole budget, or no room came up in time.
        """
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be at least 1; got {num_bytes}")
        length = round_up(num_bytes)
        if length > self.budget_bytes:
            raise CapacityError(
                f"a staging buffer of {format_bytes(length)} exceeds the whole budget of "
                f"{format_bytes(self.budget_bytes)}; raise the budget or move less at once"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        turn: SimpleQueue[None] = SimpleQueue()
        with self._mailbox:
            self._waiting.append(turn)
        try:
            while True:
                with self._mailbox:
                    memory = self._take(length) if self._waiting[0] is turn else None
                if memory is not None:
                    return StagingBuffer(self, memory, num_bytes)
                self._wait(turn, deadline, length)
        finally:
            with self._mailbox:
                self._waiting.remove(turn)
                self._wake_first()

    def _take(self, length: int) -> mmap.mmap | None:
        """Find memory for a request within the budget; runs under the lock."""
        if self._used_bytes + length > self.budget_bytes:
            return None
        same_length = self._idle.get(length)
        if same_length:
            memory = same_length.pop()
            self._idle_bytes -= length
        else:
            # The dictionary holds the lengths in order of first use: drop the oldest kind first.
            while self._used_bytes + self._idle_bytes + length > self.budget_bytes:
                oldest = next(iter(self._idle))
                if self._idle[oldest]:
                    self._idle[oldest].pop()
                    self._idle_bytes -= oldest
                else:
                    del self._idle[oldest]
            memory = mmap.mmap(-1, length)
        self._used_bytes += length
        self._peak_bytes = max(self._peak_bytes, self._used_bytes + self._idle_bytes)
        return memory

    def _wait(self, turn: SimpleQueue[None], deadline: float | None, length: int) -> None:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise CapacityError(
                f"no room for a staging buffer of {format_bytes(length)} in time: "
                f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} are lent "
                "out; release buffers, raise the budget, or wait longer"
            )
        try:
            turn.get(timeout=remaining)
        except Empty:
            return  # the caller looks once more and then gives up

    def _give_back(self, memory: mmap.mmap) -> None:
        self._mailbox.put(memory)

    def _take_back(self, memory: mmap.mmap) -> None:
        length = len(memory)
        self._idle.setdefault(length, []).append(memory)
        self._idle_bytes += length
        self._used_bytes -= length
        self._wake_first()

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[0].put(None)
