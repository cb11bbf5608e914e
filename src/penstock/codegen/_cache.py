"""The user's cache directory: its place, its safety, and entries that one process uses at a time.

Libraries, measured profiles and plans are kept in it between processes. What another user writes
there would run as code of the user that loads it. So it must belong to the user and be writable by
no other; anything else is refused, never repaired.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import filelock

from penstock.errors import BuildError, PenstockError

_logger = logging.getLogger(__name__)

CACHE_DIR_VARIABLE = "PENSTOCK_CACHE_DIR"

T = TypeVar("T")


class CacheEntry:
    """A directory of the cache that is there whole or not at all; this process has its lock.

    Attributes:
        path: The directory; None where there is no usable cache.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self, read: Callable[[Path], T]) -> T | None:
        """Return what is kept, or None where nothing is, or nothing that can be used.

        Args:
            read: Takes the directory and returns its content. If it raises `OSError`, `ValueError`
                or `PenstockError` the entry counts as unusable, which is logged.
        """
        if self.path is None or not self.path.is_dir():
            return None
        try:
            return read(self.path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, PenstockError) as error:
            _logger.warning("%s is unusable, and made anew: %s", self.path, error)
            return None

    def save(self, write: Callable[[Path], object]) -> None:
        """Keep new content in place of the old, by one rename; a failure is only logged.

        Args:
            write: Takes an empty directory and fills it.
        """
        if self.path is None:
            return
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            unfinished.mkdir(mode=0o700)
            write(unfinished)
            if self.path.exists():
                shutil.rmtree(self.path)
            unfinished.rename(self.path)
        except OSError as error:
            _logger.warning("%s could not be kept: %s", self.path, error)
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def cache_entry(folder: str, key: list[object], *, wait_seconds: float) -> Iterator[CacheEntry]:
    """Lock a key's entry in the cache: processes that need the same come one after the other.

    Example:
        >>> with cache_entry("plans", ["step", 8], wait_seconds=60) as entry:  # doctest: +SKIP
        ...     plan = entry.load(read_plan)
        ...     if plan is None:
        ...         plan = make_plan()
        ...         entry.save(lambda directory: write_plan(plan, directory))

    Args:
        folder: The directory's name below the cache's root, which also names in the log what is
            kept there.
        key: What the entry depends on, as plain data.
        wait_seconds: How long to wait for another process that has the entry.

    Yields:
        The entry. One that keeps nothing, and one warning in the log, where there is no usable
        cache directory or no lock to be had.
    """
    path = lock = None
    try:
        path = private_directory(folder) / digest(json.dumps(key))
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=wait_seconds, mode=0o600)
        lock.acquire()
    except (BuildError, OSError, NotImplementedError) as error:  # no file system has to have locks
        _logger.warning("%s are not cached: %s", folder, error)
        path = None
    try:
        yield CacheEntry(path)
    finally:
        if lock is not None:
            lock.release()


def private_directory(folder: str) -> Path:
    """Return a folder of the cache; create it, or refuse it if others can write to it.

    Raises:
        BuildError: It is not safe, or cannot be used; the message says what would do.
    """
    directory = _root() / folder
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        for checked in (directory.parent, directory):
            _check_safe(checked)
    except OSError as error:
        raise BuildError(
            f"the cache directory {directory} cannot be used: {error}; set {CACHE_DIR_VARIABLE} to "
            "a directory that you can write to"
        ) from error
    return directory


def cannot_write(path: Path, error: OSError) -> BuildError:
    """Return the error of a file of the cache that cannot be written."""
    return BuildError(
        f"{path} cannot be written: {error}; make room there, or set {CACHE_DIR_VARIABLE} to "
        "another directory"
    )


def digest(*parts: str) -> str:
    """Hash texts so that moving a byte from one to the next changes the result."""
    hashed = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8")
        hashed.update(len(encoded).to_bytes(8, "little"))
        hashed.update(encoded)
    return hashed.hexdigest()[:32]


def _root() -> Path:
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if not chosen:
        import platformdirs

        chosen = platformdirs.user_cache_dir("penstock", appauthor=False)
    # Links are resolved first, so that what is checked is what is used.
    return Path(os.path.realpath(Path(chosen).expanduser()))


def _check_safe(directory: Path) -> None:
    """Raise `BuildError` unless `directory` is a directory that only this user can write to."""
    status = os.lstat(directory)  # of a link itself: one could be swapped after the check
    if not stat.S_ISDIR(status.st_mode):
        problem = "it is not a directory"
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, not to you ({os.geteuid()})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise BuildError(
        f"the cache directory {directory} is not safe to load from: {problem}; delete it or "
        f"`chmod 700` it, or set {CACHE_DIR_VARIABLE} to a directory of your own"
    )
