"""Where a table's bytes lie: in host memory or in a file."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence

import torch

from penstock.errors import StoreReadError
from penstock.unified import _host_rows
from penstock.unified._file_rows import RowReader
from penstock.unified._host_memory import TableMemory
from penstock.unified._host_rows import as_index, checked_index
from penstock.unified._report import Counters, UnifiedReport
from penstock.unified._row_file import open_layout
from penstock.unified._row_writer import RowWriter, put_together, recover


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

    @contextlib.contextmanager
    def writing(self, index: torch.Tensor) -> Iterator[torch.Tensor]:
        """All rows, for the CPU to write to those of `index`."""
        yield self.rows

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
        self._changing: dict[int, threading.RLock] = {}

    @property
    def changing(self) -> threading.RLock:
        """Held by whoever reads rows, changes them and writes them; a child has one of its own."""
        return self._changing.setdefault(os.getpid(), threading.RLock())

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`; `out` has shape (*index.shape, *row) and is contiguous."""
        self._read(index, out, negative=negative)
        count_gather(self._counters, index, out)

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        _host_rows.put_rows(content, place, source)
        write_together([(self, rows, content)])

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        with self.changing:
            self._read(rows, content)
            _host_rows.add_rows(content, place, source, alpha=alpha)
            write_together([(self, rows, content)])

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the table's memory: never, it has none."""
        return False

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
        self._reader.close()

    def _read(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool = False) -> None:
        self._check_size()
        if self._writer is not None:
            self._writer.finish()  # or some rows could be half old and half new
        self._reader.gather(index, out, negative=negative)

    def _opened_writer(self) -> RowWriter:
        with self.changing:
            if self._writer is None:
                self._writer = RowWriter(self.layout)
            return self._writer

    def _check_size(self) -> None:
        num_bytes = os.fstat(self._reader._fd).st_size
        if num_bytes != self.layout.file_bytes:
            raise StoreReadError(
                f"{self.layout.path} has changed size since the table was opened: it had "
                f"{self.layout.file_bytes} bytes, now it has {num_bytes}. Restore it, or open the "
                "table again.",
                path=self.layout.path,
            )

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


def write_together(parts: Sequence[tuple[FileTable, torch.Tensor, torch.Tensor]]) -> None:
    """Write rows of several tables in files, all of them or none; see `put_together`.

    parts: tables, each with rows (int64, rising, none of them twice) and their content.
    """

    def committed() -> None:
        for table, rows, content in parts:
            table._reader.update_cache(rows, content)

    prepared = []
    for table, rows, content in parts:
        table._check_size()
        flat = content.reshape(len(rows), -1).view(torch.uint8) if content.numel() else content
        prepared.append((table._opened_writer(), rows.numpy(), flat.numpy()))
    put_together(prepared, committed)


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
