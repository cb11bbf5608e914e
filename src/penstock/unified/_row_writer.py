"""Rows written to files so that a killed process leaves the old or the new row, never a torn one.

A batch of rows goes into a journal beside the file first. When all of it is on the disk the journal
is marked as complete, then the rows are written to their places, then the mark is taken away. Who
opens the file and finds a complete journal writes its rows again; one that is not complete is
ignored, because then no place has been touched.

Rows of several files can be written together, all of them or none: they share the journal of the
first file, and beside each of the others lies a journal that only names it.

The journal `<file>.journal`: 20 bytes of header (magic, the number of bytes of what follows the
header's page, and their CRC-32; zeroes when there is nothing to do). At byte 4096 the length of a
JSON text (8 bytes), the text, which says of each file where its rows lie and how many were written,
and then for each file the row numbers (int64) and the rows. A journal that names another one has
another magic, and its text is the name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from penstock.errors import StoreError, StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.unified._file_rows import library
from penstock.unified._row_file import FULL_ERRORS, PAGE_BYTES, RowLayout, open_layout

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sQI")
_LENGTH = struct.Struct("<Q")
_MAGIC = b"PENSTJR2"
_LINK_MAGIC = b"PENSTLNK"
_SUFFIX = ".journal"


class RowWriter:
    """Writes rows of one file; thread-safe. Only one process may have a writer at a time."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._owns_journal = False
        self._unfinished: list[Part] = []  # in a complete journal, but not all in their places
        self._failed = False  # to bring them there
        self._leader: RowWriter | None = None  # whose journal has rows of this file
        self._fd = _open(layout.path, os.O_RDWR)
        self._journal = -1
        try:
            _check_same_file(self._fd, layout)
            self._journal = _locked_journal(layout.path, os.fstat(self._fd).st_mode)
            self._owns_journal = True
            # Of a process that was killed since this one has opened the table.
            _finish_interrupted(self._journal, layout.path + _SUFFIX, follow=True)
            _sync_directory(layout.path)
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
        put_together([(self, rows, content)])

    def finish(self) -> None:
        """Bring the rows of a write that failed to their places, before they are read.

        Raises:
            StoreError: they still cannot be written.
        """
        leader = self._leader or self
        if leader._failed and self._process == os.getpid():
            with leader._lock, leader._errors():
                leader._finish()

    def close(self) -> None:
        """Close the files; the journal is empty by now and goes."""
        fd, self._fd = self._fd, -1
        journal, self._journal = self._journal, -1
        if fd >= 0:
            os.close(fd)
        if journal >= 0:
            mine = self._owns_journal and self._process == os.getpid()
            if mine and self._is_done(journal):
                os.unlink(self.layout.path + _SUFFIX)
            os.close(journal)

    def __del__(self) -> None:
        if hasattr(self, "_journal"):
            self.close()

    def _is_done(self, journal: int) -> bool:
        magic = os.pread(journal, 8, 0)
        if magic == _LINK_MAGIC:
            return self._leader is not None and not self._leader._unfinished
        return magic in (b"", bytes(8))

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise StoreUnavailableError(
                f"{self.layout.path} is written by the parent of this process; only one may write "
                "at a time",
                path=self.layout.path,
            )

    def _finish(self) -> None:
        """Write the rows of a complete journal to their places."""
        if not self._unfinished:
            return
        self._failed = True  # until it is done
        for writer, rows, content in self._unfinished:
            _write_rows(writer._fd, writer.layout, rows, content)
        for writer, _, _ in self._unfinished:
            os.fdatasync(writer._fd)
        _clear(self._journal)
        self._unfinished, self._failed = [], False

    def _follow(self, leader: RowWriter) -> None:
        """Let whoever opens this file look into the journal of the leader's."""
        if self._leader is not leader:
            name = os.path.relpath(leader.layout.path + _SUFFIX, os.path.dirname(self.layout.path))
            _write_journal(self._journal, _LINK_MAGIC, [memoryview(os.fsencode(name))])
            self._leader = leader

    def _lead(self) -> None:
        """Use the own journal again."""
        if self._leader is not None:
            _clear(self._journal)
            self._leader = None

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


