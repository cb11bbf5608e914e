"""Where a table's bytes lie: in host memory or in a file."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import StoreFullError, StoreReadError, StoreWriteError
from penstock.unified import _host_rows
from penstock.unified._device_table import DeviceTable, TableUse
from penstock.unified._devices import check_process, gpu_of, in_forked_child
from penstock.unified._file_rows import RowReader
from penstock.unified._host_memory import TableMemory
from penstock.unified._host_rows import as_index, checked_index
from penstock.unified._hot_rows import HotRows
from penstock.unified._report import Counters, UnifiedReport
from penstock.unified._row_file import FULL_ERRORS, RowLayout, create, open_layout
from penstock.unified._row_journal import forget_journal, recover
from penstock.unified._row_places import open_file, write_places
from penstock.unified._row_source import RowSource
from penstock.unified._row_writer import (
    TICK_NANOSECONDS,
    RowWriter,
    changing,
    put_together,
    table_file,
    without_gradients,
)

_COPY_BYTES = 64 * 2**20  # of a table, written to another file at a time
_CPU = torch.device("cpu")


class _Table:
    """What tables in memory and in files share: how they are seen by GPUs.

    Attributes:
        device: Where gathered rows go.
        hot_rows: What is kept on GPUs.
    """

    def __init__(self, device: torch.device, hot_rows: HotRows | None) -> None:
        self.device = device
        self.hot_rows = hot_rows
        self._counters = Counters()
        self._on: dict[torch.device, DeviceTable] = {}
        self._lock = threading.Lock()

    def on(self, device: torch.device) -> DeviceTable:
        """The table as a GPU sees it."""
        check_process(device)
        found = self._on.get(device)
        if found is None:
            with self._lock:
                if device not in self._on:
                    self._on[device] = self._make_on(device)
                found = self._on[device]
        return found

    def _make_on(self, device: torch.device) -> DeviceTable:
        raise NotImplementedError

    def count(self, index: torch.Tensor, num_bytes: int) -> None:
        """Take note of a batch of rows."""
        self._counters.add(num_gathers=1, num_rows=index.numel(), num_bytes=num_bytes)

    def _report(
        self,
        reads: Counters,
        *,
        tier: str,
        method: str,
        cache: int = 0,
        copy: int = 0,
        source: str = "none",
    ) -> UnifiedReport:
        """The report, where `method` and `cache` are those of the CPU."""
        tables = [] if in_forked_child() else list(self._on.values())
        for table in tables:
            table.raise_for_earlier()
        on_gpus = [table.cache_report() for table in tables]
        if self.device != _CPU:
            here = self._on.get(self.device)
            method = "none yet" if here is None else here.method
            cache = 0 if self.hot_rows is None else self.hot_rows.budget_bytes
        return UnifiedReport(
            num_gathers=self._counters["num_gathers"],
            num_rows_gathered=self._counters["num_rows"],
            gathered_bytes=self._counters["num_bytes"],
            num_reads=reads["num_reads"],
            bytes_read=reads["bytes_read"],
            num_cache_hits=reads["num_hits"] + sum(hits for hits, _ in on_gpus),
            num_cache_misses=reads["num_misses"] + sum(misses for _, misses in on_gpus),
            cache_bytes=cache,
            copy_bytes=copy,
            reads=source,
            tier=tier,
            device=str(self.device),
            method=method,
        )


class HostTable(_Table):
    """A table in host memory.

    Attributes:
        memory: What holds it.
        rows: All of it as a contiguous tensor on the CPU, of shape (num_rows, *row).
        use: What it shares with other tables over the same memory.
    """

    def __init__(
        self,
        memory: TableMemory,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(device, None)
        self.memory = memory
        self.rows = memory.tensor(shape, dtype)
        self.use = TableUse(self.rows, memory)

    @classmethod
    def empty(
        cls, shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device = _CPU
    ) -> HostTable:
        """A table of zeroes, whose pages are there."""
        memory = TableMemory(dtype.itemsize * math.prod(shape))
        memory.touch()
        return cls(memory, shape, dtype, device=device)

    def seen_from(self, device: torch.device, hot_rows: HotRows | None) -> HostTable:
        """A table over the same memory whose rows go to another device, or are kept there."""
        table = HostTable.__new__(HostTable)
        _Table.__init__(table, device, hot_rows)
        table.memory, table.rows, table.use = self.memory, self.rows, self.use
        return table

    def _make_on(self, device: torch.device) -> DeviceTable:
        gather_here = functools.partial(_host_rows.gather_rows, self.rows)
        return DeviceTable(
            device,
            tuple(self.rows.shape),
            self.rows.dtype,
            gather_here,
            use=self.use,
            hot_rows=self.hot_rows,
        )

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`; `out` has shape (*index.shape, *row) and is contiguous."""
        if self.use.registration is not None:
            self.use.settle()
        _host_rows.gather_rows(self.rows, index, out, negative=negative)
        self.count(index, out.numel() * out.element_size())

    @contextlib.contextmanager
    def writing(self, index: torch.Tensor) -> Iterator[torch.Tensor]:
        """All rows, for the CPU to write to those of `index`; negative ones count from the end.

        It comes after what GPUs are doing with the memory, and their caches hear of it. If it
        raises, nothing may have been written.
        """
        before = self.rows._version
        self.use.settle(to_write=True)
        yield self.rows
        self.use.changed(index, before)

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        writer, before = self._writer_for(index, source), self.rows._version
        if writer is not None:
            writer.put(index, source, negative=negative)
            self.use.changed(index, before)
            return
        index, source = index.cpu(), source.cpu()
        with self.writing(index) as rows:
            _host_rows.put_rows(rows, index, source, negative=negative)

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        writer, before = self._writer_for(index, source), self.rows._version
        if writer is not None and writer.adds(self.rows.dtype):
            writer.add(index, source, alpha=alpha, negative=negative)
            self.use.changed(index, before)
            return
        index, source = index.cpu(), source.cpu()
        with self.writing(index) as rows:
            _host_rows.add_rows(rows, index, source, alpha=alpha, negative=negative)

    def _writer_for(self, *operands: Any) -> DeviceTable | None:
        """The GPU of the operands, if it can write to the memory; else the CPU does."""
        device = gpu_of(*operands)
        table = None if device is None else self.on(device)
        return table if table is not None and table.method == "triton" else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the table's memory, seen from whatever device."""
        begin = self.memory.address
        return begin <= tensor.data_ptr() < begin + self.memory.num_bytes

    def report(self) -> UnifiedReport:
        """What was gathered so far."""
        return self._report(Counters(), tier="host", method=_host_rows.backend())


