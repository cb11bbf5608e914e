"""Rows of tables in files: read with many reads in flight, or read and written in place.

`file_rows.cpp` does it, built at first use; without a compiler Python does, more slowly and with
the same results.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from penstock.codegen import IO_RING, load_optional_library, struct_type
from penstock.errors import CapacityError, StoreError, StoreReadError
from penstock.memory import WorkerThreads
from penstock.memory.pages import round_up
from penstock.unified._row_index import as_index, index_error, resolve_index
from penstock.unified._table import Counters
from penstock.unified.file._pool import PooledFile
from penstock.unified.file.layout import PAGE_BYTES, RowLayout
from penstock.unified.host.memory import TableMemory
from penstock.units import format_bytes

_SOURCES = [IO_RING, Path(__file__).with_name("file_rows.cpp")]
_READ_BYTES = 64 * 1024  # the longest read of several rows
_LONG_READ_BYTES = 256 * 1024  # the same of rows in order, without gaps
_BLOCK_BYTES = 32 * 2**20  # of a table with gaps between its rows, read at a time
_PART_BYTES = 4 * 2**20  # the reads of a table without gaps
_NUM_PART_THREADS = 4
_GAP_BYTES = 4096  # between two rows that are still read as one
_NUM_PYTHON_THREADS = 16
_OUT_OF_RANGE, _READ_FAILED = 1, 2


class RowReader:
    """A reader of one file's rows; safe in threads and in a forked child.

    All readers of a process share the queues or threads that read, and the pool of descriptors;
    each has a cache of its own.

    Attributes:
        file: The file; no batch may be under way when it becomes direct, or no longer is.
        method: Method of reading: "io_uring", "threads" or "python".
        cache_bytes: Budget of the rows that are kept in memory.
        counters: Sums `num_reads`, `bytes_read`, `num_hits` and `num_misses` so far.
    """

    def __init__(self, layout: RowLayout, *, cache_bytes: int = 0, ring: bool = True) -> None:
        self.layout = layout
        self.counters = Counters()
        self.cache_bytes = cache_bytes
        if 0 < cache_bytes < layout.row_bytes:
            raise ValueError(
                f"cache={format_bytes(cache_bytes)}: a row of {layout.path} has "
                f"{format_bytes(layout.row_bytes)}; give the cache room for many"
            )
        self._library = get_library()
        self.file = PooledFile(layout, direct=self._library is not None)
        self._max_read_bytes = max(_READ_BYTES, layout.row_bytes + 2 * PAGE_BYTES)
        self._allow_ring = ring
        self._caches: dict[int, int | None] = {}  # by process: a forked child has one of its own
        self.method = "python"
        if self._library is not None:
            self._get_cache()  # or it is missing when it is needed
            has_ring = self._library.penstock_row_engines_have_ring(_get_engines(os.getpid(), ring))
            self.method = "io_uring" if has_ring else "threads"

    def read_rows(
        self,
        index: torch.Tensor,
        out: torch.Tensor,
        *,
        negative: bool = False,
        in_order: bool = False,
    ) -> None:
        """Read rows: `out[i] = table[index[i]]`; see `Table.read_rows`.

        With `in_order` all rows lie side by side, and are read in long reads.

        Raises:
            IndexError: An index is out of range; the message names it. `out` is then undefined.
            StoreReadError: The rows could not be read, or the file has become shorter.
        """
        index = as_index(index)
        if not index.numel() or not self.layout.row_bytes:
            resolve_index(index, self.layout.num_rows, negative)
            return
        if self._library is None:
            self._read_in_python(resolve_index(index, self.layout.num_rows, negative), out)
            return
        layout, outcome = self.layout, struct_type(_ReadOutcome)()
        long_bytes = min(_LONG_READ_BYTES, out.nbytes) if in_order else 0
        with self.file as fd:
            self._library.penstock_read_rows(
                *(_get_engines(os.getpid(), self._allow_ring), self._get_cache(), fd),
                *(ctypes.byref(layout.struct), index.data_ptr(), index.element_size()),
                *(index.numel(), negative, out.data_ptr(), self.file.alignment),
                *(max(self._max_read_bytes, long_bytes), _GAP_BYTES, ctypes.byref(outcome)),
            )
        if outcome.status == _OUT_OF_RANGE:
            raise index_error(index, outcome.position, layout.num_rows)
        if outcome.status:
            number = outcome.number if outcome.status == _READ_FAILED else None
            raise self._read_error(outcome.position, outcome.offset, number)
        self.counters.add(num_reads=outcome.num_reads, bytes_read=outcome.bytes_read)
        if self.cache_bytes:
            self.counters.add(num_hits=outcome.num_hits, num_misses=outcome.num_misses)

    def read_table(self) -> torch.Tensor:
        """Read all rows, in long reads; shape and dtype are the layout's, the memory is new.

        Raises:
            CapacityError: There is not enough memory.
            StoreReadError: The rows could not be read, or the file has become shorter.
        """
        layout = self.layout
        num_bytes = layout.num_rows * layout.row_bytes
        lead = layout.offset % PAGE_BYTES  # so that pages of the file are pages of memory
        is_whole = layout.block_bytes == layout.rows_per_block * layout.row_bytes
        if is_whole and lead % layout.dtype.itemsize == 0:
            memory = TableMemory(round_up(lead + num_bytes))
            content = memory.tensor((memory.num_bytes,), torch.uint8)
            self._read_pages(content, layout.offset - lead)
            return content[lead : lead + num_bytes].view(layout.dtype).view(layout.shape)
        rows = TableMemory(num_bytes).tensor(layout.shape, layout.dtype)
        block = max(1, _BLOCK_BYTES // layout.row_bytes)
        for start in range(0, layout.num_rows, block):
            part = rows[start : start + block]
            self.read_rows(
                torch.arange(start, start + len(part), device="cpu"), part, in_order=True
            )
        return rows

    def _read_pages(self, content: torch.Tensor, begin: int) -> None:
        """Fill uint8 memory with the file's pages from byte `begin` on, as far as rows reach."""
        pages = content.numpy().data
        layout = self.layout

        def read(fd: int, start: int) -> int:
            part = pages[start : start + _PART_BYTES]
            wanted = min(len(part), layout.end - begin - start)
            row = max(0, begin + start - layout.offset) // layout.row_bytes
            done = 0
            while done < wanted:  # a read that is cut short goes on at a page
                try:
                    count = os.preadv(fd, [part[done:]], begin + start + done)
                except OSError as error:
                    raise self._read_error(row, begin + start + done, error.errno) from error
                if done + count < wanted and not (count := count // PAGE_BYTES * PAGE_BYTES):
                    raise self._read_error(row, begin + start + done, None)
                done += count
            return wanted

        # The threads are waited for in any case.
        with self.file as fd, WorkerThreads(_NUM_PART_THREADS) as threads:
            parts = range(0, len(pages), _PART_BYTES)
            for num_bytes in threads.map(functools.partial(read, fd), parts):
                self.counters.add(num_reads=1, bytes_read=num_bytes)

    def update_cache(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        """Update rows in the cache; int64 (n,) and (n, *row), contiguous."""
        cache = self._caches.get(os.getpid())
        if cache is not None and self._library is not None:
            self._library.penstock_row_cache_update(
                cache, rows.data_ptr(), len(rows), content.data_ptr(), self.layout.row_bytes
            )

    def clear_cache(self) -> None:
        """Drop all rows of the cache."""
        cache = self._caches.get(os.getpid())
        if cache is not None and self._library is not None:
            self._library.penstock_row_cache_clear(cache)

    def close(self) -> None:
        """Close the file."""
        cache = self._caches.pop(os.getpid(), None)
        if cache is not None and self._library is not None:
            self._library.penstock_row_cache_free(cache)
        self.file.close()

    def __del__(self) -> None:
        if hasattr(self, "_caches"):
            self.close()

    def _get_cache(self) -> int | None:
        """Return the cache of this process; make it first if needed."""
        process = os.getpid()
        if process in self._caches:
            return self._caches[process]
        assert self._library is not None
        cache = None
        if self.cache_bytes and self.layout.row_bytes:
            capacity = min(self.cache_bytes // self.layout.row_bytes, self.layout.num_rows)
            if capacity:
                cache = self._library.penstock_row_cache(capacity, self.layout.row_bytes)
                if not cache:
                    raise CapacityError(
                        f"cache={format_bytes(self.cache_bytes)}: there is not enough memory"
                    )
        # Several threads of a child may come here at once: one cache is kept, whole.
        if self._caches.setdefault(process, cache) is not cache and cache is not None:
            self._library.penstock_row_cache_free(cache)
        return self._caches[process]

    def _read_error(self, row: int, offset: int, number: int | None) -> StoreReadError:
        problem = "the file has become shorter" if number is None else os.strerror(number)
        return StoreReadError(
            f"row {row} of {self.layout.path} could not be read at byte {offset}: {problem}",
            path=self.layout.path,
            offset=offset,
            errno=number,
        )

    def _read_in_python(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """Read row by row, through the page cache."""
        layout = self.layout
        index = index.view(-1)
        rows = out.view(index.numel(), -1).view(torch.uint8).numpy()

        def read(fd: int, position: int) -> None:
            row = int(index[position])
            begin = layout.row_offset(row)
            try:
                _move_all(os.preadv, fd, rows[position].data, begin)
            except OSError as error:
                number = None if error.errno == errno.ENODATA else error.errno
                raise self._read_error(row, begin, number) from error

        with self.file as fd, WorkerThreads(_NUM_PYTHON_THREADS) as threads:
            for _ in threads.map(functools.partial(read, fd), range(index.numel())):
                pass
        self.counters.add(num_reads=index.numel(), bytes_read=index.numel() * layout.row_bytes)


_engines: dict[tuple[int, bool], int] = {}


def _get_engines(process: int, allow_ring: bool) -> int:
    """Return the engines that read for all tables of a process; a forked child has its own."""
    found = _engines.get((process, allow_ring))
    if found is None:
        compiled = get_library()
        assert compiled is not None
        new = compiled.penstock_row_engines(allow_ring)
        if not new:
            raise StoreError("there is no memory for the buffers of reads")
        found = _engines.setdefault((process, allow_ring), new)
        if found != new:  # several threads may come here at once
            compiled.penstock_row_engines_free(new)
    return found


# ---------------------------------------------------------------------- rows in place


def write_places(fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
    """Write rows to their places, through the page cache; raise OSError for some that cannot be.

    `rows` are int64, rising, none of them twice; `content` is uint8 (len(rows), row_bytes).
    """
    _move_places(fd, layout, rows, np.ascontiguousarray(content), "write")


def read_places(fd: int, layout: RowLayout, rows: np.ndarray) -> np.ndarray:
    """Read rows, whose numbers rise, from their places; uint8 (len(rows), row_bytes)."""
    content = np.empty((len(rows), layout.row_bytes), dtype=np.uint8)
    _move_places(fd, layout, rows, content, "read")
    return content


def _move_places(
    fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray, way: str
) -> None:
    if (compiled := get_library()) is not None:
        outcome = struct_type(_ReadOutcome)()
        function = getattr(compiled, f"penstock_{way}_places")
        places = rows.ctypes.data, len(rows), content.ctypes.data
        function(fd, ctypes.byref(layout.struct), *places, ctypes.byref(outcome))
        if outcome.status:
            raise OSError(outcome.number, os.strerror(outcome.number))
        return
    move = os.preadv if way == "read" else os.pwritev
    for place, row in enumerate(rows.tolist()):
        _move_all(move, fd, content[place].data, layout.row_offset(row))


def write_all(fd: int, content: memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file."""
    _move_all(os.pwritev, fd, content, offset)


def _move_all(move: Callable[..., int], fd: int, content: memoryview, offset: int) -> None:
    """Read or write all bytes, in as many calls as the system takes."""
    while content:
        num_bytes = move(fd, [content], offset)
        if not num_bytes:
            raise OSError(errno.ENODATA, "the file has become shorter")
        content, offset = content[num_bytes:], offset + num_bytes


# -------------------------------------------------------------------------- the library


@dataclasses.dataclass
class _ReadOutcome:
    """The struct `Outcome` of `file_rows.cpp`."""

    status: int
    position: int
    offset: int
    number: int
    num_reads: int
    bytes_read: int
    num_hits: int
    num_misses: int


@functools.cache
def get_library() -> ctypes.CDLL | None:
    """Return the compiled library; None without a compiler."""
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    read = [pointer, pointer, flag, pointer, pointer, flag, count, flag]
    read += [pointer, count, count, count, pointer]
    places = [flag, pointer, pointer, count, pointer, pointer]
    return load_optional_library(
        "file_rows",
        _SOURCES,
        flags=("-O3", "-pthread"),
        functions={
            "penstock_row_engines": (pointer, [flag]),
            "penstock_row_engines_free": (None, [pointer]),
            "penstock_row_engines_have_ring": (flag, [pointer]),
            "penstock_row_cache": (pointer, [count, count]),
            "penstock_row_cache_free": (None, [pointer]),
            "penstock_row_cache_clear": (None, [pointer]),
            "penstock_row_cache_update": (None, [pointer, pointer, count, pointer, count]),
            "penstock_read_rows": (None, read),
            "penstock_write_places": (None, places),
            "penstock_read_places": (None, places),
        },
        work="rows of files are read",
        otherwise="by Python threads",
    )
