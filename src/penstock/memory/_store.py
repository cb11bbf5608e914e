"""Directories that a user gives as a store, and nameless files in them.

A nameless file (`O_TMPFILE`) is reclaimed by the kernel when the process ends, however it ends, so
not even SIGKILL leaves anything behind.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import warnings
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import StoreUnavailableError, StoreWarning, stacklevel_of_user
from penstock.memory.pages import DIRECT_IO_BYTES, map_anonymous
from penstock.units import parse_bandwidth, parse_bytes

_logger = logging.getLogger(__name__)

# Zero where the platform has no such flag.
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)

RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
"""Types of file systems whose files are RAM."""
# Errors of a file system without O_TMPFILE or O_DIRECT.
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS})
_MIN_RESERVE_BYTES = 64 * 2**20
# Memory addresses of direct I/O: most devices take 512, some demand the page.
_ADDRESS_ALIGNMENTS = (512, DIRECT_IO_BYTES)


@dataclass(frozen=True, init=False)
class FileStore:
    """A directory for offloaded bytes, with limits.

    Example:
        >>> FileStore("/mnt/nvme", "100GiB", write_bytes_per_second="500MB/s").max_bytes
        107374182400

    Args:
        path: An existing, writable directory, best on a local NVMe disk; `~` is the user's home.
        max_bytes: The most bytes to use there, as an int or text such as `"100GiB"`; None: what is
            free.
        write_bytes_per_second: Write no faster than this; None: as fast as the device goes.
        read_bytes_per_second: Read no faster than this; None: as fast as the device goes.
        gpu_direct: Move bytes between GPU memory and the file past host memory (GPUDirect Storage,
            with kvikio). For transfers of a GPU only; the rates do not hold for them.
        reserve_bytes: Bytes of the file system that are left free for everything else, as an int or
            text; None: 1 % of the file system, at least 64 MiB.

    Raises:
        TypeError, ValueError: A limit is not a size or a bandwidth, or `max_bytes` is below 4096.
    """

    path: str
    max_bytes: int | None
    write_bytes_per_second: float | None
    read_bytes_per_second: float | None
    gpu_direct: bool
    reserve_bytes: int | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int | str | None = None,
        write_bytes_per_second: float | str | None = None,
        read_bytes_per_second: float | str | None = None,
        *,
        gpu_direct: bool = False,
        reserve_bytes: int | str | None = None,
    ) -> None:
        sizes = {"max_bytes": max_bytes, "reserve_bytes": reserve_bytes}
        rates = {
            "write_bytes_per_second": write_bytes_per_second,
            "read_bytes_per_second": read_bytes_per_second,
        }
        # The dataclass is frozen: this is the one place that sets its fields.
        fields = self.__dict__
        for name, size in sizes.items():
            fields[name] = None if size is None else parse_bytes(size, name=name)
        for name, rate in rates.items():
            fields[name] = None if rate is None else parse_bandwidth(rate, name=name)
        fields.update(path=_path_text(path), gpu_direct=gpu_direct)
        if self.max_bytes is not None and self.max_bytes < DIRECT_IO_BYTES:
            raise ValueError(f"max_bytes must be at least {DIRECT_IO_BYTES}; got {self.max_bytes}")

    @classmethod
    def of(cls, store: FileStore | str | os.PathLike[str]) -> FileStore:
        """Turn a `FileStore`, or the path of a directory, into a `FileStore`.

        Raises:
            TypeError: It is neither.
        """
        return store if isinstance(store, FileStore) else cls(store)


class OpenFile(NamedTuple):
    """A nameless file: its descriptor, and the alignment that its transfers need."""

    fd: int
    direct: bool
    address_alignment: int  # of memory addresses, in bytes
    length_alignment: int  # of file offsets and lengths, in bytes


def open_nameless(path: str) -> OpenFile:
    """Open an empty file without a name in a directory, for this process only; for direct I/O
    where the file system has it.

    Raises:
        StoreUnavailableError: The directory is missing, is none, or cannot be written.
    """
    if not os.path.isdir(path):
        problem = "is not a directory" if os.path.exists(path) else "does not exist"
        raise StoreUnavailableError(
            f"store {path!r} {problem}; pass an existing directory on a local disk", path=path
        )
    for direct, nameless in itertools.product((True, False), repeat=2):
        fd = _try_open(path, direct=direct, nameless=nameless)
        if fd is None:
            continue
        if not direct:
            _logger.warning(
                "store %r refuses direct I/O: its transfers go through the page cache, which is "
                "slower and uses memory of its own",
                path,
            )
            return OpenFile(fd, False, 1, 1)
        try:
            alignment = _address_alignment(fd)
        except BaseException:
            os.close(fd)
            raise
        if alignment is not None:
            return OpenFile(fd, True, alignment, DIRECT_IO_BYTES)
        os.close(fd)
    raise StoreUnavailableError(
        f"store {path!r} cannot be used: no file can be created there; pass a directory that this "
        "user may write",
        path=path,
    )


def warn_if_ram(path: str) -> None:
    """Warn where the file system of a store's directory lives in RAM."""
    filesystem = filesystem_type(path)
    if filesystem in RAM_FILESYSTEMS:
        warnings.warn(
            f"store {path!r} is on {filesystem}: the slow tier is RAM, so offloading to it saves "
            "no memory; pass a directory on a disk",
            StoreWarning,
            stacklevel=stacklevel_of_user(),
        )


