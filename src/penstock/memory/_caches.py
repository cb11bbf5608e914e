"""Caches of a machine: their sizes as the system has them, their rates as one core reads them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

from penstock.codegen import load_optional_library
from penstock.memory._profile import CacheProfile, LinkProfile
from penstock.memory._threads import WorkerThreads
from penstock.memory.pages import (
    HUGE_PAGE_BYTES,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    PAGE_BYTES,
    advise,
    map_anonymous,
    round_up,
)
from penstock.memory.raw_memory import address_of
from penstock.units import parse_bytes

_DIRECTORY = Path("/sys/devices/system/cpu/cpu0/cache")
_SOURCE = Path(__file__).with_name("read_rate.cpp")
_SHARED_BYTES = 16 * 2**20  # of a shared cache, of which a process has a part
_LEAST_MEMORY_BYTES, _MOST_MEMORY_BYTES = 2**26, 2**29
_TYPES = (ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64])
_FUNCTIONS = {"penstock_read": _TYPES, "penstock_read_random": _TYPES}
_NUM_RUNS = 5
_BLOCK_BYTES = 4096
_RUN_BYTES = 2**28  # read in one run, in as many sweeps as that takes
_RANDOM_BYTES = 2**28  # in which random rows lie: behind the caches, and 128 huge pages
_ROW_BYTES = 256  # of `penstock_read_random`
_NUM_ROWS_READ = 2**18  # in one run


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
    caches: tuple[CacheProfile, ...],
    num_cores: int,
    *,
    num_runs: int = _NUM_RUNS,
    run_bytes: int = _RUN_BYTES,
) -> tuple[tuple[CacheProfile, ...], tuple[LinkProfile, ...]]:
    """Measure the rates at which one core reads each cache, and those of the memory behind them.

    Args:
        caches: What `find_caches` returned.
        num_cores: Cores that this process may use.
        num_runs: Runs of each.
        run_bytes: Bytes that a run reads, and the most that lie behind the last cache.

    Returns:
        The caches with rates, the last one with as many bytes as reads find there: other machines
        on the same processor have the rest. And the rates of memory: of one core, and of all.
        Without a compiler, the caches as they were, and no rates.
    """
    library = _load()
    if library is None:
        return caches, ()
    last = caches[-1].capacity_bytes if caches else 0
    most = min(max(2 * last, _LEAST_MEMORY_BYTES), _MOST_MEMORY_BYTES, max(run_bytes, 2**20))
    reader = _Reader(library.penstock_read, most, num_runs, run_bytes)
    measured, before = [], 0
    for cache in caches:
        # More than the cache before holds, and half of this one: the rest is others' or the stack.
        num_bytes = min(cache.capacity_bytes // 2, max(_SHARED_BYTES, 2 * before), most)
        measured.append(dataclasses.replace(cache, rate=reader.measure(num_bytes)))
        before = cache.capacity_bytes
    memory_rates = (reader.measure(most), reader.measure(most, num_cores))
    if len(measured) > 1:
        measured[-1] = _find_share(reader, measured[-1], measured[-2], memory_rates[0])
    return tuple(measured), memory_rates


def measure_pages(
    *, num_runs: int = _NUM_RUNS, num_bytes: int = _RANDOM_BYTES
) -> dict[int, LinkProfile]:
    """Measure the rate at which one core reads random rows of 256 bytes, by the size of the pages.

    A row of a page that the translation cache does not have costs a walk through the page tables;
    of huge pages the cache reaches 512 times as far, and a walk is shorter.

    Args:
        num_runs: Runs of each.
        num_bytes: Memory in which the rows lie.

    Returns:
        Rates by the bytes of a page, pages of the machine's size first, then huge ones; empty
        without a compiler. A kernel without huge pages gives small ones for both.
    """
    library = _load()
    if library is None:
        return {}
    rates = {}
    for page_bytes, advice in ((PAGE_BYTES, MADV_NOHUGEPAGE), (HUGE_PAGE_BYTES, MADV_HUGEPAGE)):
        memory = map_anonymous(num_bytes + HUGE_PAGE_BYTES, private=True)
        base = round_up(address_of(memory), HUGE_PAGE_BYTES)
        advise(base, num_bytes, advice)
        ctypes.memset(base, 1, num_bytes)  # untouched pages would all be the one page of zeros
        runs = []
        for _ in range(num_runs + 1):
            start = time.perf_counter()
            library.penstock_read_random(base, num_bytes // _ROW_BYTES, _NUM_ROWS_READ)
            runs.append(_NUM_ROWS_READ * _ROW_BYTES / (time.perf_counter() - start))
        rates[page_bytes] = LinkProfile.of(runs[1:])
    return rates


def _load() -> ctypes.CDLL | None:
    return load_optional_library(
        "read_rate",
        _SOURCE,
        work="rates of caches are measured",
        otherwise="not at all",
        flags=("-O3", "-march=native"),
        functions=_FUNCTIONS,
    )


class _Reader:
    """Memory that is read again and again."""

    def __init__(
        self, read: Callable[[int, int, int], int], num_bytes: int, num_runs: int, run_bytes: int
    ) -> None:
        self._read, self._num_runs, self._run_bytes = read, num_runs, run_bytes
        self._memory = map_anonymous(num_bytes)
        self._memory.write(b"\x01" * num_bytes)
        self.num_bytes = num_bytes

    def measure(self, num_bytes: int, num_threads: int = 1) -> LinkProfile:
        """Read the first bytes, each thread its part, and return the rate of all together."""
        part = num_bytes // num_threads // _BLOCK_BYTES * _BLOCK_BYTES
        sweeps = max(1, self._run_bytes // num_bytes)
        base = address_of(self._memory)

        def read(thread: int) -> int:
            return self._read(base + thread * part, part, sweeps)

        rates = []
        with WorkerThreads(num_threads, thread_name_prefix="penstock-probe") as threads:
            for _ in range(self._num_runs + 1):
                start = time.perf_counter()
                list(threads.map(read, range(num_threads)))
                rates.append(part * num_threads * sweeps / (time.perf_counter() - start))
        return LinkProfile.of(rates[1:])


def _find_share(
    reader: _Reader, cache: CacheProfile, before: CacheProfile, memory_rate: LinkProfile
) -> CacheProfile:
    """Return the last cache with the largest size that is read nearer to its rate than memory's."""
    assert cache.rate is not None
    middle = math.sqrt(cache.rate.bytes_per_second * memory_rate.bytes_per_second)
    share = num_bytes = 4 * before.capacity_bytes
    while num_bytes <= min(cache.capacity_bytes, reader.num_bytes):
        if reader.measure(num_bytes).bytes_per_second < middle:
            break
        share, num_bytes = num_bytes, 2 * num_bytes
    return dataclasses.replace(cache, capacity_bytes=min(share, cache.capacity_bytes))
