"""Rows written to files so that a killed process leaves the old or the new row, never a torn one.

A batch of rows goes into a journal beside the file first (`_row_journal.py`), then the rows are
written to their places, then the journal goes. Rows of several files can be written together, all
of them or none: the journal beside the first file has the rows of all.

A process has one `TableFile` for each file, by whatever names and for however many tables it is
open. Within the process rows are read and brought to their places in turns, so that no thread
reads a part of a row; other processes are kept from writing by a lock on the file itself. A process
that writes to many files keeps the locks of the latest: what others write to one of the rest is
found when this process is about to write there again, and refused.
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

from penstock.errors import StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.unified._file_pool import replaced
from penstock.unified._row_file import FULL_ERRORS, FileId, RowLayout, file_id
from penstock.unified._row_journal import SUFFIX, Change, recover, try_lock, unlock, write_journal
from penstock.unified._row_places import open_file, read_places
from penstock.unified._row_places import write_places as _write_rows

_P = ParamSpec("_P")
_R = TypeVar("_R")

_files: weakref.WeakValueDictionary[FileId, TableFile] = weakref.WeakValueDictionary()
_lock = threading.Lock()  # of `_files`
_open_writers: dict[FileId, None] = {}  # last the latest to write
TICK_NANOSECONDS = 20_000_000  # between two times that a file system tells apart, at most
MAX_WRITERS = 64  # files that are open to be written, while no batch is
_changing = threading.RLock()


def changing() -> threading.RLock:  # type: ignore[valid-type]
    """The lock that is held while rows of any file are read, changed and written.

    One for all files: a step changes several, and no two threads can wait for each other.
    """
    return _changing


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function as under `torch.no_grad`, which a signal whose handler raises can leave on:
    it may come within the context manager's own Python.
    """
    turn = torch._C._set_grad_enabled  # Python looks for signals after a call in C, not before

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        before = torch.is_grad_enabled()
        try:
            turn(False)
            return function(*args, **options)
        finally:
            turn(before)

    return call