Part = tuple[RowWriter, np.ndarray, np.ndarray]


def put_together(parts: Sequence[Part], committed: Callable[[], None] = lambda: None) -> None:
    """Write rows of several files, all of them or none, whatever happens to this process.

    Args:
        parts: writers, each with rows and content as `RowWriter.put` takes them.
        committed: called when the rows are safe, but not in their places yet.

    Raises:
        StoreFullError: the journal does not fit on the disk; the tables are as they were.
        StoreWriteError: the rows could not be written; opening the first table again ends the job.
    """
    parts = [part for part in parts if part[2].size]
    if not parts:
        return
    writers = [writer for writer, _, _ in parts]
    leader = writers[0]
    for writer in writers:
        writer._check_process()
    with ExitStack() as held:
        for writer in sorted(writers, key=lambda each: each.layout.path):
            held.enter_context(writer._lock)
        held.enter_context(leader._errors())
        for writer in writers:
            (writer._leader or writer)._finish()  # what has failed before
        leader._lead()
        for writer in writers[1:]:
            writer._follow(leader)
        _write_journal(leader._journal, _MAGIC, _journal_of(leader, parts))
        leader._unfinished = list(parts)
        committed()
        leader._finish()


# ---------------------------------------------------------------------------- the journal

_WHERE = ("offset", "shape", "rows_per_block", "block_bytes")


def _journal_of(leader: RowWriter, parts: Sequence[Part]) -> list[memoryview]:
    """The body of a journal."""
    directory = os.path.dirname(leader.layout.path)
    entries = []
    for writer, rows, _ in parts:
        layout = writer.layout
        source = os.path.relpath(layout.path, directory) + (f"#{layout.key}" if layout.key else "")
        entries.append({"source": source, "count": len(rows), **_where(layout)})
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned
    body = [memoryview(_LENGTH.pack(len(text)) + text)]
    for _, rows, content in parts:
        body += [rows.data.cast("B"), content.data.cast("B")]
    return body


def _where(layout: RowLayout) -> dict[str, Any]:
    """What must be the same when the rows are written again."""
    place = {name: getattr(layout, name) for name in _WHERE}
    return {**place, "shape": list(layout.shape), "row_bytes": layout.row_bytes}


def _write_journal(journal: int, magic: bytes, body: list[memoryview]) -> None:
    checksum, at = 0, PAGE_BYTES
    try:
        for part in body:
            checksum = zlib.crc32(part, checksum)
            _write(journal, part, at)
            at += part.nbytes
        os.fdatasync(journal)
        _write(journal, memoryview(_HEADER.pack(magic, at - PAGE_BYTES, checksum)), 0)
        os.fdatasync(journal)
    except OSError:
        with suppress(OSError):
            os.ftruncate(journal, 0)  # or a full disk would stay full of it
        raise


def recover(layout: RowLayout) -> int:
    """Finish what a killed process has begun; returns how many rows were written again.

    Raises:
        StoreError: the journal is of another table, or cannot be read.
    """
    return _recover(layout.path + _SUFFIX, follow=True)


def _recover(path: str, *, follow: bool) -> int:
    if not os.path.exists(path):
        return 0
    try:
        journal = _open(path, os.O_RDWR)
    except StoreUnavailableError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        journal = _open(path, os.O_RDONLY)  # then it can only be asked whether it is complete
    try:
        if not _try_lock(journal):
            return 0  # its writer lives and will finish by itself
        num_rows = _finish_interrupted(journal, path, follow=follow)
        if num_rows and os.pread(journal, 8, 0) != _LINK_MAGIC:
            os.unlink(path)
        return num_rows
    finally:
        os.close(journal)


