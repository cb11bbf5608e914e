"""Journals: rows of a batch, old and new, that outlive the process that was writing them.

A journal exists under its name, `<file>.journal`, only while it is complete: it is written to a
file without a name, synced, and then linked. It holds the old and the new bytes of each row. So a
process that finds a journal can tell from the table's bytes what has happened:

* all bytes are old or new ones: the rows are written again, and the journal is deleted;
* none is a new one, and the file was written to since: the journal is deleted, and that is all;
* new bytes and others: the journal and the table do not belong together, which is an error.

Data that was made anew under an old name is of the second kind, and is never touched. Files are
identified by their inode, under any name: of several files that were written together one journal,
beside the first of them, has the rows of all.

The format: 20 bytes of header (magic, the number of bytes that follow, and their CRC-32), the
length of a JSON text (8 bytes), the text, which has of each file its name, its inode, the layout of
its rows and how many were written, and then for each file the row numbers (int64), the new rows
and the old ones.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import logging
import os
import stat
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import StoreError, StoreUnavailableError
from penstock.unified.file._pool import open_file
from penstock.unified.file._rows import read_places, write_all, write_places
from penstock.unified.file.layout import (
    RowLayout,
    join_source,
    open_layout,
    split_source,
    store_error,
)

logger = logging.getLogger(__name__)

SUFFIX = ".journal"
_HEADER = struct.Struct("<8sQI")
_LENGTH = struct.Struct("<Q")
_MAGIC = b"PENSTJR3"
_LAYOUT_FIELDS = ("offset", "shape", "rows_per_block", "block_bytes", "row_bytes")
_SECTOR_BYTES = 512  # written whole by a disk
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.0005, 0.05
WAIT_SECONDS = 60.0  # for another process that is writing the rows of a journal


@dataclasses.dataclass(frozen=True)
class Change:
    """Rows of one file that a batch changes."""

    layout: RowLayout
    rows: np.ndarray
    """Row numbers, int64, rising."""
    new: np.ndarray
    """Bytes to write, uint8 (len(rows), row_bytes)."""
    old: np.ndarray
    """Bytes of the file before, of the same shape."""


# ------------------------------------------------------------------------ writing one


def write_journal(path: str, changes: Sequence[Change], mode: int) -> None:
    """Write a journal with the permissions `mode`, and sync it; when this returns it is complete.

    Raises:
        FileExistsError: There is a journal of this name.
        OSError: The journal could not be written; then there is none.
    """
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        journal, unfinished = _open_unnamed(path)
        try:
            os.fchmod(journal, mode & 0o666)
            _write_body(journal, changes)
            os.fdatasync(journal)
            name = unfinished or f"/proc/self/fd/{journal}"
            # With a directory given, Python follows the link that /proc has in its place.
            os.link(name, path, src_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(journal)
            if unfinished:
                os.unlink(unfinished)
        try:
            os.fsync(directory)  # the new name survives a loss of power
        except OSError:
            os.unlink(path)  # or the next opening would write rows that were reported as lost
            raise
    finally:
        os.close(directory)


def _open_unnamed(path: str) -> tuple[int, str]:
    """Open a file beside `path` that vanishes with this process; else a named one, and its name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(os.path.dirname(path) or ".", flags | os.O_TMPFILE, 0o600), ""
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    unfinished = f"{path}.unfinished"
    return os.open(unfinished, flags | os.O_CREAT | os.O_TRUNC, 0o600), unfinished


def _write_body(journal: int, changes: Sequence[Change]) -> None:
    entries = [
        {
            "source": join_source(os.path.basename(each.layout.path), each.layout.key),
            "inode": each.layout.inode or 0,
            "count": len(each.rows),
            **_describe_layout(each.layout),
        }
        for each in changes
    ]
    text = json.dumps(entries).encode()
    body = [memoryview(_LENGTH.pack(len(text)) + text)]
    for change in changes:
        body += [each.data.cast("B") for each in (change.rows, change.new, change.old)]
    checksum, at = 0, _HEADER.size
    for part in body:
        checksum = zlib.crc32(part, checksum)
        write_all(journal, part, at)
        at += part.nbytes
    write_all(journal, memoryview(_HEADER.pack(_MAGIC, at - _HEADER.size, checksum)), 0)


