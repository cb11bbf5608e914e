"""Measured profiles kept between processes, so that a machine is measured once.

Only one process measures at a time: the others of a `torchrun` wait and then read its result,
instead of measuring each other's load. Where there is no usable cache directory, measuring works
all the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.memory._profile import MachineProfile

_logger = logging.getLogger(__name__)

_LOCK_SECONDS = 120.0


class CacheEntry:
    """One profile's place in the cache, locked while it is in use.

    Args:
        path: The file; None where there is no cache.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> MachineProfile | None:
        """Return the profile kept there, or None where there is none that can be read."""
        if self._path is None:
            return None
        try:
            return MachineProfile.from_dict(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _logger.warning("measuring again: the profile in %s is unusable: %s", self._path, error)
            return None

    def save(self, profile: MachineProfile) -> None:
        """Keep a profile; readers see the old one or the new one, never a part.

        Args:
            profile: What was measured.
        """
        if self._path is None:
            return
        text = json.dumps(profile.to_dict(), indent=2) + "\n"
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            _logger.warning("the profile could not be kept in %s: %s", self._path, error)
            temporary.unlink(missing_ok=True)


@contextmanager
def cache_entry(key: list[object]) -> Iterator[CacheEntry]:
    """Lock a profile's place in the cache.

    Args:
        key: What the profile depends on, as plain data.

    Yields:
        The entry; one that keeps nothing where there is no usable cache directory.
    """
    directory = _directory()
    if directory is None:
        yield CacheEntry(None)
        return
    import filelock

    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    path = directory / f"{digest}.json"
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600)
    try:
        lock.acquire()
    except (filelock.Timeout, OSError, NotImplementedError) as error:
        _logger.warning("profiles are not cached: cannot lock %s: %s", path, error)
        yield CacheEntry(None)
        return
    try:
        yield CacheEntry(path)
    finally:
        lock.release()


def _directory() -> Path | None:
    """Return the cache directory, private to this user, or None where there cannot be one."""
    from penstock.codegen import cache_root

    directory = cache_root() / "profiles"
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        _logger.warning("profiles are not cached: %s", error)
        return None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        _logger.warning(
            "profiles are not cached: %s must belong to this user and have mode 0700 (chmod 700)",
            directory,
        )
        return None
    return directory
