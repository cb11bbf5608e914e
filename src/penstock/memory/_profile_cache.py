"""Measured profiles kept between processes, so that a machine is measured once.

Only one process measures at a time: the others of a `torchrun` wait and then read its result,
instead of measuring each other's load. Where there is no usable cache directory, measuring works
all the same.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.codegen import cache_entry
from penstock.memory._profile import MachineProfile

_logger = logging.getLogger(__name__)

_LOCK_SECONDS = 120.0


class ProfileEntry:
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
def profile_entry(key: list[object]) -> Iterator[ProfileEntry]:
    """Lock a profile's place in the cache.

    Args:
        key: What the profile depends on, as plain data.

    Yields:
        The entry; one that keeps nothing where there is no usable cache directory.
    """
    with cache_entry("profiles", key, wait_seconds=_LOCK_SECONDS) as path:
        yield ProfileEntry(None if path is None else path.with_suffix(".json"))