def _finish_interrupted(journal: int, path: str, *, follow: bool) -> int:
    """Write the rows of a locked journal, if it is complete; returns how many there were."""
    header = os.pread(journal, _HEADER.size, 0)
    if len(header) < _HEADER.size or header[:8] not in (_MAGIC, _LINK_MAGIC):
        return 0
    magic, num_bytes, checksum = _HEADER.unpack(header)
    body = _read(journal, min(num_bytes, os.fstat(journal).st_size), PAGE_BYTES)
    if len(body) != num_bytes or zlib.crc32(body) != checksum:
        raise StoreError(
            f"{path} is damaged: its checksum is wrong, so the rows of a batch that was being "
            f"written to {path.removesuffix(_SUFFIX)} may be torn. Restore the table, or "
            "delete the journal.",
            path=path,
        )
    directory = os.path.dirname(path)
    if magic == _LINK_MAGIC:
        leader = os.path.join(directory, os.fsdecode(body))
        return _recover(leader, follow=False) if follow else 0
    if fcntl.fcntl(journal, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise StoreUnavailableError(
            f"{path} holds rows of an interrupted write to {path.removesuffix(_SUFFIX)}, which "
            "this process may not finish: open the table once as a user who may write to both",
            path=path,
            errno=errno.EACCES,
        )
    num_rows = _write_again(path, directory, body)
    _clear(journal)
    logger.warning("%s: %d rows of an interrupted write were written again", path, num_rows)
    return num_rows


def _write_again(path: str, directory: str, body: bytes) -> int:
    """Write the rows of a complete journal to their places; returns how many there are."""
    at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    entries = json.loads(body[_LENGTH.size : at])
    layouts = [_layout_of(path, directory, entry) for entry in entries]
    num_rows = 0
    for layout, entry in zip(layouts, entries, strict=True):
        count = entry["count"]
        rows = np.frombuffer(body, dtype=np.int64, count=count, offset=at)
        at += rows.nbytes
        size = count * layout.row_bytes
        content = np.frombuffer(body, dtype=np.uint8, count=size, offset=at)
        at, num_rows = at + size, num_rows + count
        table = _open(layout.path, os.O_RDWR)
        try:
            _write_rows(table, layout, rows, content)
            os.fdatasync(table)
        finally:
            os.close(table)
    return num_rows


def _layout_of(path: str, directory: str, entry: dict[str, Any]) -> RowLayout:
    """Of a file that a journal has rows of, if it is still the same."""
    layout = open_layout(os.path.join(directory, entry["source"]))
    found, expected = _where(layout), {name: entry[name] for name in _where(layout)}
    if found != expected:
        raise StoreError(
            f"{path} holds rows of a table {expected}, but that of {layout.path} is {found}: it is "
            "the journal of another table. Move it away.",
            path=path,
        )
    return layout


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


def _check_same_file(fd: int, layout: RowLayout) -> None:
    """Raise unless this is the very file whose header was read."""
    status = os.fstat(fd)
    if layout.file_id not in (None, (status.st_dev, status.st_ino)):
        raise StoreUnavailableError(
            f"{layout.path} has been replaced by another file since the table was opened; open it "
            "again",
            path=layout.path,
        )


def _sync_directory(path: str) -> None:
    """Have a new file beside `path` survive a loss of power."""
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


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


def _open(path: str, flags: int, mode: int = 0o600) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        raise StoreUnavailableError(
            f"{path} cannot be opened{'' if flags == os.O_RDONLY else ' for writing'}: "
            f"{os.strerror(error.errno or 0)}",
            path=path,
            errno=error.errno,
        ) from error


def _try_lock(journal: int) -> bool:
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked_journal(path: str, mode: int) -> int:
    """The journal beside a table, made for whoever may read the table, and locked."""
    while True:
        journal = _open(path + _SUFFIX, os.O_RDWR | os.O_CREAT, mode & 0o666)
        try:
            if not _try_lock(journal):
                raise StoreUnavailableError(
                    f"{path} is being written by another process, or here through another table "
                    "object over the same file; only one may write at a time",
                    path=path,
                )
            if _is_at(journal, path + _SUFFIX):
                return journal
        except BaseException:
            os.close(journal)
            raise
        os.close(journal)  # who had it before has taken it away: nobody would find it after a kill


def _is_at(descriptor: int, path: str) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
