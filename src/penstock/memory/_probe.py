"""Measurement of this machine's tiers and links, in the way in which they will be used.

Files are measured through the extent file, with its direct I/O and several threads, and rewritten
as every step rewrites them. The spread is kept beside the median, because a shared disk has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.codegen import cache_entry
from penstock.errors import StoreUnavailableError
from penstock.memory._caches import find_caches, measure_caches, measure_pages
from penstock.memory._extent_file import Extent, ExtentFile
from penstock.memory._ledger import Link, Tier
from penstock.memory._profile import (
    MAX_LOAD,
    CacheProfile,
    ComputeProfile,
    LinkProfile,
    MachineProfile,
    TierProfile,
)
from penstock.memory._profile import machine as _machine
from penstock.memory._ram import installed_ram
from penstock.memory._store import FileStore, free_bytes, reserved_bytes
from penstock.memory._threads import WorkerThreads
from penstock.memory.pages import map_anonymous, round_down
from penstock.memory.raw_memory import address_of, copy_bytes

_log = logging.getLogger(__name__)

_FILE_NAME = "profile.json"
_SCHEMA = 6  # of the cached files: raise it when what is measured changes
_MIN_RUNS, _MAX_RUNS = 3, 9
_LINK_SECONDS = 1.0  # aim for one link, once it has its least number of runs
_RUN_SECONDS = 0.1
_BOTH_WAYS_SECONDS = 0.3
_MEMCPY_BYTES = 64 * 2**20
_PCIE_BYTES = 256 * 2**20
_MATRIX_ROWS = {"cpu": 1024, "cuda": 8192}
_VECTOR_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
_NUM_LAUNCHES = 200
_CACHE_RUN_BYTES = 2**29
_GPU_LINE_BYTES = 128
_REQUEST_BYTES = 8 * 2**20
_MAX_REQUESTS_PER_RUN = 32
_NUM_THREADS = 4
_QUIETER = 0.5  # of the load of a busy minute: then it is worth measuring again
_LOCK_SECONDS = 120.0
_SPREAD_SECONDS = 600.0  # rates that vary are measured again after so long


class _ProbedDevice(NamedTuple):
    kind: str  # "cuda" or "cpu"
    name: str
    capacity_bytes: int


def find_machine(
    machine: MachineProfile | str | None, store: FileStore | str | os.PathLike[str] | None = None
) -> MachineProfile:
    """Return the profile that an argument `machine` stands for.

    Args:
        machine: A name that `penstock.memory.machine` takes, a profile, or None for this machine.
        store: As of `probe`, which measures this machine.

    Raises:
        TypeError: It is none of these.
        ValueError: There is no machine of that name.
    """
    if machine is not None and not isinstance(machine, MachineProfile | str):
        raise TypeError(
            f"machine={machine!r}: must be a name that penstock.memory.machine takes, a "
            "MachineProfile (as of penstock.probe()), or None for this machine"
        )
    if isinstance(machine, str):
        return _machine(machine)
    return probe(store) if machine is None else machine


def probe(
    store: FileStore | str | os.PathLike[str] | None = None, *, refresh: bool = False
) -> MachineProfile:
    """Measure the tiers and links of this machine; a few seconds the first time, then cached.

    Example:
        >>> profile = probe("/mnt/nvme")  # doctest: +SKIP
        >>> profile.links[Link.DEVICE_TO_FILE].bytes_per_second  # doctest: +SKIP
        1525000000.0

    Args:
        store: Directory of the file tier, or a `FileStore` with limits; None: no file tier.
        refresh: Measure again also where a cached profile exists. Profiles are cached per machine,
            device, store and limits, in the user's cache directory. What was measured on a busy
            machine (`MachineProfile.was_busy`) is measured again without being asked for, once the
            load is half of what it was, or after ten minutes where only the rates varied.

    Returns:
        The profile; capacities are those of now, also where the links' rates are cached.

    Raises:
        StoreUnavailableError: The directory is missing, is none, or cannot be written.
        StoreFullError: It has no room for the measurement, 8 MiB or its own limit.
    """
    file_store = None if store is None else FileStore.of(store)
    device = _device()
    # The others of a `torchrun` wait for the profile, instead of measuring each other's load.
    with cache_entry("profiles", _key(device, file_store), wait_seconds=_LOCK_SECONDS) as entry:
        profile = None if refresh else entry.load(_read_profile)
        if profile is not None and _is_outdated(profile):
            _log.info(
                "the machine was busy when it was measured (%s): measuring again", profile.load
            )
            profile = None
        if profile is None:
            load = _load()
            measured = _measure(device, file_store)
            profile = dataclasses.replace(measured, load=load, measured_at=time.time())
            entry.save(partial(_write_profile, profile))
            if profile.was_busy:
                _log.warning(
                    "penstock.probe: the machine was busy while it was measured (%s processes for "
                    "each core, rates vary by %.0f %%): plans use what was left of it; it is "
                    "measured again once it is quieter",
                    "unknown" if load is None else f"{load:.1f}",
                    100 * profile.spread,
                )
    path = None if file_store is None else file_store.path  # not that of another directory
    return dataclasses.replace(profile, tiers=_tiers(device, file_store), store=path)


def _read_profile(directory: Path) -> MachineProfile:
    return MachineProfile.from_dict(json.loads((directory / _FILE_NAME).read_text("utf-8")))


def _write_profile(profile: MachineProfile, directory: Path) -> None:
    text = json.dumps(profile.to_dict(), indent=2) + "\n"
    (directory / _FILE_NAME).write_text(text, encoding="utf-8")


def _is_outdated(profile: MachineProfile) -> bool:
    """Return whether a kept profile is of a busy machine that may be quiet by now."""
    if not profile.was_busy:
        return False
    load = _load()
    if load is not None and profile.load is not None and profile.load > MAX_LOAD:
        return load <= profile.load * _QUIETER
    return time.time() - profile.measured_at > _SPREAD_SECONDS


def _load() -> float | None:
    """Return the processes that run or wait for each core, on the last minute's average."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:  # unknown here
        return None


