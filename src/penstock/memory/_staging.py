"""Host memory for bytes on their way between tiers, under a budget that is never exceeded.

Buffers are cut from a few large slabs, because pinning memory is slow and is done once a slab. A
request beyond the budget waits: this is the back-pressure that keeps a fast producer from filling
the memory ahead of a slow link.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from penstock.errors import CapacityError
from penstock.memory._extents import ExtentAllocator
from penstock.memory._mailbox import Mailbox
from penstock.memory.pages import map_anonymous, round_down, round_up
from penstock.memory.raw_memory import address_of
from penstock.units import format_bytes, parse_bytes


class StagingBuffer:
    """Page-aligned memory lent by a `StagingPool`, until `release` or until it dies.

    Usable in a `with` block, which releases it.

    Attributes:
        address: Where it begins, a multiple of 4096.
        num_bytes: Bytes asked for.
        view: The same memory as a writable view. After `release` it belongs to another buffer.
    """

    def __init__(self, pool: StagingPool, slab: _Slab, offset: int, num_bytes: int) -> None:
        self._pool = pool
        self._place: tuple[_Slab, int] | None = (slab, offset)
        self.num_bytes = num_bytes
        self.address = slab.address + offset
        self.view = memoryview(slab.memory)[offset : offset + num_bytes]

    def release(self) -> None:
        """Give the memory back to the pool, without waiting; further calls do nothing."""
        place, self._place = self._place, None
        if place is not None:
            self._pool._mailbox.put(place)

    def __enter__(self) -> StagingBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class _Slab:
    """One mapping, and which parts of it are lent out."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = map_anonymous(num_bytes)
        self.address = address_of(self.memory)
        self.num_bytes = num_bytes
        self.extents = ExtentAllocator(num_bytes)


