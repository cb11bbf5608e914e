"""Pages of memory: their sizes, rounding to them, mappings, and advice to the kernel about them.

Addresses are numbers here, as in `raw_memory`: the caller keeps alive what lies at them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os

PAGE_BYTES = mmap.PAGESIZE
"""A page of this machine: what mappings consist of."""
HUGE_PAGE_BYTES = 2 * 2**20
"""A huge page: one entry of the processor's translation cache instead of 512."""
DIRECT_IO_BYTES = 4096
"""Offsets and lengths of direct file I/O are multiples of this, whatever a page is."""

# Of Linux; another kernel refuses the advice, and memory is as good without.
MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
MADV_POPULATE_WRITE = 23  # since Linux 5.14
MAP_FIXED = 0x10


def round_up(num_bytes: int, multiple: int = DIRECT_IO_BYTES) -> int:
    """Return the smallest multiple that is not below `num_bytes`.

    Example:
        >>> round_up(1), round_up(4096), round_up(10, 8)
        (4096, 4096, 16)

    Args:
        num_bytes: Bytes, at least 0.
        multiple: What the result is a multiple of; by default what direct file I/O demands.
    """
    return -(-num_bytes // multiple) * multiple


def round_down(num_bytes: int, multiple: int = DIRECT_IO_BYTES) -> int:
    """Return the largest multiple that is not above `num_bytes`; arguments as for `round_up`.

    Example:
        >>> round_down(4095), round_down(4096), round_down(10, 8)
        (0, 4096, 8)
    """
    return num_bytes // multiple * multiple


def map_anonymous(num_bytes: int, *, private: bool = False, huge_pages: bool = False) -> mmap.mmap:
    """Map zeroed memory that belongs to no file; it is unmapped with the last use of its buffer.

    Example:
        >>> len(map_anonymous(100_000))
        100000

    Args:
        num_bytes: Its length; at least one byte is mapped.
        private: Whether a forked process gets a copy instead of the same memory. Linux gives huge
            pages to private memory for the asking, to shared memory mostly not.
        huge_pages: Whether to ask for huge pages, where there is room for one.

    Raises:
        OSError: The process or the machine has no such amount of memory.
    """
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    mapping = mmap.mmap(-1, max(1, num_bytes), flags=kind | mmap.MAP_ANONYMOUS)
    if huge_pages and num_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(MADV_HUGEPAGE)
    return mapping


def advise(address: int, num_bytes: int, advice: int) -> int:
    """Give the kernel advice (madvise) about memory from a multiple of `PAGE_BYTES` on.

    The advice is `MADV_HUGEPAGE`, `MADV_POPULATE_WRITE` or another of the kernel's.

    Returns:
        0, or the error's number.
    """
    failed = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
    return ctypes.get_errno() if failed else 0


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the kernel to make memory that was not written to yet of huge pages; it may refuse.

    New memory is slow because the kernel makes its pages at the first write, and of 4 KiB there are
    512 times as many. Only the huge pages that lie wholly within it are asked for.
    """
    begin = round_up(address, HUGE_PAGE_BYTES)
    end = round_down(address + num_bytes, HUGE_PAGE_BYTES)
    if begin < end:
        advise(begin, end - begin, MADV_HUGEPAGE)


def map_at(address: int | None, num_bytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map memory for reading and writing, as mmap(2) does, and return its address.

    Unlike `mmap.mmap` it takes an address (with `MAP_FIXED`), and nothing unmaps the memory but
    `unmap`.

    Args:
        address: Where the mapping is to begin; None: anywhere.
        num_bytes: Its length.
        flags: Such as `mmap.MAP_SHARED | MAP_FIXED`.
        descriptor: The file; -1 for none.
        offset: Byte of the file at which the mapping begins, a multiple of `PAGE_BYTES`.

    Raises:
        OSError: The kernel refuses.
    """
    mapped = _libc().mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        flags,
        descriptor,
        ctypes.c_long(offset),
    )
    if mapped in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped


def unmap(address: int, num_bytes: int) -> None:
    """Unmap what `map_at` mapped."""
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def trim_heap() -> None:
    """Give memory that malloc keeps for reuse back to the operating system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(ctypes.c_size_t(0))
