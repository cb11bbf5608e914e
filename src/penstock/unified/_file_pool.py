"""A pool of file descriptors: of the files that are not in use only the latest are open.

A process may have thousands of tables, and may have about a thousand files open.
"""

from __future__ import annotations

import errno
import logging
import os
import threading

from penstock.errors import StoreError, StoreUnavailableError
from penstock.unified._row_file import PAGE_BYTES

logger = logging.getLogger(__name__)

MAX_IDLE = 128  # open files that are not in use

_lock = threading.RLock()  # reentrant: a finaliser may close a file in a thread that has it
_idle: dict[PooledFile, None] = {}  # the least recently used first


class PooledFile:
    """A file that is open to be read while it is in use; thread-safe, and at home in a fork.

    As a context it gives the descriptor. While it is idle it may be closed; it is opened by its
    name again then, and has to be the same file. One that has lost its name stays open.

    Args:
        path: The file's name.
        direct: Whether to read past the page cache, where the file system can.

    Attributes:
        alignment: What offsets, lengths and addresses of reads have to be multiples of, in bytes.

    Raises:
        StoreError: The file cannot be opened.
    """

    def __init__(self, path: str, *, direct: bool) -> None:
        self._path = path
        self._direct, self._at_random = direct, False
        self._num_users = 0
        self._fd, self.alignment = self._open(path)
        status = os.fstat(self._fd)
        self._file_id = status.st_dev, status.st_ino
        with _lock:
            self._be_idle()

    def __enter__(self) -> int:
        with _lock:
            _idle.pop(self, None)
            if self._fd < 0:
                self._reopen()
            self._num_users += 1
            return self._fd

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._be_idle()

    def be_direct(self, direct: bool) -> None:
        """Read past the page cache from now on, or only what is asked for through it.

        The file must not be in use. Nothing changes where it cannot be opened so.
        """
        with self as before:
            modes = self._direct, self._at_random
            self._direct, self._at_random = direct, not direct
            try:  # the same file, whatever has its name by now
                self._fd, self.alignment = self._open(f"/proc/self/fd/{before}")
            except StoreError:
                self._direct, self._at_random = modes
                return
            os.close(before)

    def close(self) -> None:
        """Close the file for good."""
        with _lock:
            _idle.pop(self, None)
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _be_idle(self) -> None:
        _idle[self] = None
        for file in list(_idle)[:-MAX_IDLE]:
            _idle.pop(file, None)
            if file._has_its_name():
                file._close()

    def _has_its_name(self) -> bool:
        try:
            status = os.stat(self._path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._file_id

    def _reopen(self) -> None:
        fd, alignment = self._open(self._path)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self._file_id:
            os.close(fd)
            raise replaced(self._path)
        self._fd, self.alignment = fd, alignment

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
            fd = os.open(path, flags)
        except OSError as error:
            raise StoreError(
                f"{self._path} cannot be opened: {os.strerror(error.errno or 0)}",
                path=self._path,
                errno=error.errno,
            ) from error
        if self._at_random:  # pages that are asked for, and no others
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd, 1


def replaced(path: str) -> StoreUnavailableError:
    """Make the error of a name that another file has now."""
    return StoreUnavailableError(
        f"{path} has been replaced by another file since the table was opened, or has another name "
        "now; open it again",
        path=path,
    )


def _start_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_start_child)