class FileTable(_Table):
    """A table in a file, larger than memory or not; see `RowSource` for what of it is resident.

    Attributes:
        may_keep: Whether memory may be taken for its rows without a budget that says how much.
    """

    def __init__(
        self,
        source: str,
        *,
        device: torch.device = _CPU,
        hot_rows: HotRows | None = None,
        may_keep: bool = True,
    ) -> None:
        super().__init__(device, hot_rows)
        cache_bytes = hot_rows.budget_bytes if hot_rows is not None and device == _CPU else 0
        self.source = source
        self.layout = open_layout(source)
        self.file = table_file(self.layout)
        if not self.file.is_writer:
            recover(self.layout)
        self._reader = RowReader(self.layout, cache_bytes=cache_bytes)
        self.may_keep = may_keep and hot_rows is None
        self._source = RowSource(self._reader, is_free=self.may_keep)
        self._is_outdated = False  # what GPUs keep
        self.file.watchers.add(self)

    def on(self, device: torch.device) -> DeviceTable:
        """The table as a GPU sees it, which keeps no row that another process has written since."""
        found = super().on(device)
        if self.hot_rows is not None:
            with self.file.lock:
                if self.file.is_readable:
                    self._look_at_file()
                is_outdated, self._is_outdated = self._is_outdated, False
            if is_outdated:
                self.forget()
        return found

    def _make_on(self, device: torch.device) -> DeviceTable:
        layout = self.layout
        return DeviceTable(device, layout.shape, layout.dtype, self._read, hot_rows=self.hot_rows)

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`; `out` has shape (*index.shape, *row) and is contiguous."""
        self._read(index, out, negative=negative)
        self.count(index, out.numel() * out.element_size())

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        index, source = index.cpu(), source.cpu()
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        _host_rows.put_rows(content, place, source)
        write_together([(self, rows, content)])

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        index, source = index.cpu(), source.cpu()
        index = checked_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        with changing():
            self._read(rows, content)
            _host_rows.add_rows(content, place, source, alpha=alpha)
            write_together([(self, rows, content)])

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the table's memory: never, it has none."""
        return False

    def close(self) -> None:
        """Close the file."""
        self.file.watchers.discard(self)
        self._reader.close()

    def _read(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool = False) -> None:
        while True:
            with self.file.lock:
                if self.file.is_readable:
                    self._look_at_file()
                    self._source.gather(index, out, negative=negative)
                    return
            self.file.finish()  # or some rows could be half old and half new

    def rows_changed(self, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
        """Hear of rows that are in their places now; see `TableFile.watchers`."""
        if layout.offset == self.layout.offset:  # and not another tensor of the same file
            self._source.update(torch.from_numpy(rows), torch.from_numpy(content))

    def refresh(self, rows: torch.Tensor) -> None:
        """Tell the GPUs' caches of rows that have changed."""
        for table in self._on.values():
            table.refresh(rows, 0, 0)

    def tables_over_file(self) -> list[FileTable]:
        """All tables of this process over the same rows."""
        watchers = list(self.file.watchers)
        return [each for each in watchers if each.layout.offset == self.layout.offset]

    def forget(self) -> None:
        """Have the GPUs' caches drop what they keep."""
        for table in self._on.values():
            table.forget()

    def _look_at_file(self) -> None:
        """Raise if the file has another size now; forget what it held before others wrote to it."""
        file, status = self.file, self._reader.status()
        if status.st_size != self.layout.file_bytes:
            raise StoreReadError(
                f"{self.layout.path} has changed size since the table was opened: it had "
                f"{self.layout.file_bytes} bytes, now it has {status.st_size}. Restore it, or open "
                "the table again.",
                path=self.layout.path,
            )
        if status.st_mtime_ns == file.modified:
            return
        if not file.is_writer:
            recover(self.layout)  # a process that wrote since may have been killed
        for table in list(file.watchers):
            table.clear_cache()
        # A time that has just been may be that of another write, too.
        is_past = file.is_writer or time.time_ns() - status.st_mtime_ns > TICK_NANOSECONDS
        file.modified = status.st_mtime_ns if is_past else None

    def clear_cache(self) -> None:
        """Drop the rows that are kept in memory, and on GPUs before they are asked for again."""
        self._source.drop()
        self._is_outdated = True

    def report(self) -> UnifiedReport:
        """What was gathered so far."""
        reader = self._reader
        return self._report(
            reader.counters,
            tier="file",
            method=reader.method,
            cache=reader.cache_bytes,
            copy=self._source.copy_bytes,
            source=self._source.name,
        )


def write_together(parts: Sequence[tuple[FileTable, torch.Tensor, torch.Tensor]]) -> None:
    """Write rows of several tables in files, all of them or none; see `put_together`.

    parts: tables, each with rows (int64, rising, none of them twice) and their content.
    """
    prepared = []
    for table, rows, content in parts:
        with table.file.lock:
            table._look_at_file()
        flat = content.reshape(len(rows), -1).view(torch.uint8) if content.numel() else content
        prepared.append((RowWriter(table.layout), rows.numpy(), flat.numpy()))
    try:
        put_together(prepared)
    except BaseException:
        for table, _, _ in parts:  # which rows have changed cannot be said yet
            for each in table.tables_over_file():
                each.forget()
        raise
    for table, rows, _ in parts:
        for each in table.tables_over_file():
            each.refresh(rows)


@without_gradients
def copy_to_file(table: HostTable | FileTable, path: str | os.PathLike[str]) -> FileTable:
    """Copy all rows to a new file, a block at a time; no step changes the table meanwhile.

    Raises:
        StoreError: The file exists, or has no room; nothing is left of it.
    """
    if isinstance(table, HostTable):
        source, shape, dtype = table, tuple(table.rows.shape), table.rows.dtype
    else:  # rows that are read once are not worth keeping
        source = FileTable(table.source, may_keep=False)
        shape, dtype = table.layout.shape, table.layout.dtype
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    num_rows = max(1, _COPY_BYTES // row_bytes)
    with changing():
        forget_journal(os.fspath(path))
        layout = create(path, shape, dtype)
        file = open_file(layout.path, os.O_RDWR)
        try:
            for start in range(0, shape[0], num_rows):
                index = torch.arange(start, min(start + num_rows, shape[0]))
                rows = torch.empty((len(index), *shape[1:]), dtype=dtype)
                source.gather(index, rows, negative=False)
                if rows.numel():
                    content = rows.view(len(index), -1).view(torch.uint8).numpy()
                    write_places(file, layout, index.numpy(), content)
            os.fsync(file)
        except OSError as error:
            os.unlink(layout.path)
            kind = StoreFullError if error.errno in FULL_ERRORS else StoreWriteError
            raise kind(
                f"{layout.path} could not be written: {os.strerror(error.errno or 0)}",
                path=layout.path,
                errno=error.errno,
            ) from error
        except BaseException:
            os.unlink(layout.path)
            raise
        finally:
            os.close(file)
    return FileTable(os.path.realpath(layout.path), device=table.device)
