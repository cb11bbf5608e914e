"""Writes of rows to files: a killed process leaves the old or the new row, never a mixture.

A batch of rows is written to a journal beside the file first (`_journal.py`), then the rows are
written to their places, then the journal is deleted. Rows of several files can be written together,
all of them or none: the journal beside the first file has the rows of all.

A process has one `TableFile` for each file, under all its names and for all tables. Within the
process rows are read and written to their places in turns, so that no thread reads a part of a row;
other processes are kept from writing by a lock on the file itself. A process that writes to many
files keeps the locks of the latest: a write of another process to one of the rest is found when
this process is about to write there again, and refused.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from penstock.compat.autograd import set_grad_enabled
from penstock.errors import StoreUnavailableError, StoreWriteError
from penstock.unified.file._journal import SUFFIX, Change, recover, try_lock, unlock, write_journal
from penstock.unified.file._pool import open_file, replaced_error
from penstock.unified.file._rows import read_places, write_places
from penstock.unified.file.layout import FileId, RowLayout, file_id, store_error

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_files: weakref.WeakValueDictionary[FileId, TableFile] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # of `_files`
_open_writers: dict[FileId, None] = {}  # in the order of their latest writes
TICK_NANOSECONDS = 20_000_000  # between two times that a file system tells apart, at most
MAX_WRITERS = 64  # files that stay open for writing between two batches
_change_lock = threading.RLock()


def change_lock() -> threading.RLock:  # type: ignore[valid-type]
    """Return the lock that is held while rows of any file are read, changed and written.

    One for all files: a step changes several, and no two threads can wait for each other.
    """
    return _change_lock


def without_gradients(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Run a function as under `torch.no_grad`, which a signal whose handler raises can leave on:
    it may come within the context manager's own Python.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        before = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)  # in C: Python handles signals after the call, not before
            return function(*args, **options)
        finally:
            set_grad_enabled(before)

    return call


class TableFile:
    """A file with a table, as one process uses it.

    Attributes:
        lock: Lock that is held while rows are read, and while they are written to their places.
        watchers: Objects whose method `update_rows` is called for rows that have changed, and
            `invalidate` if any may have.
        modified: Time at which the file was last modified, as far as is known here; None if it may
            have been since.
    """

    def __init__(self, file_id: FileId) -> None:
        self.file_id = file_id
        self.lock = threading.RLock()
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.modified: int | None = None
        self._path = ""
        self._fd = -1  # for writing; it is locked
        self._last_written: int | None = None  # the file's time when the lock was given up
        self._parent_was_writer = False  # and may still have the lock
        self._batch: list[Part] = []  # being written, with a journal beside this file
        self._is_in_journal = False  # whether the whole batch is in the journal
        self._pending: TableFile | None = None  # the file whose batch has rows of this file

    @property
    def is_writer(self) -> bool:
        """True if this process may write to the file, and no other."""
        return self._fd >= 0

    @property
    def is_readable(self) -> bool:
        """True if all rows are whole; valid while `lock` is held."""
        return self._pending is None

    def open(self, layout: RowLayout) -> None:
        """Open and lock the file, so that only this process writes to it.

        Raises:
            StoreUnavailableError: Another process writes to it, or it cannot be opened.
        """
        with _change_lock:
            if self.is_writer:
                self._check_name(layout)
                return
            fd = open_file(layout.path, os.O_RDWR)
            try:
                self._lock_and_recover(fd, layout)
            except BaseException:
                os.close(fd)
                raise
            self._path, self._fd, self._last_written = layout.path, fd, None
            _open_writers[self.file_id] = None

    def _lock_and_recover(self, fd: int, layout: RowLayout) -> None:
        if self.file_id != file_id(fd):  # not the file whose header was read
            raise replaced_error(layout.path)
        if not try_lock(fd):
            writer = "the parent of this process" if self._parent_was_writer else "another process"
            raise StoreUnavailableError(
                f"{layout.path} is being written by {writer}; only one may write at a time",
                path=layout.path,
            )
        modified = os.fstat(fd).st_mtime_ns
        if self._last_written not in (None, modified):
            self._last_written = modified  # a later write of others is another error
            raise StoreUnavailableError(
                f"{layout.path} was written to by another process since this one has; rows "
                "read before may be old: read them again. A process keeps others from the "
                f"{MAX_WRITERS} files that it was the latest to write to",
                path=layout.path,
            )
        # Finish the write of a process that was killed since this one has opened the table.
        if recover(layout, held=frozenset({os.fstat(fd).st_ino})):
            with self.lock:
                for watcher in list(self.watchers):
                    watcher.invalidate()

    def release(self) -> bool:
        """Close and unlock the file unless it has an unfinished batch; return whether it did."""
        if self._pending is not None or self._batch:
            return False
        modified = os.fstat(self._fd).st_mtime_ns
        # Another process's write at the same time could not be told from this one's.
        if (wait := TICK_NANOSECONDS - (time.time_ns() - modified)) > 0:
            time.sleep(min(wait, TICK_NANOSECONDS) / 1e9)
        fd, self._last_written, self._fd = self._fd, modified, -1
        unlock(fd)  # or a process that is being forked would have the lock for a while
        os.close(fd)
        return True

    def finish(self) -> None:
        """Wait for rows that are being written to their places; write them if that has failed.

        Raises:
            StoreError: The rows still cannot be written.
        """
        with _change_lock:
            if self._pending is not None:
                self._pending._finish()

    def _write(self, batch: list[Part]) -> None:
        """Write a batch whose first part is of this file; none of its rows is read meanwhile."""
        self._is_in_journal = False
        self._batch = batch
        for table, _, _ in batch:
            table.file._pending = self
        with self._translate_errors():
            try:
                self._write_journal()
            except OSError:
                self._end_batch()
                raise
        self._is_in_journal = True
        self._finish()

    def _finish(self) -> None:
        """Write the rows of the batch to their places, or none of them.

        None, if an interrupt came before the journal was sure to have them.
        """
        with self._translate_errors(is_kept=self._is_in_journal):
            if self._is_in_journal:
                for table, rows, content in self._batch:
                    file, layout = table.file, table.layout
                    with file.lock:
                        write_places(file._fd, layout, rows, content)
                        file.modified = os.fstat(file._fd).st_mtime_ns
                        for watcher in list(file.watchers):
                            watcher.update_rows(layout, rows, content)
                for table, _, _ in self._batch:
                    os.fdatasync(table.file._fd)
            with suppress(FileNotFoundError):
                os.unlink(self._path + SUFFIX)
        self._end_batch()

    def _end_batch(self) -> None:
        for table, _, _ in self._batch:
            table.file._pending = None
        self._batch = []

    def _write_journal(self) -> None:
        changes = [
            Change(table.layout, rows, content, read_places(table.file._fd, table.layout, rows))
            for table, rows, content in self._batch
        ]
        path, mode = self._path + SUFFIX, os.fstat(self._fd).st_mode
        try:
            write_journal(path, changes, mode)
        except FileExistsError:  # of a file that had this name before
            held = frozenset(os.fstat(table.file._fd).st_ino for table, _, _ in self._batch)
            recover(changes[0].layout, held=held)
            write_journal(path, changes, mode)

    def _check_name(self, layout: RowLayout) -> None:
        """Raise unless the file still has the name by which it is written."""
        try:
            status = os.stat(layout.path)
        except FileNotFoundError:
            status = None
        if status is None or not os.path.samestat(status, os.fstat(self._fd)):
            raise replaced_error(layout.path)

    @contextmanager
    def _translate_errors(self, *, is_kept: bool = False) -> Iterator[None]:
        """Name the file; a batch that the journal keeps is never one that found no room."""
        try:
            yield
        except OSError as error:
            if not is_kept:
                problem = "could not be written"
                raise store_error(error, self._path, problem, StoreWriteError) from error
            raise StoreWriteError(
                f"{self._path} could not be written: {os.strerror(error.errno or 0)}. Its rows are "
                f"kept in {self._path + SUFFIX}; the next read or write, or the next opening, "
                "writes them to their places: do not write them again",
                path=self._path,
                errno=error.errno,
            ) from error

    def _reset_after_fork(self) -> None:
        """Reset the state in a forked child: its parent's batch and lock are not its own."""
        # Rows that tables keep may be half new, if another thread was about to change them; and the
        # parent may write again before the file gets another time.
        is_changing = not self.lock.acquire(blocking=False)
        is_recent = time.time_ns() - (self.modified or 0) <= TICK_NANOSECONDS
        if is_changing or is_recent:
            self.modified = None
        self.lock = threading.RLock()
        self._batch, self._pending = [], None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._parent_was_writer = True
            os.close(fd)  # the parent still has it, and with it the lock

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            _open_writers.pop(self.file_id, None)