def _describe_layout(layout: RowLayout) -> dict[str, Any]:
    """Return the fields that must be the same when the rows are written again."""
    return {name: getattr(layout, name) for name in _LAYOUT_FIELDS} | {"shape": [*layout.shape]}


# ------------------------------------------------------------------------ finding one


def recover(layout: RowLayout, *, held: frozenset[int] = frozenset()) -> int:
    """Finish writes of killed processes to this file, or to others together with it.

    Waits for another process that is about to do the same, or is writing these rows.

    Args:
        layout: Layout of the file, with the name by which it was opened.
        held: Inodes that this process has locked, so that no other process writes to them.

    Returns:
        The number of rows that were written again.

    Raises:
        StoreError: A journal is damaged, or does not fit the file.
        StoreUnavailableError: The rows may not be written by this user, or another process does
            not get them written.
    """
    own = layout.path + SUFFIX
    num_rows = 0
    for path in _list_journals(layout.path):
        try:
            entries = _read_entries(path)
        except FileNotFoundError:
            continue
        except StoreError:
            if path == own:
                raise
            continue  # of other files: where it may not be read, its files may not be either
        if path == own or any(entry["inode"] == layout.inode for entry in entries):
            num_rows += _InterruptedWrite(path, entries, layout).finish(held)
    return num_rows


def forget_journal(path: str) -> None:
    """Finish and delete the journal of a table that is gone, before another takes its name.

    Raises:
        StoreError: Its rows are those of a table that is still there, and do not fit it.
    """
    journal = os.path.realpath(path) + SUFFIX
    try:
        entries = _read_entries(journal)
    except FileNotFoundError:
        return
    _InterruptedWrite(journal, entries, None).finish(frozenset())


def _list_journals(path: str) -> list[str]:
    """Return all journals in the directory of a file; that of its name first."""
    own, directory = path + SUFFIX, os.path.dirname(path) or "."
    found = [own] if os.path.lexists(own) else []
    try:
        with os.scandir(directory) as entries:
            others = [each.path for each in entries if each.name.endswith(SUFFIX)]
    except PermissionError:  # it may be entered, but not listed
        others = []
    return found + sorted(each for each in others if each != own)


