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
    free = [_meminfo("MemAvailable")]
    for group, limit in _limits():
        # Pages of files that were not used for a while are given back under pressure.
        used = int(_read(group / "memory.current") or 0) - _statistic(group, "inactive_file")
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


def _statistic(group: Path, name: str) -> int:
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _meminfo(name: str) -> int:
    for line in _read(_MEMINFO).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # an old kernel


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
