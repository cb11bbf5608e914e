"""Caches of a machine: their sizes as the system has them, their rates as one core reads them."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from penstock.codegen import load_optional_library
from penstock.memory._profile import CacheProfile, LinkProfile
from penstock.memory.pages import map_anonymous
from penstock.memory.raw_memory import address_of
from penstock.units import parse_bytes

_DIRECTORY = Path("/sys/devices/system/cpu/cpu0/cache")
_SOURCE = Path(__file__).with_name("read_rate.cpp")
_MOST_CACHE_BYTES = 64 * 2**20  # of a shared cache, of which a process has a part
_LEAST_MEMORY_BYTES, _MOST_MEMORY_BYTES = 2**26, 2**29
_FUNCTIONS = {"penstock_read": (ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64])}
_NUM_RUNS = 5
_RUN_BYTES = 2**28  # read in one run, in as many sweeps as that takes


def find_caches(directory: Path = _DIRECTORY) -> tuple[CacheProfile, ...]:
    """Return the data caches of a core, the nearest first, without rates; none where unknown.

    Args:
        directory: What Linux says of the caches of one core.
    """
    found: list[tuple[int, CacheProfile]] = []
    for index in sorted(directory.glob("index*")):
        try:
            fields = {
                name: (index / name).read_text(encoding="utf-8").strip()
                for name in ("level", "type", "size", "coherency_line_size")
            }
            if fields["type"] == "Instruction":
                continue
            cache = CacheProfile(
                name=f"L{int(fields['level'])}",
                capacity_bytes=parse_bytes(f"{fields['size']}iB", name="size"),
                line_bytes=int(fields["coherency_line_size"]),
            )
        except (OSError, ValueError):  # a virtual machine may hide them
            continue
        found.append((int(fields["level"]), cache))
    return tuple(cache for _, cache in sorted(found, key=lambda each: each[0]))


def measure_caches(
    caches: tuple[CacheProfile, ...], *, num_runs: int = _NUM_RUNS, run_bytes: int = _RUN_BYTES
) -> tuple[tuple[CacheProfile, ...], LinkProfile | None]:
    """Measure the rates at which one core reads each cache, and memory; None without a compiler.

    Args:
        caches: What `find_caches` returned.
        num_runs: Runs of each.
        run_bytes: Bytes that a run reads; as many bytes lie behind the last cache at most.
    """
    library = load_optional_library(
        "read_rate",
        _SOURCE,
        work="rates of caches are measured",
        otherwise="not at all",
        flags=("-O3", "-march=native"),
        functions=_FUNCTIONS,
    )
    if library is None:
        return caches, None
    last = caches[-1].capacity_bytes if caches else 0
    most = min(max(2 * last, _LEAST_MEMORY_BYTES), _MOST_MEMORY_BYTES, max(run_bytes, 2**20))
    memory = map_anonymous(most)
    memory.write(b"\x01" * most)

    def measure(num_bytes: int) -> LinkProfile:
        return _measure(library.penstock_read, address_of(memory), num_bytes, num_runs, run_bytes)

    measured, before = [], 0
    for cache in caches:
        # More than the cache before holds, and half of this one: the rest is others' or the stack.
        num_bytes = min(cache.capacity_bytes // 2, max(_MOST_CACHE_BYTES, 2 * before), most)
        measured.append(dataclasses.replace(cache, rate=measure(num_bytes)))
        before = cache.capacity_bytes
    return tuple(measured), measure(most)


def _measure(
    read: Callable[[int, int, int], int],
    address: int,
    num_bytes: int,
    num_runs: int,
    run_bytes: int,
) -> LinkProfile:
    """Read the first bytes again and again, after once to warm up."""
    sweeps = max(1, run_bytes // num_bytes)
    read(address, num_bytes, 1)
    rates = []
    for _ in range(num_runs):
        start = time.perf_counter()
        read(address, num_bytes, sweeps)
        rates.append(num_bytes * sweeps / max(time.perf_counter() - start, 1e-9))
    return LinkProfile.of(rates)
