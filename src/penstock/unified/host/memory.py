"""Memory for tables: page-aligned, in huge pages, touched before it is used; shared when needed.

Random rows of a large table miss the processor's translation cache on every row, so huge pages
decide how fast they are gathered. Linux gives them to private memory on request, to shared
memory mostly not. So a table begins as private memory, and moves into shared memory, without
change_lock its address, when it is first sent to another process, as PyTorch moves tensors.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.errors import CapacityError
from penstock.memory import available_ram
from penstock.units import format_bytes

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_HUGEPAGE = 14  # MADV_HUGEPAGE
_MAP_FIXED = 0x10
_HUGE_BYTES = 2 * 2**20
_LARGE_BYTES = 16 * 2**20  # less than this is often memory that is used again
_CHUNK_BYTES = 64 * 2**20  # touched, or moved, at a time
_LONG_BYTES = 8 * 2**30  # touching more than this is worth a progress bar
_PAGE_BYTES = mmap.PAGESIZE


class TableMemory:
    """Page-aligned memory of zeroes that can be shared with other processes.

    Attributes:
        num_bytes: Its length.
        address: Its first byte, for as long as this object or a tensor over it lives.
        descriptor: Descriptor of its file in memory once it is shared; closed with this object.
            Else None.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make private memory.

        Raises:
            CapacityError: There is not that much.
        """
        if num_bytes > available_ram():
            raise _capacity_error(num_bytes, f"{format_bytes(available_ram())} are available")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, _round_to_pages(num_bytes) + _HUGE_BYTES, flags=flags)
        except OSError as error:  # a limit of the process, or one of the machine on promises
            raise _capacity_error(num_bytes, os.strerror(error.errno or 0)) from error
        everything = torch.frombuffer(mapping, dtype=torch.uint8)
        gap = -everything.data_ptr() % _HUGE_BYTES
        self._adopt(everything[gap : gap + num_bytes], num_bytes, None)
        _madvise(self.address, _round_to_pages(num_bytes), _HUGEPAGE)  # where the kernel allows it

    @classmethod
    def attach(cls, descriptor: int, num_bytes: int) -> TableMemory:
        """Return memory that another process has shared; it closes `descriptor` in the end."""
        memory = cls.__new__(cls)
        mapping = mmap.mmap(descriptor, _round_to_pages(num_bytes))
        memory._adopt(
            torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes], num_bytes, descriptor
        )
        return memory

    def _adopt(self, content: torch.Tensor, num_bytes: int, descriptor: int | None) -> None:
        self._content = content
        self._lock = threading.Lock()
        self.num_bytes = num_bytes
        self.address = content.data_ptr()
        self.descriptor = descriptor

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)  # the mapping lives on in the tensors over it

    def share(self) -> int:
        """Make the memory one that other processes can map; returns its descriptor.

        Nothing may write to it meanwhile. Shared memory stays as it is.

        Raises:
            CapacityError: There is not enough memory to move a part of it.
        """
        with self._lock:
            if self.descriptor is None:
                descriptor = os.memfd_create("penstock-table", os.MFD_CLOEXEC)
                try:
                    os.truncate(descriptor, _round_to_pages(self.num_bytes))
                    self._move_all(descriptor)
                except OSError as error:
                    os.close(descriptor)  # moved chunks stay mapped, and are moved again
                    raise _capacity_error(self.num_bytes, str(error)) from error
                self.descriptor = descriptor
            return self.descriptor

    def _move_all(self, descriptor: int) -> None:
        """Move all chunks, by several threads; they have the memory policy of this one."""
        starts = range(0, self.num_bytes, _CHUNK_BYTES)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            moved = threads.map(lambda start: self._move(start, descriptor), starts)
            for _ in _show_progress(moved, self.num_bytes):
                pass

    def _move(self, start: int, descriptor: int) -> int:
        """Copy a chunk into the file, and map that in its place; returns its length.

        It is copied through a mapping, because the kernel gives shared memory huge pages where it
        is touched, not where it is written, and only where they are asked for.
        """
        num_bytes = min(_CHUNK_BYTES, self.num_bytes - start)
        length = _round_to_pages(num_bytes)
        room = _map(None, length + _HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        try:
            shared = room + -room % _HUGE_BYTES
            _map(shared, length, mmap.MAP_SHARED | _MAP_FIXED, descriptor, start)
            _madvise(shared, length, _HUGEPAGE)
            # Pages that cannot be had are an error here; where they are touched, a signal.
            number = _madvise(shared, length, _POPULATE_WRITE)
            if number == errno.EINVAL:  # an older kernel
                os.posix_fallocate(descriptor, start, length)
            elif number:
                raise OSError(number, os.strerror(number))
            ctypes.memmove(shared, self.address + start, num_bytes)
        finally:
            _libc().munmap(ctypes.c_void_p(room), ctypes.c_size_t(length + _HUGE_BYTES))
        _map(self.address + start, length, mmap.MAP_SHARED | _MAP_FIXED, descriptor, start)
        _madvise(self.address + start, length, _HUGEPAGE)
        return num_bytes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as a contiguous tensor on the CPU, which keeps it mapped."""
        return self._content.view(dtype).view(shape)

    def touch(self) -> None:
        """Populate all pages now, by several threads, with a progress bar where that takes long.

        Raises:
            CapacityError: There is not enough memory.
        """
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            done = threads.map(self._touch_chunk, range(0, self.num_bytes, _CHUNK_BYTES))
            for _ in _show_progress(done, self.num_bytes):
                pass

    def _touch_chunk(self, start: int) -> int:
        num_bytes = min(_CHUNK_BYTES, self.num_bytes - start)
        number = _madvise(self.address + start, num_bytes, _POPULATE_WRITE)
        if number == errno.EINVAL:  # an older kernel
            self._content[start : start + num_bytes : _PAGE_BYTES].zero_()
        elif number:
            raise _capacity_error(self.num_bytes, os.strerror(number))
        return num_bytes


def _capacity_error(num_bytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"a table of {format_bytes(num_bytes)} does not fit into memory: {why}. Give a smaller "
        "table, raise the memory limit of this container or process, or keep the table in a file: "
        'penstock.unify("table.npy").'
    )


def _round_to_pages(num_bytes: int) -> int:
    """Return the bytes of as many whole pages, at least one."""
    return max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for huge pages for a large tensor that was not written to yet.

    A batch of many rows in new memory spends most of its time in page faults: with pages of 4 KiB
    there are 512 times as many.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= _LARGE_BYTES:
        start = -(-tensor.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
        end = (tensor.data_ptr() + num_bytes) // _HUGE_BYTES * _HUGE_BYTES
        _madvise(start, end - start, _HUGEPAGE)


def _madvise(address: int, num_bytes: int, advice: int) -> int:
    """Give the kernel advice about a range of pages; returns 0 or the error's number."""
    failed = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
    return ctypes.get_errno() if failed else 0


def _map(address: int | None, num_bytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map memory, for reading and writing; returns its address."""
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


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _show_progress(done: Iterator[int], total_bytes: int) -> Iterator[int]:
    """Pass the byte counts on, with a progress bar on the terminal where that takes a while."""
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
