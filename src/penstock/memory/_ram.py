"""RAM of this process: the machine's, within the limits of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def installed_ram() -> int:
    """Return the bytes of RAM, or the limit of this process's control group where that is lower."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(limit for _, limit in _limits())])


def available_ram() -> int:
    """Return the bytes of RAM that can be taken now without swapping or being killed for it."""
    kibibytes = _find(_MEMINFO, "MemAvailable:")
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]  # of an old kernel
    if kibibytes is not None:
        free = [kibibytes * 1024]
    for group, limit in _limits():
        # Pages of files that were not used for a while are given back under pressure.
        used = int(_read(group / "memory.current") or 0)
        used -= _find(group / "memory.stat", "inactive_file") or 0
        free.append(limit - used)
    return max(0, min(free))


def _limits() -> Iterator[tuple[Path, int]]:
    """Yield the control groups (version 2) of this process with their limits, its own first."""
    own = "/"
    for line in _read(_PROCESS).splitlines():
        number, _, path = line.partition("::")
        if number == "0":
            own = path
    # In a container the path may be that of the host, where it leads nowhere.
    relative = Path(own.lstrip("/"))
    for part in [relative, *relative.parents]:
        group = _GROUPS / part
        limit = _read(group / "memory.max").strip()
        if limit.isdigit():
            yield group, int(limit)


def _find(path: Path, name: str) -> int | None:
    """Return the number behind a name at the beginning of a line; None where there is none."""
    for line in _read(path).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
