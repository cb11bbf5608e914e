"""Memory for tables: page-aligned, in huge pages, touched before it is used; shared when needed.

Random rows of a large table miss the processor's translation cache on every row, so huge pages
decide how fast they are gathered. Linux gives them to private memory on request, to shared
memory mostly not. So a table begins as private memory, and moves into shared memory, without
changing its address, when it is first sent to another process, as PyTorch moves tensors.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable

import torch

from penstock.errors import CapacityError
from penstock.memory import WorkerThreads, available_ram, pages
from penstock.memory.pages import (
    HUGE_PAGE_BYTES,
    MADV_HUGEPAGE,
    MADV_POPULATE_WRITE,
    MAP_FIXED,
    PAGE_BYTES,
    advise,
    map_anonymous,
    map_at,
    round_up,
    unmap,
)
from penstock.units import format_bytes

_LARGE_BYTES = 16 * 2**20  # less than this is often memory that is used again
_CHUNK_BYTES = 64 * 2**20  # touched, or moved, at a time
_LONG_BYTES = 8 * 2**30  # touching more than this is worth a progress bar

_sharing = threading.Lock()  # one for all memory: a forked child renews it


class TableMemory:
    """Page-aligned memory of zeroes that can be shared with other processes.

    Attributes:
        num_bytes: Its length.
        address: Its first byte, for as long as this object or a tensor over it lives.
        descriptor: Descriptor of its file in memory once it is shared; closed with this object.
            Else None.
    """

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        """Make private memory, or map what another process has shared; closes `descriptor` then.

        Raises:
            CapacityError: There is not that much.
        """
        self.num_bytes, self.descriptor = num_bytes, descriptor
        if descriptor is None:
            self._content = _map_private(num_bytes)
        else:
            mapping = mmap.mmap(descriptor, _round_to_pages(num_bytes))
            self._content = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
        self.address = self._content.data_ptr()

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)  # the mapping lives on in the tensors over it

    def share(self) -> int:
        """Make the memory one that other processes can map; returns its descriptor.

        Nothing may write to it meanwhile. Shared memory stays as it is.

        Raises:
            CapacityError: There is not enough memory to move a part of it.
        """
        with _sharing:
            if self.descriptor is None:
                descriptor = os.memfd_create("penstock-table", os.MFD_CLOEXEC)
                try:
                    os.truncate(descriptor, _round_to_pages(self.num_bytes))
                    self._run_on_chunks(functools.partial(self._move, descriptor))
                except OSError as error:
                    os.close(descriptor)  # moved chunks stay mapped, and are moved again
                    raise _capacity_error(self.num_bytes, str(error)) from error
                self.descriptor = descriptor
            return self.descriptor

    def _run_on_chunks(self, work: Callable[[int, int], None]) -> None:
        """Call `work(start, num_bytes)` for all chunks, by several threads.

        The threads have the memory policy of this one. Where it takes long the terminal has a
        progress bar.
        """
        starts = range(0, self.num_bytes, _CHUNK_BYTES)
        lengths = [min(_CHUNK_BYTES, self.num_bytes - start) for start in starts]
        with WorkerThreads(min(16, os.cpu_count() or 1)) as threads:
            done = threads.map(work, starts, lengths)
            if self.num_bytes >= _LONG_BYTES:
                from rich.console import Console
                from rich.progress import track

                text = f"preparing {format_bytes(self.num_bytes)}"
                done = track(done, text, len(starts), console=Console(stderr=True), transient=True)
            for _ in done:
                pass

    def _move(self, descriptor: int, start: int, num_bytes: int) -> None:
        """Copy a chunk into the file, and map that in its place.

        It is copied through a mapping, because the kernel gives shared memory huge pages where it
        is touched, not where it is written, and only where they are asked for.
        """
        length = _round_to_pages(num_bytes)
        room = map_at(None, length + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        try:
            shared = room + -room % HUGE_PAGE_BYTES
            map_at(shared, length, mmap.MAP_SHARED | MAP_FIXED, descriptor, start)
            advise(shared, length, MADV_HUGEPAGE)
            # Pages that cannot be had are an error here; where they are touched, a signal.
            number = advise(shared, length, MADV_POPULATE_WRITE)
            if number == errno.EINVAL:  # an older kernel
                os.posix_fallocate(descriptor, start, length)
            elif number:
                raise OSError(number, os.strerror(number))
            ctypes.memmove(shared, self.address + start, num_bytes)
        finally:
            unmap(room, length + HUGE_PAGE_BYTES)
        map_at(self.address + start, length, mmap.MAP_SHARED | MAP_FIXED, descriptor, start)
        advise(self.address + start, length, MADV_HUGEPAGE)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as a contiguous tensor on the CPU, which keeps it mapped."""
        return self._content.view(dtype).view(shape)

    def touch(self) -> None:
        """Populate all pages now, by several threads, with a progress bar where that takes long.

        Raises:
            CapacityError: There is not enough memory.
        """
        self._run_on_chunks(self._touch_chunk)

    def _touch_chunk(self, start: int, num_bytes: int) -> None:
        number = advise(self.address + start, num_bytes, MADV_POPULATE_WRITE)
        if number == errno.EINVAL:  # an older kernel
            self._content[start : start + num_bytes : PAGE_BYTES].zero_()
        elif number:
            raise _capacity_error(self.num_bytes, os.strerror(number))


def _reset_after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_reset_after_fork)


def _map_private(num_bytes: int) -> torch.Tensor:
    if num_bytes > available_ram():
        raise _capacity_error(num_bytes, f"{format_bytes(available_ram())} are available")
    length = _round_to_pages(num_bytes)
    try:
        mapping = map_anonymous(length + HUGE_PAGE_BYTES, private=True)
    except OSError as error:  # a limit of the process, or one of the machine on promises
        raise _capacity_error(num_bytes, os.strerror(error.errno or 0)) from error
    everything = torch.frombuffer(mapping, dtype=torch.uint8)
    gap = -everything.data_ptr() % HUGE_PAGE_BYTES
    advise(everything.data_ptr() + gap, length, MADV_HUGEPAGE)  # where the kernel allows it
    return everything[gap : gap + num_bytes]


def _capacity_error(num_bytes: int, why: str) -> CapacityError:
    return CapacityError(
        f"a table of {format_bytes(num_bytes)} does not fit into memory: {why}. Give a smaller "
        "table, raise the memory limit of this container or process, or keep the table in a file: "
        'penstock.unify("table.npy").'
    )


def _round_to_pages(num_bytes: int) -> int:
    """Return the bytes of as many whole pages, at least one."""
    return max(PAGE_BYTES, round_up(num_bytes, PAGE_BYTES))


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for huge pages for a large tensor that was not written to yet.

    A batch of many rows in new memory spends most of its time in page faults: with pages of 4 KiB
    there are 512 times as many.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= _LARGE_BYTES:
        pages.advise_huge_pages(tensor.data_ptr(), num_bytes)
