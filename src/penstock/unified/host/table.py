"""Tables in host memory: their rows are read, written and added to by `host_rows.cpp`.

It is built at first use; without a compiler torch does the work, with the same results. Which of
the two is chosen once per process, and logged.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from penstock.codegen import THREADS, load_optional_library
from penstock.unified._devices import gpu_of
from penstock.unified._row_index import as_index, index_error, resolve_index
from penstock.unified._table import CPU, Counters, Table, UnifiedReport
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.device.table import MemoryUse, ReadRows
from penstock.unified.host.memory import TableMemory

_SOURCES = [THREADS, Path(__file__).with_name("host_rows.cpp")]
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off")
_SINGLE_THREAD_BYTES = 64 * 1024  # fewer bytes are copied before a second thread is awake
_STREAM_BYTES = 8 * 2**20  # results larger than this go past the caches
_pack_batch = struct.Struct("9q").pack  # `struct Batch` of `host_rows.cpp`, faster than by ctypes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostTable(Table):
    """A table in host memory.

    Attributes:
        memory: Memory that holds the rows.
        rows: All rows as a contiguous tensor on the CPU, of shape (num_rows, *row).
    """

    use: MemoryUse

    def __init__(
        self, use: MemoryUse, *, device: torch.device = CPU, hot_rows: HotRows | None = None
    ) -> None:
        super().__init__(tuple(use.rows.shape), use.rows.dtype, device, hot_rows, use)
        self.memory, self.rows = use.memory, use.rows
        self._process = os.getpid()

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device = CPU
    ) -> HostTable:
        """Return a table of zeroes, whose pages are there."""
        memory = TableMemory(dtype.itemsize * math.prod(shape))
        memory.touch()
        return cls(MemoryUse(memory.tensor(shape, dtype), memory), device=device)

    def view_from(self, device: torch.device, hot_rows: HotRows | None) -> HostTable:
        """Return a table over the same memory whose rows go to another device, or stay there."""
        return HostTable(self.use, device=device, hot_rows=hot_rows)

    def read_rows(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """Read rows; see `Table`."""
        if self.use.is_registered:
            self.use.synchronize()
        single_thread = self._is_forked()
        read_rows(self.rows, index, out, negative=negative, single_thread=single_thread)
        self.count_batch(index, out.numel() * out.element_size())

    def _host_reader(self) -> ReadRows:
        return functools.partial(read_rows, self.rows)  # which keeps the memory, not the table

    @contextlib.contextmanager
    def write_access(self, index: torch.Tensor) -> Iterator[torch.Tensor]:
        """Give all rows to the CPU, to write those of `index`; negative ones count from the end.

        The write comes after what GPUs are doing with the memory, and their caches are refreshed.
        If it raises, nothing may have been written.
        """
        before = self.rows._version
        self.use.synchronize(to_write=True)
        yield self.rows
        self.use.mark_written(index, before)

    def write_rows(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float | None, negative: bool
    ) -> None:
        """Write or add rows, on the GPU of an operand if that can; see `Table`."""
        before, device = self.rows._version, gpu_of(index, source)
        writer = None if device is None else self.device_table(device)
        if writer is not None and writer.can_write(None if alpha is None else self.rows.dtype):
            writer.write_rows(index, source, alpha=alpha, negative=negative)
            self.use.mark_written(index, before)
            return
        index, source = index.cpu(), source.cpu()
        options = {"negative": negative, "single_thread": self._is_forked()}
        with self.write_access(index) as rows:
            if alpha is None:
                write_rows(rows, index, source, **options)
            else:
                add_rows(rows, index, source, alpha=alpha, **options)

    def _is_forked(self) -> bool:
        """Return whether this process is a forked child of the one that made the table."""
        return self._process != os.getpid()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in the table's memory; see `Table`."""
        begin = self.memory.address
        return begin <= tensor.data_ptr() < begin + self.memory.num_bytes

    def report(self) -> UnifiedReport:
        """Return the account of the table so far."""
        return self._report(reads=Counters(), tier="host", method=backend())


# ------------------------------------------------------------------ rows of a tensor