class StagingPool:
    """Page-aligned buffers, lent out of slabs whose sum stays within a budget; thread-safe.

    A slab is mapped when the others have no room. When the budget has no room for another one,
    unused slabs are given back to the operating system first. Requests that wait are served first
    come, first served, so a large one is not starved by small ones.

    Example:
        >>> pool = StagingPool("1MiB")
        >>> with pool.acquire(5000) as buffer:
        ...     buffer.view[:3] = b"abc"
        >>> pool.used_bytes, pool.peak_bytes
        (0, 1048576)

    Args:
        budget_bytes: The most bytes to map, as an int or text such as `"256MiB"`; rounded down to
            a multiple of 4096.
        slab_bytes: How much to map at once, where the budget and the request do not ask for
            another length.
        on_map: Called with address and bytes of each new slab, to page-lock and count it; if it
            raises, the slab is unmapped and `acquire` raises the same.
        on_unmap: Called with address and bytes before a slab goes.

    Raises:
        ValueError, TypeError: `budget_bytes` or `slab_bytes` is not a size.
    """

    def __init__(
        self,
        budget_bytes: int | str,
        *,
        slab_bytes: int | str = "64MiB",
        on_map: Callable[[int, int], object] | None = None,
        on_unmap: Callable[[int, int], object] | None = None,
    ) -> None:
        budget_bytes = parse_bytes(budget_bytes, name="budget_bytes")
        self.budget_bytes = round_down(budget_bytes)
        self._slab_bytes = round_up(parse_bytes(slab_bytes, name="slab_bytes"))
        self._on_map = on_map
        self._on_unmap = on_unmap
        self._mailbox: Mailbox[tuple[_Slab, int]] = Mailbox(self._take_back)
        self._slabs: list[_Slab] = []
        self._mapped_bytes = 0
        self._peak_bytes = 0
        # Requests that wait, in order of arrival; a SimpleQueue's put is safe in destructors.
        self._waiting: deque[SimpleQueue[None]] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers that are lent out, each rounded up to 4096."""
        with self._mailbox:
            return sum(slab.extents.used_bytes for slab in self._slabs)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._mailbox:
            return self._mapped_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `mapped_bytes` has been."""
        with self._mailbox:
            return self._peak_bytes

    def acquire(self, num_bytes: int, timeout: float | None = None) -> StagingBuffer:
        """Borrow a buffer; waits while there is no room for it.

        Args:
            num_bytes: Bytes, at least 1; what counts is this rounded up to 4096.
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Returns:
            The buffer, with arbitrary contents.

        Raises:
            ValueError: `num_bytes` is below 1.
            CapacityError: It is more than the whole budget, or no room came up in time.
        """
        if round_up(num_bytes) > self.budget_bytes:
            raise CapacityError(
                f"a staging buffer of {format_bytes(round_up(num_bytes))} exceeds the whole budget "
                f"of {format_bytes(self.budget_bytes)}; raise the budget or move less at once"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        turn: SimpleQueue[None] = SimpleQueue()
        with self._mailbox:
            self._waiting.append(turn)
        try:
            while True:
                with self._mailbox:
                    buffer = self._take(num_bytes) if self._waiting[0] is turn else None
                if buffer is not None:
                    return buffer
                self._wait(turn, deadline, num_bytes)
        finally:
            with self._mailbox:
                self._waiting.remove(turn)
                self._wake_first()

    def try_acquire(self, num_bytes: int) -> StagingBuffer | None:
        """Borrow a buffer as `acquire` does if there is room now and no request waits; else None.

        Raises:
            ValueError: `num_bytes` is below 1.
        """
        with self._mailbox:
            return None if self._waiting else self._take(num_bytes)

    def close(self) -> None:
        """Unmap everything; no buffer may be in use any more."""
        with self._mailbox:
            for slab in list(self._slabs):
                self._unmap(slab)

    # The rest runs under the lock, except `_wait`.

    def _take(self, num_bytes: int) -> StagingBuffer | None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be at least 1; got {num_bytes}")
        for slab in self._slabs:
            offset = slab.extents.allocate(num_bytes)
            if offset is not None:
                return StagingBuffer(self, slab, offset, num_bytes)
        return self._take(num_bytes) if self._map(round_up(num_bytes)) else None

    def _map(self, length: int) -> bool:
        """Map a slab for a buffer of `length` bytes; False if the budget has no room for it."""
        unused = [slab for slab in self._slabs if not slab.extents.used_bytes]
        room_bytes = self.budget_bytes - self._mapped_bytes
        if room_bytes + sum(slab.num_bytes for slab in unused) < length:
            return False
        while self.budget_bytes - self._mapped_bytes < length:
            self._unmap(unused.pop())
        slab = _Slab(min(max(self._slab_bytes, length), self.budget_bytes - self._mapped_bytes))
        if self._on_map is not None:
            self._on_map(slab.address, slab.num_bytes)
        self._slabs.append(slab)
        self._mapped_bytes += slab.num_bytes
        self._peak_bytes = max(self._peak_bytes, self._mapped_bytes)
        return True

    def _unmap(self, slab: _Slab) -> None:
        if self._on_unmap is not None:
            self._on_unmap(slab.address, slab.num_bytes)
        self._slabs.remove(slab)
        self._mapped_bytes -= slab.num_bytes

    def _wait(self, turn: SimpleQueue[None], deadline: float | None, num_bytes: int) -> None:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise CapacityError(
                f"no room for a staging buffer of {format_bytes(round_up(num_bytes))} in time: "
                f"{format_bytes(self.used_bytes)} of {format_bytes(self.budget_bytes)} are lent "
                "out; release buffers, raise the budget, or wait longer"
            )
        try:
            turn.get(timeout=remaining)
        except Empty:
            return  # the caller looks once more and then gives up

    def _take_back(self, place: tuple[_Slab, int]) -> None:
        slab, offset = place
        slab.extents.free(offset)
        self._wake_first()

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[0].put(None)
