"""Memory for tables: page-aligned, shared between processes, touched before it is used.

It is a mapping of a file in memory (`memfd_create`), so that another process can map the same bytes
by a descriptor, and so that a fork does not turn it into two copies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.errors import CapacityError
from penstock.units import format_bytes

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HUGEPAGE = 14  # MADV_HUGEPAGE
_CHUNK_BYTES = 64 * 2**20  # touched by one thread at a time
_LONG_BYTES = 8 * 2**30  # touching more than this is worth a progress bar
_PAGE_BYTES = mmap.PAGESIZE


class SharedMemory:
    """`num_bytes` bytes of zeroes, page-aligned, that other processes can map.

    Attributes:
        address: Where it begins; valid while this object or a tensor over it lives.
        num_bytes: Its length.
        descriptor: Of the file in memory; closed with this object.
    """

    def __init__(self, num_bytes: int, *, descriptor: int | None = None) -> None:
        """Make new memory, or map that of `descriptor`, which then belongs to this object."""
        self.num_bytes = num_bytes
        self.descriptor = _new_file(num_bytes) if descriptor is None else descriptor
        self._mapping = mmap.mmap(self.descriptor, max(num_bytes, 1))
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        _madvise(self.address, max(num_bytes, 1), _HUGEPAGE)  # where the kernel allows it

    def __del__(self) -> None:
        os.close(self.descriptor)  # the mapping lives on in the tensors over it

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory as a contiguous tensor on the CPU, which keeps it mapped."""
        return self._bytes[: self.num_bytes].view(dtype).view(shape)

    def touch(self) -> None:
        """Have the kernel give all pages now, by several threads; a bar is shown for long ones.

        Raises:
            CapacityError: there is not enough memory.
        """
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            done = threads.map(self._touch_chunk, range(0, self.num_bytes, _CHUNK_BYTES))
            for _ in _shown(done, self.num_bytes):
                pass

    def _touch_chunk(self, start: int) -> int:
        num_bytes = min(_CHUNK_BYTES, self.num_bytes - start)
        number = _madvise(self.address + start, num_bytes, _POPULATE_WRITE)
        if number == errno.EINVAL:  # an older kernel
            for offset in range(start, start + num_bytes, _PAGE_BYTES):
                self._mapping[offset] = self._mapping[offset]
        elif number:
            raise CapacityError(
                f"a table of {format_bytes(self.num_bytes)} does not fit into memory: "
                f"{os.strerror(number)}. Give a smaller table, raise the memory limit of this "
                "container, or keep the table in a file: penstock.unify('table.npy')."
            )
        return num_bytes


def _new_file(num_bytes: int) -> int:
    descriptor = os.memfd_create("penstock-table", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, max(num_bytes, 1))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """Give the kernel advice about a range of pages; returns 0 or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
    return ctypes.get_errno() if failed else 0


def _shown(done: Iterator[int], total_bytes: int) -> Iterator[int]:
    """The same bytes, with a progress bar on the terminal where that takes a while."""
    if total_bytes < _LONG_BYTES:
        yield from done
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"preparing {format_bytes(total_bytes)}", total=total_bytes)
        for num_bytes in done:
            progress.update(task, advance=num_bytes)
            yield num_bytes
