"""Tables in files, larger than memory or not."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import StoreReadError, StoreWriteError
from penstock.unified._row_index import as_index, resolve_index
from penstock.unified._table import CPU, Table, UnifiedReport
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.device.table import DeviceTable, ReadRows
from penstock.unified.file._journal import forget_journal, recover
from penstock.unified.file._rows import RowReader, write_places
from penstock.unified.file._source import RowSource
from penstock.unified.file.layout import RowLayout, create, open_layout, store_error
from penstock.unified.file.writer import (
    TICK_NANOSECONDS,
    change_lock,
    table_file,
    without_gradients,
    write_batch,
)
from penstock.unified.host.table import HostTable, add_rows, write_rows

_BLOCK_BYTES = 64 * 2**20  # of a new file, written at a time


class FileTable(Table):
    """A table in a file; see `RowSource` for what of it is in memory.

    Attributes:
        may_copy: Whether memory may be taken for its rows without a budget that says how much.
    """

    def __init__(
        self,
        source: str,
        *,
        device: torch.device = CPU,
        hot_rows: HotRows | None = None,
        may_copy: bool = True,
    ) -> None:
        self.source, self.layout = source, open_layout(source)
        super().__init__(self.layout.shape, self.layout.dtype, device, hot_rows, None)
        cache_bytes = hot_rows.budget_bytes if hot_rows is not None and device == CPU else 0
        self.file = table_file(self.layout)
        if not self.file.is_writer:
            recover(self.layout)
        self._reader = RowReader(self.layout, cache_bytes=cache_bytes)
        self.may_copy = may_copy and hot_rows is None
        self._source = RowSource(self._reader, may_copy=self.may_copy)
        self._is_outdated = False  # of the GPUs' caches
        self.file.watchers.add(self)

    def device_table(self, device: torch.device) -> DeviceTable:
        """Return the table as a GPU sees it, without rows that another process wrote since."""
        found = super().device_table(device)
        if self.hot_rows is not None:
            with self.file.lock:
                if self.file.is_readable:
                    self._check_file()
                is_outdated, self._is_outdated = self._is_outdated, False
            if is_outdated:
                self._clear_device_caches()
        return found

    def _host_reader(self) -> ReadRows:
        return self._read

    def read_rows(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """Read rows; see `Table`."""
        self._read(index, out, negative=negative)
        self.count_batch(index, out.numel() * out.element_size())

    def write_rows(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float | None, negative: bool
    ) -> None:
        """Write or add rows; see `Table`."""
        index, source = index.cpu(), source.cpu()
        index = resolve_index(as_index(index).long(), self.layout.num_rows, negative)
        rows, place = torch.unique(index, return_inverse=True)
        content = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype, device="cpu")
        with change_lock():
            if alpha is None:
                write_rows(content, place, source)
            else:
                self._read(rows, content)
                add_rows(content, place, source, alpha=alpha)
            write_tables([(self, rows, content)])

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return False: the table has no memory."""
        return False

    def _read(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool = False) -> None:
        while True:
            with self.file.lock:
                if self.file.is_readable:
                    self._check_file()
                    self._source.read_rows(index, out, negative=negative)
                    return
            self.file.finish()  # or some rows could be half old and half new

    def update_rows(self, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
        """Take over rows that were written to the file; see `TableFile.watchers`."""
        if layout.offset == self.layout.offset:  # and not another tensor of the same file
            self._source.update(torch.from_numpy(rows), torch.from_numpy(content))

    def invalidate(self) -> None:
        """Drop the rows that are kept in memory, and those on GPUs before their next use."""
        self._source.drop()
        self._is_outdated = True

    def _siblings(self) -> list[FileTable]:
        """Return all tables of this process over the same rows."""
        watchers = list(self.file.watchers)
        return [each for each in watchers if each.layout.offset == self.layout.offset]

    def _clear_device_caches(self) -> None:
        for table in self._device_tables.values():
            table.clear_cache()

    def _check_file(self) -> None:
        """Raise if the file has another size now; invalidate tables if others wrote to it."""
        file = self.file
        with self._reader.file as fd:
            status = os.fstat(fd)
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
            table.invalidate()
        # A time that has just been may be that of another write, too.
        is_past = file.is_writer or time.time_ns() - status.st_mtime_ns > TICK_NANOSECONDS
        file.modified = status.st_mtime_ns if is_past else None

    def report(self) -> UnifiedReport:
        """Return the account of the table so far."""
        reader = self._reader
        return self._report(
            reads=reader.counters,
            tier="file",
            method=reader.method,
            cache_bytes=reader.cache_bytes,
            copy_bytes=self._source.copy_bytes,
            source=self._source.name,
        )


def write_tables(parts: Sequence[tuple[FileTable, torch.Tensor, torch.Tensor]]) -> None:
    """Write rows of several tables in files, all of them or none; see `write_batch`.

    Args:
        parts: Tables, each with rows (int64, rising, none of them twice) and their content.
    """
    batch = []
    for table, rows, content in parts:
        with table.file.lock:
            table._check_file()
        if content.numel():
            flat = content.reshape(len(rows), -1).view(torch.uint8)
        else:  # NumPy has not all dtypes
            flat = torch.empty((len(rows), 0), dtype=torch.uint8, device="cpu")
        batch.append((table, rows.numpy(), flat.numpy()))
    try:
        write_batch(batch)
    except BaseException:
        for table, _, _ in parts:  # which rows have changed cannot be said yet
            for each in table._siblings():
                each._clear_device_caches()
        raise
    for table, rows, _ in parts:
        for each in table._siblings():
            for on_device in each._device_tables.values():
                on_device.refresh(rows, 0, 0)


def create_table(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fill: Callable[[int, RowLayout], None] | None = None,
) -> RowLayout:
    """Make a file; see `create`. A journal of an older table of that name goes."""
    forget_journal(os.fspath(path))
    return create(path, shape, dtype, fill)


def write_file(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    read_rows: Callable[[torch.Tensor, torch.Tensor], Any],
) -> RowLayout:
    """Make a file of the rows that `read_rows(index, out)` gives, a block at a time.

    Raises:
        StoreError: The file exists, or has no room; nothing is left of it.
    """

    def fill(file: int, layout: RowLayout) -> None:
        num_rows = max(1, _BLOCK_BYTES // max(1, layout.row_bytes))
        for start in range(0, layout.num_rows, num_rows):
            index = torch.arange(start, min(start + num_rows, layout.num_rows), device="cpu")
            rows = torch.empty((len(index), *shape[1:]), dtype=dtype, device="cpu")
            read_rows(index, rows)
            if rows.numel():
                content = rows.view(len(index), -1).view(torch.uint8).numpy()
                write_places(file, layout, index.numpy(), content)

    try:
        return create_table(path, shape, dtype, fill)
    except OSError as error:
        problem = "could not be written"
        raise store_error(error, os.fspath(path), problem, StoreWriteError) from error


@without_gradients
def copy_to_file(table: HostTable | FileTable, path: str | os.PathLike[str]) -> FileTable:
    """Copy all rows to a new file, as `write_file`; no step changes the table meanwhile."""
    source: Table = table
    if isinstance(table, FileTable):  # rows that are read once are not worth a copy in memory
        source = FileTable(table.source, may_copy=False)
    read_rows = functools.partial(source.read_rows, negative=False)
    with change_lock():
        layout = write_file(path, table.shape, table.dtype, read_rows)
    return FileTable(os.path.realpath(layout.path), device=table.device)
