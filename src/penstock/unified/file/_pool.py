"""A pool of file descriptors, in which only the latest files stay open while they are not in use.

A process may have thousands of tables, and may have about a thousand files open.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from contextlib import suppress
from operator import attrgetter

from penstock.errors import StoreError, StoreUnavailableError
from penstock.unified.file.layout import PAGE_BYTES, RowLayout, file_id, store_error

logger = logging.getLogger(__name__)

MAX_FILES = 64  # open at once, besides those that are in use or have lost their names

_lock = threading.RLock()  # reentrant: a finaliser may close a file in a thread that holds it
_open_files: set[PooledFile] = set()
_uses = itertools.count()


class PooledFile:
    """A file that is open to be read while it is in use; thread-safe and fork-safe.

    As a context it gives the descriptor. While it is idle it may be closed; it is opened by its
    name again then, and has to be the same file. One that has lost its name stays open.

    Args:
        layout: Layout of the file; if it has a `file_id`, the file has to have the same.
        direct: Whether to read past the page cache, where the file system can.

    Attributes:
        alignment: Bytes of which offsets, lengths and addresses of reads have to be multiples.

    Raises:
        StoreError: The file cannot be opened.
        StoreUnavailableError: Another file has the name now.
    """

    def __init__(self, layout: RowLayout, *, direct: bool) -> None:
        self._path, self._file_id = layout.path, layout.file_id
        self._direct, self._at_random = direct, False
        self._num_users, self._last_use = 0, 0
        self._fd, self.alignment = -1, 1
        with self as fd:
            self._file_id = file_id(fd)

    def __enter__(self) -> int:
        with _lock:
            if self._fd < 0:
                fd, alignment = self._open(self._path)
                if self._file_id not in (None, file_id(fd)):
                    os.close(fd)
                    raise replaced_error(self._path)
                _close_idle_files()
                self._fd, self.alignment = fd, alignment
                _open_files.add(self)
            self._num_users += 1
            return self._fd

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._num_users -= 1
            self._last_use = next(_uses)

    @property
    def is_direct(self) -> bool:
        """True if reads go past the page cache."""
        return self.alignment > 1

    def set_direct(self, direct: bool) -> None:
        """Read past the page cache from now on, or through it without reading ahead.

        The file must not be in use. Nothing changes where it cannot be opened so.
        """
        with self as before:
            modes = self._direct, self._at_random
            self._direct, self._at_random = direct, not direct
            try:  # the same file, even if another one has its name by now
                self._fd, self.alignment = self._open(f"/proc/self/fd/{before}")
            except StoreError:
                self._direct, self._at_random = modes
                return
            os.close(before)

    def close(self) -> None:
        """Close the file; another use opens it again."""
        with _lock:
            fd, self._fd = self._fd, -1
            _open_files.discard(self)
            if fd >= 0:
                os.close(fd)

    def _open(self, path: str) -> tuple[int, int]:
        """Return a descriptor, and the alignment that it demands."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            if self._direct:
                try:
                    return os.open(path, flags | os.O_DIRECT), PAGE_BYTES
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                message = "%s: the file system refuses direct I/O; rows pass the page cache"
                logger.info(message, self._path)
                self._direct = False
            fd = os.open(path, flags)
        except OSError as error:
            raise store_error(error, self._path, "cannot be opened", StoreError) from error
        if self._at_random:  # no reading ahead
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd, 1


def _close_idle_files() -> None:
    """Close the files that have not been used for the longest time, so that one may be opened."""
    if len(_open_files) < MAX_FILES:
        return
    for file in sorted(_open_files, key=attrgetter("_last_use")):
        if len(_open_files) < MAX_FILES:
            return
        if not file._num_users:
            _open_files.discard(file)
            with suppress(OSError):  # it stays open if nothing has its name any more
                if file_id(file._path) == file._file_id:
                    file.close()


def open_file(path: str, flags: int) -> int:
    """Return a descriptor of a table's file.

    Raises:
        StoreUnavailableError: The file cannot be opened; the message says why.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        problem = "cannot be opened" + ("" if flags == os.O_RDONLY else " for writing")
        raise store_error(error, path, problem, StoreUnavailableError) from error


def replaced_error(path: str) -> StoreUnavailableError:
    """Return the error of a name that another file has now."""
    return StoreUnavailableError(
        f"{path} has been replaced by another file since the table was opened, or has another name "
        "now; open it again",
        path=path,
    )


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)
