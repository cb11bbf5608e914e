"""Memory by address: views and copies for file I/O, where a tensor offers only a pointer.

Nothing here owns memory. The caller keeps what lies at an address alive until the call returns.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.memory.pages import map_anonymous

MAX_VIEW_BYTES = 8 * 2**20

# One array type for all lengths: ctypes would otherwise make and keep a class for every length it
# sees.
_Memory = ctypes.c_char * MAX_VIEW_BYTES


def view_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of raw memory.

    Example:
        >>> memory = ctypes.create_string_buffer(b"abc")
        >>> bytes(view_at(ctypes.addressof(memory), 3))
        b'abc'

    Args:
        address: Where it begins.
        num_bytes: Its length, at most 8 MiB.
    """
    return memoryview(_Memory.from_address(address)).cast("B")[:num_bytes]


def copy_bytes(destination: int, source: int, num_bytes: int) -> None:
    """Copy bytes between addresses that do not overlap, without the interpreter lock."""
    ctypes.memmove(destination, source, num_bytes)


def address_of(buffer: mmap.mmap) -> int:
    """Return the address of a mapping, which stays valid while the mapping lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class BounceBuffers:
    """Small page-aligned buffers for bytes that lie where direct I/O cannot take them.

    There are as many as threads bounced at the same time.
    """

    NUM_BYTES = 256 * 1024

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()

    @contextmanager
    def take(self) -> Iterator[int]:
        """Lend a buffer of `NUM_BYTES` and give its address."""
        try:
            buffer = self._idle.pop()
        except IndexError:
            buffer = map_anonymous(self.NUM_BYTES)
        try:
            yield address_of(buffer)
        finally:
            self._idle.append(buffer)
