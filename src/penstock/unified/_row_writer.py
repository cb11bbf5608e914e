"""Rows written to a file so that a killed process leaves the old or the new row, never a torn one.

A batch of rows goes into a journal beside the file first. When all of it is on the disk the journal
is marked as complete, then the rows are written to their places, then the mark is taken away. Who
opens the file and finds a complete journal writes its rows again; one that is not complete is
ignored, because then no place has been touched.

The journal `<file>.journal`: 40 bytes of header (magic, the number of rows, their bytes, and CRC-32
of all that follows the header; zeroes when there is nothing to do), at byte 4096 the row numbers
(int64), then the rows.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from penstock.errors import StoreError, StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.unified._file_rows import library
from penstock.unified._row_file import FULL_ERRORS, PAGE_BYTES, RowLayout

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQQI")
_MAGIC = b"PENSTJRN"


class RowWriter:
    """Writes rows of one file; thread-safe. Only one process may have a writer at a time."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._owns_journal = False
        self._unfinished: tuple[np.ndarray, np.ndarray] | None = None
        self._fd = _open(layout.path, os.O_RDWR)
        self._journal = -1
        try:
            self._journal = _open(layout.path + ".journal", os.O_RDWR | os.O_CREAT)
            _lock_file(self._journal, layout.path)
            self._owns_journal = True
        except BaseException:
            self.close()
            raise

    def put(self, rows: np.ndarray, content: np.ndarray) -> None:
        """Write rows to the disk.

        Args:
            rows: int64, rising, none of them twice, all of them in the table.
            content: uint8 of shape (len(rows), row_bytes), contiguous.

        Raises:
            StoreFullError: the journal does not fit on the disk; the table is as it was.
            StoreWriteError: the rows could not be written; opening the table again ends the job.
        """
        if not len(rows):
            return
        if self._process != os.getpid():
            raise StoreUnavailableError(
                f"{self.layout.path} is written by the parent of this process; only one may write "
                "at a time",
                path=self.layout.path,
            )
        with self._lock, self._errors():
            self._finish()  # of a write that failed
            self._write_journal(rows, content)
            self._unfinished = rows, content
            self._finish()

    def close(self) -> None:
        """Close the files; the journal is empty by now and goes."""
        fd, self._fd = self._fd, -1
        journal, self._journal = self._journal, -1
        if fd >= 0:
            os.close(fd)
        if journal >= 0:
            mine = self._owns_journal and self._process == os.getpid()
            if mine and os.pread(journal, 8, 0) in (b"", b"\0" * 8):
                os.unlink(self.layout.path + ".journal")
            os.close(journal)

    def __del__(self) -> None:
        if hasattr(self, "_journal"):
            self.close()

    def _finish(self) -> None:
        """Write the rows of a complete journal to their places."""
        if self._unfinished is not None:
            _write_rows(self._fd, self.layout, *self._unfinished)
            os.fdatasync(self._fd)
            _clear(self._journal)
            self._unfinished = None

    def _write_journal(self, rows: np.ndarray, content: np.ndarray) -> None:
        checksum = zlib.crc32(content.data, zlib.crc32(rows.data))
        _write(self._journal, rows.data.cast("B"), PAGE_BYTES)
        _write(self._journal, content.data.cast("B"), PAGE_BYTES + rows.nbytes)
        os.fdatasync(self._journal)
        header = _HEADER.pack(_MAGIC, len(rows), self.layout.row_bytes, checksum)
        _write(self._journal, memoryview(header), 0)
        os.fdatasync(self._journal)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = StoreFullError if error.errno in FULL_ERRORS else StoreWriteError
            raise kind(
                f"rows of {self.layout.path} could not be written: {os.strerror(error.errno or 0)}",
                path=self.layout.path,
                errno=error.errno,
            ) from error


def recover(layout: RowLayout) -> int:
    """Finish what a killed process has begun; returns how many rows were written again.

    Raises:
        StoreError: the journal is of another table, or cannot be read.
    """
    path = layout.path + ".journal"
    if not os.path.exists(path):
        return 0
    journal = _open(path, os.O_RDWR)
    try:
        if not _try_lock(journal):
            return 0  # its writer lives and will finish by itself
        header = os.pread(journal, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[:8] != _MAGIC:
            return 0
        _, count, row_bytes, checksum = _HEADER.unpack(header)
        if row_bytes != layout.row_bytes:
            raise StoreError(
                f"{path} holds rows of {row_bytes} bytes, but those of {layout.path} have "
                f"{layout.row_bytes}: it is the journal of another table. Move it away.",
                path=path,
            )
        content = _read(journal, count * (8 + row_bytes), PAGE_BYTES)
        if zlib.crc32(content) != checksum:
            raise StoreError(
                f"{path} is damaged: its checksum is wrong, so the rows of a batch that was being "
                f"written to {layout.path} may be torn. Restore the table, or delete the journal.",
                path=path,
            )
        rows = np.frombuffer(content, dtype=np.int64, count=count)
        table = _open(layout.path, os.O_RDWR)
        try:
            _write_rows(
                table, layout, rows, np.frombuffer(content, dtype=np.uint8, offset=count * 8)
            )
            os.fdatasync(table)
        finally:
            os.close(table)
        _clear(journal)
        os.unlink(path)
        logger.warning("%s: %d rows of an interrupted write were written again", layout.path, count)
        return count
    finally:
        os.close(journal)


def _write_rows(fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
    compiled = library()
    if compiled is None:
        row_bytes = layout.row_bytes
        whole = np.ascontiguousarray(content).data.cast("B")
        for place, row in enumerate(rows.tolist()):
            start = place * row_bytes
            _write(fd, whole[start : start + row_bytes], layout.row_offset(row))
        return
    outcome = (ctypes.c_int64 * 4)()
    compiled.penstock_write_rows(
        fd,
        layout.offset,
        layout.num_rows,
        layout.row_bytes,
        layout.rows_per_block,
        layout.block_bytes,
        rows.ctypes.data,
        len(rows),
        content.ctypes.data,
        outcome,
    )
    if outcome[0]:
        raise OSError(outcome[3], os.strerror(outcome[3]))


def _clear(journal: int) -> None:
    _write(journal, memoryview(bytes(_HEADER.size)), 0)


def _write(fd: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(fd, content, offset)
        content, offset = content[written:], offset + written


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.pread(fd, num_bytes, offset)
        if not part:
            break
        parts.append(part)
        num_bytes, offset = num_bytes - len(part), offset + len(part)
    return b"".join(parts)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailableError(
            f"{path} cannot be opened for writing: {os.strerror(error.errno or 0)}",
            path=path,
            errno=error.errno,
        ) from error


def _try_lock(journal: int) -> bool:
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_file(journal: int, path: str) -> None:
    if not _try_lock(journal):
        raise StoreUnavailableError(
            f"{path} is being written by another process or by another table object; only one "
            "may write at a time",
            path=path,
        )