Part = tuple[Any, np.ndarray, np.ndarray]
"""A table with its `layout` and its `file` (a `TableFile`), row numbers (int64, rising, none of
them twice, all of them in the table), and their bytes (uint8 of shape (len(rows), row_bytes),
contiguous)."""


def write_batch(parts: Sequence[Part]) -> None:
    """Write rows of several files, all of them or none, even if this process is killed.

    Raises:
        StoreFullError: The journal does not fit on the disk; the tables are as they were.
        StoreWriteError: The rows could not be written; opening the first table again writes them.
        StoreUnavailableError: The files are not all in one directory, were replaced, or are being
            written by another process.
    """
    files = [table.file for table, _, _ in parts]
    with _change_lock:
        try:
            for table, _, _ in parts:
                table.file.open(table.layout)
                table.file.finish()  # what has failed before
                path, leader = table.layout.path, parts[0][0].layout.path
                if os.path.dirname(path) != os.path.dirname(leader):
                    raise StoreUnavailableError(
                        f"{path} lies in another directory than {leader}, so a journal of both "
                        "would not be found: an optimizer's state must lie beside its table",
                        path=path,
                    )
            parts = [part for part in parts if part[2].size]
            if parts:
                parts[0][0].file._write(parts)
        finally:
            _release_oldest(files)


def _release_oldest(latest: list[TableFile]) -> None:
    """Close files that have not been written for the longest time, where too many are open."""
    for file in latest:
        if file.is_writer:
            _open_writers[file.file_id] = _open_writers.pop(file.file_id, None)
    for each in list(_open_writers)[:-MAX_WRITERS]:
        file = _files.get(each)
        if file is None or not file.is_writer or file.release():
            _open_writers.pop(each, None)


def table_file(layout: RowLayout) -> TableFile:
    """Return the object of a file in this process, under any of its names."""
    identity = layout.file_id or file_id(layout.path)
    with _lock:
        found = _files.get(identity)
        if found is None:
            found = _files[identity] = TableFile(identity)
        return found


def _reset_all_after_fork() -> None:
    global _lock, _change_lock
    _lock, _change_lock = threading.Lock(), threading.RLock()
    _open_writers.clear()
    for file in list(_files.values()):
        file._reset_after_fork()


os.register_at_fork(after_in_child=_reset_all_after_fork)
