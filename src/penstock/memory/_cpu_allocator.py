"""Replace torch's CPU allocator while Penstock moves activations that live in RAM.

Offloading frees and allocates large blocks all the time. glibc either keeps what was freed, and the
peak that the operating system sees does not fall, or unmaps it, and every reuse pays page faults.
`cpu_allocator.cpp` does neither; this file builds it, counts its users, and logs where it cannot be
had.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import sys
import threading
from pathlib import Path

from penstock.codegen import load_library
from penstock.errors import BuildError
from penstock.memory import _fork
from penstock.memory.pages import trim_heap
from penstock.tables import Report
from penstock.units import parse_bytes

_logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_NO_LIMIT = ctypes.c_size_t(-1).value


@dataclasses.dataclass(frozen=True)
class AllocatorStatistics(Report, title="penstock.memory.CachingAllocator"):
    """Memory that the allocator holds, and its reuse; all zero where it is not available."""

    # In the order of `struct Statistics` of cpu_allocator.cpp.
    live_bytes: int = 0
    """Bytes in blocks in use, rounded up to 32 KiB each."""
    idle_bytes: int = 0
    """Resident bytes that no block uses."""
    mapped_bytes: int = 0
    """Resident bytes: live and idle."""
    peak_mapped_bytes: int = 0
    """The most that `mapped_bytes` has been since the last `trim`."""
    idle_limit_bytes: int | None = None
    """The limit on `idle_bytes`, or None."""
    num_live: int = 0
    """Blocks in use."""
    num_hits: int = 0
    """Allocations served from resident memory, so far."""
    num_misses: int = 0
    """Allocations that made further memory resident, so far."""
    huge_pages: bool = False
    """True if the kernel backs the blocks with pages of 2 MiB."""


_FUNCTIONS = {
    "penstock_allocator_prepare": (ctypes.c_char_p, []),
    "penstock_allocator_install": (ctypes.c_char_p, []),
    "penstock_allocator_uninstall": (None, []),
    "penstock_allocator_trim": (None, []),
    "penstock_allocator_set_idle_limit": (None, [ctypes.c_size_t]),
    "penstock_allocator_set_idle_window": (None, [ctypes.c_double]),
    "penstock_allocator_statistics": (None, [ctypes.c_void_p]),
}


class CachingAllocator:
    """CPU allocator of torch for as long as it has users; one per process.

    Blocks of 256 KiB and more come from memory that is reused without page faults, start on a
    multiple of 4096 bytes, and never make the process larger than its live blocks need at their
    peak. Smaller ones come from torch's own allocator. Tensors may outlive `release`.

    Where it cannot be had (no Linux, no C++ compiler) the same object is there, does not replace
    anything, and its `trim` has glibc return what it can.

    Example:
        >>> allocator = CachingAllocator.instance()
        >>> if allocator.acquire():
        ...     block = torch.empty(1 << 20)  # 4 MiB
        >>> allocator.release()
    """

    @staticmethod
    def instance() -> CachingAllocator:
        """Return the allocator of this process. Nothing is built or installed yet."""
        return _instance

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._reason: str | None = None
        self._num_acquired = 0
        _fork.set_right_in_children(self)

    def available(self) -> bool:
        """Return whether `acquire` can replace torch's allocator; the first call builds it.

        Where it cannot `reason` has the reason, which was logged once.
        """
        with self._lock:
            return self._prepare() is not None

    @property
    def reason(self) -> str:
        """Reason for which it is not available; "" where it is, or was not needed yet."""
        return self._reason or ""

    def acquire(self) -> bool:
        """Serve new CPU tensors from this allocator until as many calls of `release` follow.

        Returns:
            Whether torch uses it now. If not, `release` must be called all the same.
        """
        with self._lock:
            # Counted last: what interrupts the building leaves no user behind.
            library = self._prepare()
            is_used = library is not None and self._num_acquired > 0
            problem = None if library is None or is_used else library.penstock_allocator_install()
            if problem:
                self._give_up(problem.decode())
                library = None
            self._num_acquired += 1
            return library is not None

    def release(self) -> None:
        """Take back one `acquire`; after the last one torch's own allocator serves new tensors.

        Raises:
            RuntimeError: There have been more calls of `release` than of `acquire`.
        """
        with self._lock:
            if self._num_acquired == 0:
                raise RuntimeError("CachingAllocator.release() without an acquire() before it")
            self._num_acquired -= 1
            if self._num_acquired == 0 and self._library is not None:
                self._library.penstock_allocator_uninstall()

    def trim(self) -> None:
        """Return memory that no tensor uses to the operating system, and start a new peak.

        Where the C library is glibc, it returns what it holds too.
        """
        with self._lock:
            if self._library is not None:
                self._library.penstock_allocator_trim()
        trim_heap()

    def set_idle_limit(self, num_bytes: int | str | None) -> None:
        """Limit the bytes that are kept for reuse, now and from now on.

        There is no limit at first, because what is kept never raises the peak: before the resident
        bytes would exceed their former peak, idle ones are given back. A limit makes the process
        smaller between the peaks and costs page faults in every step.

        Example:
            >>> CachingAllocator.instance().set_idle_limit("64MiB")

        Args:
            num_bytes: At most so many idle bytes, as a number or as text such as "64MiB"; None for
                no limit. Ignored where the allocator is not available.

        Raises:
            TypeError: `num_bytes` is neither a number, a text nor None.
            ValueError: `num_bytes` is negative or not a size.
        """
        limit = _NO_LIMIT if num_bytes is None else parse_bytes(num_bytes, name="num_bytes")
        with self._lock:
            library = self._prepare()
            if library is not None:
                library.penstock_allocator_set_idle_limit(min(limit, _NO_LIMIT))

    def statistics(self) -> AllocatorStatistics:
        """Return what the allocator holds now and how it was used so far."""
        library = self._library
        if library is None:
            return AllocatorStatistics()
        raw = (ctypes.c_int64 * len(dataclasses.fields(AllocatorStatistics)))()
        library.penstock_allocator_statistics(raw)
        found = AllocatorStatistics(*raw)
        limit = found.idle_limit_bytes
        has_limit = limit is not None and limit < _NO_LIMIT >> 1  # the largest signed number
        return dataclasses.replace(
            found, idle_limit_bytes=limit if has_limit else None, huge_pages=bool(raw[-1])
        )

    def _prepare(self) -> ctypes.CDLL | None:
        """Build and load the library once; the caller holds the lock."""
        if self._library is not None or self._reason is not None:
            return self._library
        try:
            if not sys.platform.startswith("linux"):
                raise BuildError(f"it needs Linux, and this is {sys.platform}")
            library = load_library(
                "penstock_cpu_allocator", _SOURCE, include_torch=True, functions=_FUNCTIONS
            )
            if problem := library.penstock_allocator_prepare():
                raise BuildError(problem.decode())
            self._library = library
        except BuildError as error:
            self._give_up(str(error))
        return self._library

    def _give_up(self, reason: str) -> None:
        self._library, self._reason = None, reason
        _logger.info("torch's own CPU allocator stays: %s", reason)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread that is not there may hold the old one


_instance = CachingAllocator()