def _read_entries(path: str) -> list[dict[str, Any]]:
    """Return the entries of a journal's files. It never changes while it has its name."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise _damaged_error(path, "it is no regular file")
        with open(path, "rb") as file:
            start = file.read(_HEADER.size + _LENGTH.size)
            if len(start) == _HEADER.size + _LENGTH.size and start[:8] == _MAGIC:
                length = _LENGTH.unpack_from(start, _HEADER.size)[0]
                with suppress(ValueError):
                    entries = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
                    return [{**each, "inode": int(each["inode"])} for each in entries]
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = "cannot be read, so it is not known whether rows are torn"
        raise store_error(error, path, problem, StoreUnavailableError) from error
    raise _damaged_error(path, "it does not begin as a journal of this version")


def _damaged_error(path: str, why: str) -> StoreError:
    return StoreError(
        f"{path} is damaged: {why}, so the rows of a batch that was being written to "
        f"{path.removesuffix(SUFFIX)} may be torn. Restore the table, or delete the journal.",
        path=path,
    )


# ----------------------------------------------------------------------- finishing one


@dataclasses.dataclass
class _File:
    """A file of whose rows a journal has some, as it is now."""

    source: str
    fd: int
    is_writable: bool
    is_other_file: bool
    """True if it has the name in the journal, but is another file."""
    has_new: bool = False
    """True if it has bytes of the new rows that the old ones did not have."""
    has_others: bool = False
    """True if it has bytes that are neither new nor old."""


class _InterruptedWrite:
    """A write that was interrupted, of which a journal was found."""

    def __init__(self, path: str, entries: list[dict[str, Any]], layout: RowLayout | None) -> None:
        """Take a journal; `layout` is of a file that is being opened, perhaps one of its files."""
        self._path, self._entries, self._layout = path, entries, layout
        self._directory = os.path.dirname(path)

    def finish(self, held: frozenset[int]) -> int:
        """Write the rows if they belong to their files, and delete the journal."""
        deadline = time.monotonic() + WAIT_SECONDS
        wait = _FIRST_WAIT_SECONDS
        while True:
            with ExitStack() as opened:
                files = [self._open(entry, opened) for entry in self._entries]
                if self._lock(files, held):
                    return self._write_and_remove(files)
            if not os.path.lexists(self._path):
                return 0
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    f"{self._path} holds rows that another process has been writing for "
                    f"{WAIT_SECONDS:.0f} seconds, so they may be torn: end that process, and open "
                    "the table again",
                    path=self._path,
                )
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _open(self, entry: dict[str, Any], opened: ExitStack) -> _File | None:
        """Open the file of an entry; None if there is none any more."""
        name, key = split_source(entry["source"])
        path = self._find(name, entry["inode"])
        if path is None:
            return None
        try:
            fd, is_writable = open_file(path, os.O_RDWR), True
        except StoreUnavailableError as error:
            if error.errno not in _NOT_ALLOWED:
                raise
            fd, is_writable = open_file(path, os.O_RDONLY), False
        opened.callback(os.close, fd)
        return _File(
            source=join_source(path, key),
            fd=fd,
            is_writable=is_writable,
            is_other_file=os.fstat(fd).st_ino != entry["inode"],
        )

    def _find(self, name: str, inode: int) -> str | None:
        """Return the file with this inode, under any name; else the one with this name."""
        named = os.path.join(self._directory, name)
        with suppress(FileNotFoundError):
            if os.stat(named).st_ino == inode:
                return named
        if self._layout is not None and self._layout.inode == inode:
            return self._layout.path
        with suppress(PermissionError), os.scandir(self._directory or ".") as entries:
            for each in entries:
                if each.inode() == inode and each.path != self._path:
                    return each.path
        return named if os.path.exists(named) else None

    def _lock(self, files: list[_File | None], held: frozenset[int]) -> bool:
        """Lock all files for writing while they are open; return whether that succeeded."""
        locked = set(held)
        for file in files:
            if file is None or (inode := os.fstat(file.fd).st_ino) in locked:
                continue
            if not try_lock(file.fd):
                return False
            locked.add(inode)
        return os.path.lexists(self._path)  # or another process has finished it meanwhile

    def _write_and_remove(self, files: list[_File | None]) -> int:
        found = self._read_changes(files)
        for file, change in found:
            _compare(file, change)
            if file.has_new and (file.has_others or file.is_other_file):
                why = "has rows of it beside others" if file.has_others else "is another file"
                raise StoreError(
                    f"{self._path} holds rows of an interrupted write, but {change.layout.path} "
                    f"{why}: it was changed since. Restore the table, or, if it is as it should "
                    "be, delete the journal.",
                    path=self._path,
                )
        written = os.stat(self._path).st_mtime_ns
        begun = any(file.has_new for file, _ in found) or all(
            not file.has_others
            and not file.is_other_file
            and os.fstat(file.fd).st_mtime_ns <= written
            for file, _ in found
        )
        ours = [each for each in found if begun and not each[0].has_others]
        if not all(file.is_writable for file, _ in ours):
            raise self._permission_error()
        num_rows = 0
        for file, change in ours:
            write_places(file.fd, change.layout, change.rows, change.new)
            os.fdatasync(file.fd)
            num_rows += len(change.rows)
        self._remove(num_rows)
        return num_rows

    def _remove(self, num_rows: int) -> None:
        try:
            os.unlink(self._path)
        except OSError as error:
            if error.errno not in _NOT_ALLOWED:
                raise
            if num_rows:
                raise self._permission_error() from error
            return
        outcome = "were written again" if num_rows else "are not of what is there now: dropped"
        logger.warning("%s: %d rows of an interrupted write %s", self._path, num_rows, outcome)

    def _permission_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self._path} holds rows of an interrupted write to "
            f"{self._path.removesuffix(SUFFIX)}, which this process may not finish: open the table "
            "once as a user with permission to write to both",
            path=self._path,
            errno=errno.EACCES,
        )

    def _read_changes(self, files: list[_File | None]) -> list[tuple[_File, Change]]:
        """Return the files that still have such rows as are in the journal, with their changes."""
        content = Path(self._path).read_bytes()
        _, num_bytes, checksum = _HEADER.unpack_from(content)
        body = memoryview(content)[_HEADER.size :]
        if len(body) != num_bytes or zlib.crc32(body) != checksum:
            raise _damaged_error(self._path, "its checksum is wrong")
        at = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        found = []
        for entry, file in zip(self._entries, files, strict=True):
            count, row_bytes = entry["count"], entry["row_bytes"]
            rows = np.frombuffer(body, dtype=np.int64, count=count, offset=at)
            at += rows.nbytes
            both = np.frombuffer(body, dtype=np.uint8, count=2 * count * row_bytes, offset=at)
            at += both.nbytes
            new, old = both.reshape(2, count, row_bytes)
            layout = None if file is None else _open_same_layout(file.source, entry)
            if file is not None and layout is not None:
                found.append((file, Change(layout, rows, new, old)))
        return found


def _open_same_layout(source: str, entry: dict[str, Any]) -> RowLayout | None:
    """Return the layout of a file; None if it is not that in the journal."""
    try:
        layout = open_layout(source)
    except StoreError:
        if os.path.basename(source) == entry["source"]:
            raise
        return None  # no table: its inode was that of a table that is gone
    fits = all(entry[name] == value for name, value in _describe_layout(layout).items())
    return layout if fits else None


def _compare(file: _File, change: Change) -> None:
    """Compare the rows of a file with those of a journal."""
    step = max(1, (16 << 20) // max(1, change.layout.row_bytes))
    for start in range(0, len(change.rows), step):
        part = slice(start, start + step)
        rows, new, old = change.rows[part], change.new[part], change.old[part]
        now = read_places(file.fd, change.layout, rows)
        is_new, is_old = (now == new).all(axis=1), (now == old).all(axis=1)
        file.has_new |= bool((is_new & ~is_old).any())
        for at in np.flatnonzero(~is_new & ~is_old).tolist():
            begin = change.layout.row_offset(int(rows[at]))
            is_mixture = _is_mixture(now[at], new[at], old[at], begin)
            file.has_new |= is_mixture
            file.has_others |= not is_mixture


def _is_mixture(now: np.ndarray, new: np.ndarray, old: np.ndarray, begin: int) -> bool:
    """Return whether a row consists of parts of both, as an interrupted write leaves it.

    A kill leaves the begin of the new row and the end of the old one; a loss of power leaves each
    of the disk's sectors old or new, in any order.
    """
    different = np.flatnonzero(now != new)
    if np.array_equal(now[different[0] :], old[different[0] :]):
        return True
    edges = [0, *range(_SECTOR_BYTES - begin % _SECTOR_BYTES, len(now), _SECTOR_BYTES), len(now)]
    parts = [slice(*each) for each in itertools.pairwise(edges)]
    return all(
        np.array_equal(now[part], new[part]) or np.array_equal(now[part], old[part])
        for part in parts
    )


def try_lock(fd: int) -> bool:
    """Lock a table's file for writing; return False if another process has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno != errno.EBADF:  # a network's file system, for a file opened to be read
            raise
    return True


def unlock(fd: int) -> None:
    """Undo `try_lock`, for all descriptors that were copied from this one, too."""
    with suppress(OSError):  # as there
        fcntl.flock(fd, fcntl.LOCK_UN)