class TableFile:
    """A file with a table, as one process uses it.

    Attributes:
        lock: Held while rows are read, and while they are brought to their places.
        watchers: Objects that are told of rows that have changed, by their method `rows_changed`,
            or that any may have, by `clear_cache`.
        modified: When the file was last modified, as far as is known here; None if it may have
            been since.
    """

    def __init__(self, file_id: FileId | None) -> None:
        self.file_id = file_id
        self.lock = threading.RLock()
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.modified: int | None = None
        self._path = ""
        self._fd = -1  # for writing; it is locked
        self._last_written: int | None = None  # the file's time when the lock was given up
        self._was_of_parent = False  # who may have the lock
        self._batch: list[Part] = []  # whose journal, beside this file, is being written, or is
        self._is_in_journal = False  # the batch, whole
        self._pending: TableFile | None = None  # which has a batch with rows of this file

    @property
    def is_writer(self) -> bool:
        """Whether this process may write to the file, and no other."""
        return self._fd >= 0

    @property
    def is_readable(self) -> bool:
        """Whether all rows are whole; only asked while `lock` is held."""
        return self._pending is None

    def open(self, layout: RowLayout) -> None:
        """Be the process that writes to the file.

        Raises:
            StoreUnavailableError: another one is, or the file cannot be opened.
        """
        with _changing:
            if self.is_writer:
                self._check_name(layout)
                return
            fd = open_file(layout.path, os.O_RDWR)
            try:
                _check_same_file(fd, layout)
                if not try_lock(fd):
                    who = "the parent of this process" if self._was_of_parent else "another process"
                    raise StoreUnavailableError(
                        f"{layout.path} is being written by {who}; only one may write at a time",
                        path=layout.path,
                    )
                modified = os.fstat(fd).st_mtime_ns
                if self._last_written not in (None, modified):
                    self._last_written = modified  # what is written from now on is another error
                    raise StoreUnavailableError(
                        f"{layout.path} was written to by another process since this one has; rows "
                        "read before may be old: read them again. A process keeps others from the "
                        f"{MAX_WRITERS} files that it was the latest to write to",
                        path=layout.path,
                    )
                # Of a process that was killed since this one has opened the table.
                if recover(layout, held=frozenset({os.fstat(fd).st_ino})):
                    with self.lock:
                        for watcher in list(self.watchers):
                            watcher.clear_cache()
            except BaseException:
                os.close(fd)
                raise
            self._path, self._fd, self._last_written = layout.path, fd, None
            if self.file_id is not None:
                _open_writers[self.file_id] = None

    def release(self) -> bool:
        """Close the file and give its lock up, unless it has a batch that is not finished.

        Returns whether it did.
        """
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
        """Wait for rows on their way to their places; bring them there if that has failed.

        Raises:
            StoreError: they still cannot be written.
        """
        with _changing:
            leader = self._pending
            if leader is not None:
                leader._finish()

    def _write(self, batch: list[Part]) -> None:
        """Write a batch, whose first part is of this file; none of its rows is read meanwhile."""
        self._is_in_journal = False
        self._batch = batch
        for writer, _, _ in batch:
            writer.file._pending = self
        with self._errors():
            try:
                self._write_journal()
            except OSError:
                self._end()
                raise
        self._is_in_journal = True
        self._finish()

    def _finish(self) -> None:
        """Bring the rows of the batch to their places, or none of them.

        None, if an interrupt came before it was known that the journal has them.
        """
        with self._errors():
            if self._is_in_journal:
                for writer, rows, content in self._batch:
                    writer.file._place(writer.layout, rows, content)
                for writer, _, _ in self._batch:
                    os.fdatasync(writer.file._fd)
            with suppress(FileNotFoundError):
                os.unlink(self._path + SUFFIX)
        self._end()

    def _end(self) -> None:
        for writer, _, _ in self._batch:
            writer.file._pending = None
        self._batch = []

    def _place(self, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
        with self.lock:
            _write_rows(self._fd, layout, rows, content)
            self.modified = os.fstat(self._fd).st_mtime_ns
            for watcher in list(self.watchers):
                watcher.rows_changed(layout, rows, content)

    def _write_journal(self) -> None:
        changes = [
            Change(writer.layout, rows, content, read_places(writer.file._fd, writer.layout, rows))
            for writer, rows, content in self._batch
        ]
        path, mode = self._path + SUFFIX, os.fstat(self._fd).st_mode
        try:
            write_journal(path, changes, mode)
        except FileExistsError:  # of a file that had this name before
            held = frozenset(os.fstat(writer.file._fd).st_ino for writer, _, _ in self._batch)
            recover(changes[0].layout, held=held)
            write_journal(path, changes, mode)

    def _check_name(self, layout: RowLayout) -> None:
        """Raise unless the file still has the name by which it is written."""
        try:
            status = os.stat(layout.path)
        except FileNotFoundError:
            status = None
        if status is None or not os.path.samestat(status, os.fstat(self._fd)):
            raise replaced(layout.path)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = StoreFullError if error.errno in FULL_ERRORS else StoreWriteError
            raise kind(
                f"rows of {self._path} could not be written: {os.strerror(error.errno or 0)}",
                path=self._path,
                errno=error.errno,
            ) from error

    def _be_a_child(self) -> None:
        """Be that of a forked process: what its parent is doing with the file is not its work."""
        # What tables keep of the file may be half new, if another thread was about to change it;
        # and the parent may write again before the file gets another time.
        is_changing = not self.lock.acquire(blocking=False)
        is_recent = time.time_ns() - (self.modified or 0) <= TICK_NANOSECONDS
        if is_changing or is_recent:
            self.modified = None
        self.lock = threading.RLock()
        self._batch, self._pending = [], None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._was_of_parent = True
            os.close(fd)  # the parent has it still, and with it the lock

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            if self.file_id is not None:
                _open_writers.pop(self.file_id, None)


class RowWriter:
    """Writes rows of one table; thread-safe. Only one process may write to a file at a time."""

    def __init__(self, layout: RowLayout) -> None:
        """Raises StoreUnavailableError if another process writes to the file."""
        self.layout = layout
        self.file = table_file(layout)
        self.file.open(layout)

    def put(self, rows: np.ndarray, content: np.ndarray) -> None:
        """Write rows to the disk.

        Args:
            rows: int64, rising, none of them twice, all of them in the table.
            content: uint8 of shape (len(rows), row_bytes), contiguous.

        Raises:
            StoreFullError: the journal does not fit on the disk; the table is as it was.
            StoreWriteError: the rows could not be written; opening the table again ends the job.
        """
        put_together([(self, rows, content)])


Part = tuple[RowWriter, np.ndarray, np.ndarray]


def put_together(parts: Sequence[Part]) -> None:
    """Write rows of several files, all of them or none, whatever happens to this process.

    Args:
        parts: writers, each with rows and content as `RowWriter.put` takes them.

    Raises:
        StoreFullError: the journal does not fit on the disk; the tables are as they were.
        StoreWriteError: the rows could not be written; opening the first table again ends the job.
        StoreUnavailableError: the files are not all in one directory, or were replaced.
    """
    files = [writer.file for writer, _, _ in parts]
    parts = [part for part in parts if part[2].size]
    with _changing:
        try:
            for writer, _, _ in parts:
                writer.file.open(writer.layout)
                writer.file.finish()  # what has failed before
                _check_directory(writer.layout.path, parts[0][0].layout.path)
            if parts:
                parts[0][0].file._write(parts)
        finally:
            _release_others(files)


def _release_others(latest: list[TableFile]) -> None:
    """Close what has not been written for the longest time, where more is open than may be."""
    for file in latest:
        if file.file_id is not None and file.is_writer:
            _open_writers[file.file_id] = _open_writers.pop(file.file_id, None)
    for each in list(_open_writers)[:-MAX_WRITERS]:
        file = _files.get(each)
        if file is None or not file.is_writer or file.release():
            _open_writers.pop(each, None)


def table_file(layout: RowLayout) -> TableFile:
    """The object of a file in this process, whatever its name."""
    if layout.file_id is None:
        return TableFile(None)
    with _lock:
        found = _files.get(layout.file_id)
        if found is None:
            found = _files[layout.file_id] = TableFile(layout.file_id)
        return found


def _check_same_file(fd: int, layout: RowLayout) -> None:
    """Raise unless this is the very file whose header was read."""
    if layout.file_id not in (None, file_id(fd)):
        raise replaced(layout.path)


def _check_directory(path: str, leader: str) -> None:
    """Raise unless the leader's journal would be found by the file's name."""
    if os.path.dirname(path) != os.path.dirname(leader):
        raise StoreUnavailableError(
            f"{path} lies in another directory than {leader}, so a journal of both would not be "
            "found: an optimizer's state must lie beside its table",
            path=path,
        )


def _start_child() -> None:
    global _lock, _changing
    _lock, _changing = threading.Lock(), threading.RLock()
    _open_writers.clear()
    for file in list(_files.values()):
        file._be_a_child()


os.register_at_fork(after_in_child=_start_child)
