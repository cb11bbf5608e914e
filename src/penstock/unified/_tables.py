"""Where a table's bytes lie: in host memory or in a file."""

from __future__ import annotations

import math

import torch

from penstock.unified import _host_rows
from penstock.unified._file_rows import RowReader
from penstock.unified._host_memory import TableMemory
from penstock.unified._host_rows import as_index, checked_index
from penstock.unified._report import Counters, UnifiedReport
from penstock.unified._row_file import open_layout
from penstock.unified._row_writer import RowWriter, recover


class HostTable:
    """A table in host memory.

    Attributes:
        memory: What holds it.
        rows: All of it as a contiguous tensor on the CPU, of shape (num_rows, *row).
    """

    def __init__(self, memory: TableMemory, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory = memory
        self.rows = memory.tensor(shape, dtype)
        self._counters = Counters()

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype) -> HostTable:
        """A table of zeroes, whose pages are there."""
        memory = TableMemory(dtype.itemsize * math.prod(shape))
        memory.touch()
        return cls(memory, shape, dtype)

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`; `out` has shape (*index.shape, *row) and is contiguous."""
        _host_rows.gather_rows(self.rows, index, out, negative=negative)
        count_gather(self._counters, index, out)

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        _host_rows.put_rows(self.rows, index, source, negative=negative)

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        _host_rows.add_rows(self.rows, index, source, alpha=alpha, negative=negative)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the table's memory."""
        return tensor.untyped_storage().data_ptr() == self.rows.untyped_storage().data_ptr()

    def report(self) -> UnifiedReport:
        """What was gathered so far."""
        return report_of(self._counters, Counters(), tier="host", method=_host_rows.backend())


class FileTable:
    """A table in a file, larger than memory; nothing of it is resident but what was gathered."""

    def __init__(self, source: str, *, cache_bytes: int = 0) -> None:
        self.source = source
        self.layout = open_layout(source)
        recover(self.layout)
        self._reader = RowReader(self.layout, cache_bytes=cache_bytes)
        self._counters = Counters()
        self._writer: RowWriter | None = None

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`; `out` has shape (*index.shape, *row) and is contiguous."""
        self._reader.gather(index, out, negative=negative)
        count_gather(self._counters, index, out)

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        _host_rows.put_rows(content, place, source)
        self._write(rows, content)

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        self._reader.gather(rows, content)
        _host_rows.add_rows(content, place, source, alpha=alpha)
        self._write(rows, content)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the table's memory: never, it has none."""
        return False

    def _write(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        if self._writer is None:
            self._writer = RowWriter(self.layout)
        flat = content.reshape(len(rows), -1).view(torch.uint8) if content.numel() else content
        self._writer.put(rows.numpy(), flat.numpy())
        self._reader.update_cache(rows, content)

    def report(self) -> UnifiedReport:
        """What was gathered so far."""
        reader = self._reader
        return report_of(
            self._counters,
            reader.counters,
            tier="file",
            method=reader.method,
            cache_bytes=reader.cache_bytes,
        )


def count_gather(counters: Counters, index: torch.Tensor, out: torch.Tensor) -> None:
    """Take note of a batch of rows."""
    counters.add(num_gathers=1, num_rows=index.numel(), num_bytes=out.numel() * out.element_size())


def report_of(
    gathers: Counters, reads: Counters, *, tier: str, method: str, cache_bytes: int = 0
) -> UnifiedReport:
    """The report from what was counted."""
    return UnifiedReport(
        num_gathers=gathers["num_gathers"],
        num_rows_gathered=gathers["num_rows"],
        gathered_bytes=gathers["num_bytes"],
        num_reads=reads["num_reads"],
        bytes_read=reads["bytes_read"],
        num_cache_hits=reads["num_hits"],
        num_cache_misses=reads["num_misses"],
        cache_bytes=cache_bytes,
        tier=tier,
        method=method,
    )