def backend() -> str:
    """Return what copies rows in this process: "cpp" or "torch"."""
    return "torch" if _library() is None else "cpp"


def read_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    *,
    negative: bool = False,
    single_thread: bool = False,
) -> None:
    """Read rows of a tensor, at any distance: `out[i] = table[index[i]]`; see `Table.read_rows`.

    `single_thread` is for a forked process, which has none of its parent's threads.

    Raises:
        IndexError: An index is out of range; the message names it. `out` is then undefined.
    """
    index = as_index(index)
    library = _library()
    if library is None:
        index = resolve_index(index.view(-1), table.shape[0], negative)
        rows = out.view(index.numel(), *table.shape[1:])
        torch.index_select(table, 0, index, out=rows)
        return
    num_bytes = out.numel() * out.element_size()
    last = out.data_ptr(), num_bytes >= _STREAM_BYTES
    _call(library.penstock_read_rows, table, index, negative, num_bytes, single_thread, last)


def write_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    negative: bool = False,
    single_thread: bool = False,
) -> None:
    """Write rows of a tensor: `table[index[i]] = source[i]`; see `Table.write_rows`.

    Nothing is written if an index is out of range.
    """
    index = as_index(index)
    library = _library()
    if library is None:
        index = resolve_index(index, table.shape[0], negative)
        # torch leaves the order of duplicates open; keep the last of each.
        last = torch.full((table.shape[0],), -1, dtype=torch.int64, device="cpu")
        last.scatter_reduce_(0, index, torch.arange(len(index), device="cpu"), "amax")
        rows = (last >= 0).nonzero().flatten()
        bits = _BITS.get(table.element_size(), table.dtype)  # torch does not copy every dtype
        table.view(bits).index_copy_(0, rows, source.view(bits).index_select(0, last[rows]))
        return
    num_bytes, rows = source.numel() * source.element_size(), _rows_of(source)
    _call(library.penstock_write_rows, table, index, negative, num_bytes, single_thread, rows)


def add_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
    negative: bool = False,
    single_thread: bool = False,
) -> None:
    """Add rows of a tensor: `table[index[i]] += alpha * source[i]`; see `Table.write_rows`.

    Nothing is written if an index is out of range.
    """
    index = as_index(index)
    library = _library()
    if library is None or table.dtype not in (torch.float32, torch.float64):
        # Of narrow floats torch adds the rows up in float before it rounds.
        table.index_add_(0, resolve_index(index, table.shape[0], negative), source, alpha=alpha)
        return
    num_bytes = source.numel() * source.element_size()
    last = *_rows_of(source), float(alpha), table.dtype == torch.float64
    _call(library.penstock_add_rows, table, index, negative, num_bytes, single_thread, last)


def _call(
    function: Callable[..., int],
    table: torch.Tensor,
    index: torch.Tensor,
    negative: bool,
    num_bytes: int,
    single_thread: bool,
    last: tuple[float, ...],
) -> None:
    """Call a function of the library, which moves `num_bytes`; `last` are its last arguments."""
    num_rows = table.shape[0]
    element_bytes = table.element_size()
    batch = _pack_batch(
        table.data_ptr(),
        num_rows,
        table.stride(0) * element_bytes,
        table.numel() // num_rows * element_bytes if num_rows else 0,
        index.data_ptr(),
        index.element_size(),
        index.numel(),
        negative,
        1 if single_thread or num_bytes < _SINGLE_THREAD_BYTES else torch.get_num_threads(),
    )
    bad = function(batch, *last)
    if bad >= 0:
        raise index_error(index, bad, num_rows)


def _rows_of(source: torch.Tensor) -> tuple[int, int]:
    """Return the address of the rows of `source`, and the bytes from one to the next."""
    return source.data_ptr(), source.stride(0) * source.element_size() if source.dim() else 0


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    return load_optional_library(
        "host_rows",
        _SOURCES,
        flags=_FLAGS,
        functions={
            "penstock_read_rows": (count, [pointer, pointer, flag]),
            "penstock_write_rows": (count, [pointer, pointer, count]),
            "penstock_add_rows": (count, [pointer, pointer, count, ctypes.c_double, flag]),
        },
        work="rows are gathered",
        otherwise="by torch",
    )