def filesystem_type(path: str) -> str | None:
    """Return the type of the file system that holds a path, such as `"ext4"`.

    It is that of the longest mount point before the path; None where the system does not name it.
    """
    resolved, best, kind = os.path.realpath(path), "", None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                mount_point, mounted = line.split(" ")[1:3]
                mount_point = mount_point.replace("\\040", " ")
                inside = os.path.commonpath([mount_point, resolved]) == mount_point
                # A later mount on the same point hides the earlier one, hence >=.
                if inside and len(mount_point) >= len(best):
                    best, kind = mount_point, mounted
    except OSError as error:
        _logger.debug("the type of the file system of %r is unknown: %s", path, error)
    return kind


def free_bytes(path: str | int) -> int:
    """Return the bytes that a user may still write to the file system of a path or open file."""
    statistics = os.statvfs(path)
    return statistics.f_bavail * statistics.f_frsize


def reserved_bytes(path: str | int) -> int:
    """Return how many bytes of its file system an extent file leaves free by default."""
    statistics = os.statvfs(path)
    return max(_MIN_RESERVE_BYTES, statistics.f_blocks * statistics.f_frsize // 100)


def _try_open(path: str, *, direct: bool, nameless: bool) -> int | None:
    """Open a file in one of the ways; None where the file system does not have it."""
    if (direct and not _O_DIRECT) or (nameless and not _O_TMPFILE):
        return None
    flags = os.O_RDWR | os.O_EXCL | (_O_DIRECT if direct else 0)
    name = os.path.join(path, f".penstock-{os.getpid()}-{os.urandom(8).hex()}")
    try:
        if nameless:
            return os.open(path, flags | _O_TMPFILE, 0o600)
        return os.open(name, flags | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return None
        raise StoreUnavailableError(
            f"store {path!r} cannot be used: {error.strerror} (errno {error.errno}); pass a "
            "directory that this user may write",
            path=path,
            errno=error.errno,
        ) from error
    finally:
        # An open that is refused for O_DIRECT has already created the file.
        if os.path.lexists(name):
            os.unlink(name)


def _address_alignment(fd: int) -> int | None:
    """Find by trial which memory alignment direct writes need; None: they are refused."""
    with map_anonymous(2 * DIRECT_IO_BYTES) as memory, memoryview(memory) as view:
        for alignment in _ADDRESS_ALIGNMENTS:
            with view[alignment : alignment + DIRECT_IO_BYTES] as block:
                try:
                    os.pwritev(fd, [block], 0)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        continue
                    # A full disk is no matter of alignment, and the first real write reports it.
                    return DIRECT_IO_BYTES
            os.ftruncate(fd, 0)
            return alignment
    return None


def _path_text(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise TypeError(
            f"store must be the path of a directory or a FileStore; got {path!r} of type "
            f"{type(path).__name__}"
        )
    return os.path.expanduser(text)
