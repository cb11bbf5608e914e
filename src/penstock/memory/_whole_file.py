"""Files that are written once as a whole, and read in parts by many processes.

A new file has no name before it is complete: whatever ends the writing, an error, an interrupt or
SIGKILL, nothing is left of it. One that is open for reading stays the one that was opened, also
when another takes its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from penstock.errors import StoreFullError, StoreReadError, StoreUnavailableError, StoreWriteError
from penstock.memory import _transfers
from penstock.memory._extents import FULL_ERRNOS
from penstock.memory.pages import DIRECT_IO_BYTES

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
_FLUSH_BYTES = 64 * 2**20  # written between two requests to take them from the page cache


class NewFile:
    """File that gets its name when it is complete; to be used in a `with` block.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "file")
        >>> with NewFile(path) as file:
        ...     file.write(0, [memoryview(b"all of it")])
        ...     os.path.exists(path)
        ...     file.finish()
        ...     os.path.exists(path)
        False
        True

    Args:
        path: Its name.
        replace: Whether a file that has the name is replaced when this one is complete; else it is
            an error, now and then.

    Raises:
        StoreUnavailableError: The directory is missing, or cannot be written; or the name is taken.
    """

    def __init__(self, path: str | os.PathLike[str], *, replace: bool = True) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._replace = replace
        self._directory, self._name = os.path.split(self.path)
        self._unfinished = ""  # a name, where the file system has no files without one
        self._num_unflushed = 0
        if not replace and os.path.lexists(self.path):
            raise self._taken()
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            kind = "directory" if os.path.isdir(self.path) else "device, a pipe or a socket"
            raise StoreUnavailableError(
                f"path {self.path!r} is a {kind}, which no file takes the place of; pass the name "
                "of a file",
                path=self.path,
            )
        try:
            self._fd = self._open()
        except OSError as error:
            raise StoreUnavailableError(
                f"file {self.path!r} cannot be made: {error.strerror} (errno {error.errno}); pass "
                "a path in an existing directory that this user may write",
                path=self.path,
                errno=error.errno,
            ) from error

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        if _O_TMPFILE:
            try:
                return os.open(self._directory, flags | _O_TMPFILE, 0o666)
            except OSError as error:
                if error.errno not in _NO_TMPFILE or not os.path.isdir(self._directory):
                    raise
        self._unfinished = os.path.join(
            self._directory, f".{self._name}.{os.getpid()}-{os.urandom(4).hex()}"
        )
        return os.open(self._unfinished, flags | os.O_CREAT | os.O_EXCL, 0o666)

    def fileno(self) -> int:
        """Return the descriptor, to which others may write as well until the file is finished."""
        return self._fd

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write buffers of bytes one after the other, all of them.

        Args:
            offset: Byte of the file at which the first begins.
            buffers: At most 1024.

        Raises:
            StoreFullError: The file system has run full, or a limit is reached.
            StoreWriteError: The operating system refused.
        """
        left = [buffer for buffer in buffers if len(buffer)]
        while left:
            try:
                num_bytes = _transfers._pwritev(self._fd, left, offset)
                if not num_bytes:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                raise self._failed(error) from error
            offset += num_bytes
            self._num_unflushed += num_bytes
            while left and num_bytes >= len(left[0]):
                num_bytes -= len(left.pop(0))
            if num_bytes:
                left[0] = left[0][num_bytes:]
        if self._num_unflushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            self._num_unflushed = 0
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Give the complete file its name, in one step; it survives a loss of power.

        Raises:
            StoreFullError, StoreWriteError: The last bytes could not be written, or the name not be
                given.
            StoreUnavailableError: Another file has taken the name, and is not to be replaced.
        """
        try:
            os.fsync(self._fd)
            if not self._unfinished:
                self._link()
            elif not self._replace and os.path.lexists(self.path):
                raise self._taken()
            else:
                os.replace(self._unfinished, self.path)
                self._unfinished = ""
            self._sync_directory()
        except OSError as error:
            raise self._failed(error) from error

    def _sync_directory(self) -> None:
        directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        except OSError:
            if not self._replace:  # else the name's old file is gone already
                os.unlink(self.path)
            raise
        finally:
            os.close(directory)

    def _link(self) -> None:
        """Link the nameless file to its name, or to another one that is then renamed."""
        try:
            self._link_as(self.path)
            return
        except FileExistsError:
            if not self._replace:
                raise self._taken() from None
            beside = os.path.join(self._directory, f".{self._name}.complete")
        while True:
            try:
                self._link_as(beside)
                break
            except FileExistsError:  # of a process that was killed between link and rename
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(beside)
        # Where it is not there, another process has just renamed this very file.
        with contextlib.suppress(FileNotFoundError):
            os.replace(beside, self.path)

    def _link_as(self, path: str) -> None:
        directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # With a directory given, Python follows the link that /proc has in its place.
            source = f"/proc/self/fd/{self._fd}"
            os.link(source, path, src_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)

    def _taken(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"file {self.path!r} exists; pass another path", path=self.path, errno=errno.EEXIST
        )

    def _failed(self, error: OSError) -> StoreWriteError | StoreFullError:
        is_full = error.errno in FULL_ERRNOS
        problem = "does not fit" if is_full else "could not be written"
        remedy = "free space there, lift the limit" if is_full else "check the disk"
        return (StoreFullError if is_full else StoreWriteError)(
            f"file {self.path!r} {problem}: {error.strerror} (errno {error.errno}); {remedy}, or "
            "pass another path. Nothing is left of it",
            path=self.path,
            errno=error.errno,
        )

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._unfinished:
            os.unlink(self._unfinished)


class WholeFile:
    """A complete file, open for reading by raw memory.

    Methods may be called from many threads at once. The file is closed when this object dies, or
    by `close`.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as named:
        ...     num_bytes = named.write(b"bytes")
        ...     named.flush()
        ...     WholeFile(named.name).read_bytes(1, 3)
        b'yte'

    Args:
        path: Its name.

    Raises:
        StoreUnavailableError: It is missing, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._fds: list[int] = []
        try:
            mode = os.stat(self.path).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(mode):  # to open a pipe would wait for its writer
                raise OSError(errno.EINVAL, "It is a device, a pipe or a socket")
            self._fds.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            self.num_bytes = os.fstat(self._fds[0]).st_size
        except OSError as error:
            self.close()
            raise StoreUnavailableError(
                f"file {self.path!r} cannot be read: {error.strerror} (errno {error.errno}); pass "
                "the path of a file that this user may read",
                path=self.path,
                errno=error.errno,
            ) from error
        is_direct = self._open_direct()
        alignment = DIRECT_IO_BYTES if is_direct else 1
        self._transfers = _transfers.Transfers(
            path=self.path,
            address_alignment=alignment,
            length_alignment=alignment,
            write_throttle=None,
            read_throttle=None,
        )
        self._state = self._look()
        self._changes = 1

    def _open_direct(self) -> bool:
        """Open the same file once more, past the page cache, where the file system can do that."""
        if not _O_DIRECT or self.num_bytes < DIRECT_IO_BYTES:
            return False
        try:
            direct = os.open(
                f"/proc/self/fd/{self._fds[0]}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT
            )
        except OSError:
            return False
        self._fds.append(direct)
        return True

    def read_bytes(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes; fewer than `num_bytes` where the file ends before them.

        Raises:
            StoreReadError: The operating system refused.
        """
        parts = []
        try:
            while num_bytes > 0:
                part = os.pread(self._fds[0], num_bytes, offset)
                if not part:
                    break
                parts.append(part)
                offset += len(part)
                num_bytes -= len(part)
        except OSError as error:
            raise StoreReadError(
                f"file {self.path!r} could not be read at offset {offset}: {error.strerror} "
                f"(errno {error.errno}); check the disk",
                path=self.path,
                offset=offset,
                errno=error.errno,
            ) from error
        return b"".join(parts)

    def read(self, offset: int, address: int, num_bytes: int) -> None:
        """Read into raw memory, all of it.

        Args:
            offset: Byte of the file, a multiple of 4096.
            address: Where the bytes go; a multiple of 4096 needs no copy.
            num_bytes: How many, a multiple of 4096.

        Raises:
            StoreReadError: Not all bytes came; what is at `address` must not be used.
        """
        self._transfers.read(self._fds[-1], offset, address, num_bytes)

    def count_changes(self) -> int:
        """Return a number that grows when the file was written to since it was opened."""
        state = self._look()
        if state != self._state:
            self._state = state
            self._changes += 1
        return self._changes

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._fds[0])
        return found.st_mtime_ns, found.st_size

    def close(self) -> None:
        """Close the file; no read may be under way. Further calls do nothing."""
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        self.close()