def _key(device: _ProbedDevice, store: FileStore | None) -> list[object]:
    key: list[object] = [_SCHEMA, platform.node(), device.kind, device.name, _num_cores()]
    if store is not None:
        path = os.path.realpath(store.path)
        try:
            file_system = os.stat(path).st_dev
        except OSError as error:
            raise StoreUnavailableError(
                f"store {store.path!r} cannot be used: {error.strerror} (errno {error.errno}); "
                "pass an existing directory on a local disk",
                path=store.path,
                errno=error.errno,
            ) from error
        key += [path, file_system, store.max_bytes]
        key += [store.write_bytes_per_second, store.read_bytes_per_second]
    return key


def _measure(device: _ProbedDevice, store: FileStore | None) -> MachineProfile:
    links: dict[Link, LinkProfile] = {}
    both_ways: dict[Link, LinkProfile] = {}
    direct_io = None
    if device.kind == "cuda":
        links |= _measure_pcie()
    if store is not None:
        alone, both, direct_io = _measure_file(store)
        names = (Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)
        if device.kind == "cuda":
            names = (Link.HOST_TO_FILE, Link.FILE_TO_HOST)
        links |= zip(names, alone, strict=True)
        both_ways |= zip(names, both, strict=False)  # none for a tiny store
    caches, memory_rates = _measure_caches(device)
    return MachineProfile(
        name=platform.node(),
        device=device.kind,
        device_name=device.name,
        num_cores=_num_cores(),
        tiers=_tiers(device, store),
        links=links,
        memcpy=_measure_memcpy(),
        store=None if store is None else store.path,
        direct_io=direct_io,
        compute=_measure_compute(device),
        both_ways=both_ways,
        caches=caches,
        memory_rates=memory_rates,
        page_rates=measure_pages(),
    )


def _measure_caches(
    device: _ProbedDevice,
) -> tuple[tuple[CacheProfile, ...], tuple[LinkProfile, ...]]:
    """Return the caches; of a processor with their rates, and that of memory behind them."""
    if device.kind == "cpu":
        return measure_caches(find_caches(), _num_cores(), run_bytes=_CACHE_RUN_BYTES)
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sizes = {
        "shared": getattr(properties, "shared_memory_per_block_optin", 0),
        "L2": getattr(properties, "L2_cache_size", 0),
    }
    return tuple(
        CacheProfile(name=name, capacity_bytes=int(size), line_bytes=_GPU_LINE_BYTES)
        for name, size in sizes.items()
        if size
    ), ()


def _measure_memcpy() -> LinkProfile:
    source, destination = map_anonymous(_MEMCPY_BYTES), map_anonymous(_MEMCPY_BYTES)
    source.write(b"\x01" * _MEMCPY_BYTES)  # untouched pages would all be the one page of zeros

    def run() -> int:
        copy_bytes(address_of(destination), address_of(source), _MEMCPY_BYTES)
        return _MEMCPY_BYTES

    return _repeat(run)


def _measure_pcie() -> dict[Link, LinkProfile]:
    """Copy between the GPU and pinned host memory, as offloading does."""
    import torch

    host = torch.empty(_PCIE_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
    device = torch.empty(_PCIE_BYTES, dtype=torch.uint8, device="cuda")

    def copy(destination: torch.Tensor, source: torch.Tensor) -> int:
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return _PCIE_BYTES

    return {
        Link.DEVICE_TO_HOST: _repeat(lambda: copy(host, device)),
        Link.HOST_TO_DEVICE: _repeat(lambda: copy(device, host)),
    }


def _measure_compute(device: _ProbedDevice) -> ComputeProfile:
    """Multiply square matrices, add long vectors and many short ones."""
    import torch

    def wait() -> None:
        if device.kind == "cuda":
            torch.cuda.synchronize()

    def product(dtype: torch.dtype) -> float:
        rows = _MATRIX_ROWS[device.kind]
        left, out = (torch.ones(rows, rows, dtype=dtype, device=device.kind) for _ in range(2))
        return rate(lambda: torch.mm(left, left, out=out), 2 * rows**3)

    def add(num_bytes: int, times: int) -> float:
        left, out = (
            torch.ones(num_bytes // 4, dtype=torch.float32, device=device.kind) for _ in range(2)
        )
        return rate(lambda: torch.add(left, 1.0, out=out), 2 * num_bytes, times)

    def rate(operate: Callable[[], object], amount: int, times: int = 1) -> float:
        def run() -> int:
            for _ in range(times):
                operate()
            wait()
            return amount * times

        return _repeat(run).bytes_per_second

    return ComputeProfile(
        flops_per_second={
            str(dtype)[6:]: product(dtype) for dtype in (torch.float32, torch.bfloat16)
        },
        memory_bytes_per_second=add(_VECTOR_BYTES[device.kind], 1),
        launch_seconds=8 / add(4, _NUM_LAUNCHES),
    )


def _measure_file(store: FileStore) -> tuple[list[LinkProfile], list[LinkProfile], bool]:
    """Write and read through an extent file: several threads in turns, then one each at once.

    Returns:
        Rates of writing and reading, each alone; both at once; whether I/O is direct.
    """
    buffers = [map_anonymous(_REQUEST_BYTES) for _ in range(_NUM_THREADS)]
    noise = os.urandom(_REQUEST_BYTES)  # some file systems and disks compress
    for buffer in buffers:
        buffer.write(noise)
    file = ExtentFile(store)
    try:
        with WorkerThreads(_NUM_THREADS) as threads:

            def run(move: Callable[[Extent, int, int], None], extents: list[Extent]) -> int:
                def lane(index: int) -> None:
                    # Each thread has its own buffer and every fourth extent.
                    for extent in extents[index::_NUM_THREADS]:
                        move(extent, address_of(buffers[index]), extent.num_bytes)

                list(threads.map(lane, range(_NUM_THREADS)))
                return sum(extent.num_bytes for extent in extents)

            extents = _extents_for(file, lambda extent: run(file.write, [extent]))
            alone = [_repeat(partial(run, move, extents)) for move in (file.write, file.read)]
            addresses = [address_of(buffer) for buffer in buffers]
            return alone, _measure_both_ways(file, extents, addresses, threads), file.direct
    finally:
        file.close()


def _measure_both_ways(
    file: ExtentFile, extents: list[Extent], addresses: list[int], threads: WorkerThreads
) -> list[LinkProfile]:
    """Write one half of the extents and read the other, again and again, at the same time."""
    if len(extents) < 2:
        return []

    def lane(index: int) -> float:
        move = (file.write, file.read)[index]
        num_bytes, begin, elapsed = 0, time.perf_counter(), 0.0
        mine = itertools.cycle(extents[index::2])
        while elapsed <= _BOTH_WAYS_SECONDS:
            extent = next(mine)
            move(extent, addresses[index], extent.num_bytes)
            num_bytes += extent.num_bytes
            elapsed = time.perf_counter() - begin
        return num_bytes / elapsed

    runs = [list(threads.map(lane, range(2))) for _ in range(_MIN_RUNS)]
    return [LinkProfile.of(rates) for rates in zip(*runs, strict=True)]


def _extents_for(file: ExtentFile, write: Callable[[Extent], int]) -> list[Extent]:
    """Take as many extents as a run of about 0.1 s needs, within what the store's limit allows."""
    limit = file.file_store.max_bytes or _MAX_REQUESTS_PER_RUN * _REQUEST_BYTES
    num_bytes = min(_REQUEST_BYTES, round_down(limit))
    first = file.allocate(num_bytes)
    start = time.perf_counter()
    write(first)
    num_extents = round(_RUN_SECONDS / (time.perf_counter() - start))
    num_extents = max(num_extents, 2)  # one for each direction
    num_extents = min(num_extents, _MAX_REQUESTS_PER_RUN, limit // num_bytes)
    return [first, *(file.allocate(num_bytes) for _ in range(num_extents - 1))]


def _repeat(run: Callable[[], int]) -> LinkProfile:
    """Call `run`, which returns the bytes that it moved, once to warm up and then several times."""
    run()
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < _MIN_RUNS or (
        len(rates) < _MAX_RUNS and time.perf_counter() - begin < _LINK_SECONDS
    ):
        start = time.perf_counter()
        num_bytes = run()
        rates.append(num_bytes / max(time.perf_counter() - start, 1e-9))
    return LinkProfile.of(rates)


def _tiers(device: _ProbedDevice, store: FileStore | None) -> dict[Tier, TierProfile]:
    tiers = {Tier.DEVICE: TierProfile(device.capacity_bytes)}
    if device.kind == "cuda":
        tiers[Tier.HOST] = TierProfile(installed_ram())
    if store is not None:
        usable = max(0, free_bytes(store.path) - reserved_bytes(store.path))
        limit = usable if store.max_bytes is None else store.max_bytes
        tiers[Tier.FILE] = TierProfile(min(usable, limit))
    return tiers


def _device() -> _ProbedDevice:
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return _ProbedDevice("cuda", properties.name, properties.total_memory)
    return _ProbedDevice("cpu", _processor_name(), installed_ram())


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _processor_name() -> str:
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    return platform.machine()
