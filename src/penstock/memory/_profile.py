"""Profile of a machine, as `probe` measures it, and those of machines that are not there."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from penstock.memory._ledger import Link, Tier
from penstock.tables import report_table
from penstock.units import format_bandwidth, format_bytes

# Beyond these a profile is of a busy machine: processes for each core, of which one is this one at
# most; and the distance between the quartiles of a link's runs, as a share of their median.
MAX_LOAD, MAX_SPREAD = 0.75, 0.5


def _check_rate(name: str, rate: float) -> None:
    if not rate > 0:  # NaN is none either
        raise ValueError(f"{name} is {rate}, but must be above 0")


@dataclass(frozen=True, slots=True)
class TierProfile:
    """Capacity of a tier.

    Attributes:
        capacity_bytes: Of the device: its memory; of the host: the RAM, within the limit of the
            control group; of a file store: what is free beyond the reserve, within its limit.
    """

    capacity_bytes: int

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise ValueError(f"capacity_bytes is {self.capacity_bytes}, but must be at least 0")


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Rate of a link, over several runs.

    Attributes:
        bytes_per_second: Median.
        quartiles: First and third quartile, in bytes per second.
        num_runs: Number of runs.
    """

    bytes_per_second: float
    quartiles: tuple[float, float]
    num_runs: int

    def __post_init__(self) -> None:
        _check_rate("bytes_per_second", self.bytes_per_second)

    @classmethod
    def of(cls, rates: Sequence[float]) -> LinkProfile:
        """Return the median and quartiles of the rates of at least two runs, in bytes per second.

        Example:
            >>> LinkProfile.of([1.0, 2.0, 3.0])
            LinkProfile(bytes_per_second=2.0, quartiles=(1.5, 2.5), num_runs=3)
        """
        first, median, third = statistics.quantiles(rates, n=4, method="inclusive")
        return cls(median, (first, third), len(rates))

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a share of the median."""
        first, third = self.quartiles
        return (third - first) / self.bytes_per_second if self.bytes_per_second > 0 else 0.0

    def __str__(self) -> str:
        first, third = self.quartiles
        return (
            f"{format_bandwidth(self.bytes_per_second)}  "
            f"(quartiles {format_bandwidth(first)} to {format_bandwidth(third)}, "
            f"{self.num_runs} runs)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheProfile:
    """A data cache, or the shared memory of a GPU's multiprocessor.

    Attributes:
        name: `"L1"`, `"L2"`, `"L3"`, or `"shared"`.
        capacity_bytes: Bytes that it holds; of a cache that cores share, all of it.
        line_bytes: Bytes that it moves at once.
        rate: How fast one core reads it; None where that was not measured.
    """

    name: str
    capacity_bytes: int
    line_bytes: int
    rate: LinkProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProfile:
    """Rates of the device: the two roofs of a roofline, and the cost of a launch.

    Attributes:
        flops_per_second: Of products of large matrices, by the name of the dtype.
        memory_bytes_per_second: Of elementwise operators on the device's memory, reads and writes
            together.
        launch_seconds: From one small operator to the next.
        source: Where the figures come from.
    """

    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    launch_seconds: float
    source: str = "measured"

    def __post_init__(self) -> None:
        _check_rate("memory_bytes_per_second", self.memory_bytes_per_second)
        if "float32" not in self.flops_per_second:
            raise ValueError("flops_per_second has none of float32, which others count as")
        for dtype, rate in self.flops_per_second.items():
            _check_rate(f"flops_per_second of {dtype}", rate)

    def seconds(self, flops: int, num_bytes: int, dtype: str) -> float:
        """Return the seconds of an operator with its launch, bound by arithmetic or by memory.

        Args:
            flops: Its floating-point operations.
            num_bytes: Bytes that it reads and writes.
            dtype: Name of its dtype; one that was not measured counts as float32.
        """
        rate = self.flops_per_second.get(dtype) or self.flops_per_second["float32"]
        return self.launch_seconds + max(flops / rate, num_bytes / self.memory_bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class MachineProfile:
    """Tiers and links of a machine, measured by `probe`.

    Attributes:
        name: Host name.
        device: `"cuda"`, or `"cpu"` where the device tier is RAM.
        device_name: Name of the GPU or of the processor.
        num_cores: CPU cores that this process may use.
        tiers: What each tier holds. `Tier.HOST` only with a GPU, `Tier.FILE` only with a store.
        links: How fast each link is. With a GPU they meet in the host, without one they join
            device and file.
        memcpy: How fast one thread copies within RAM: what a staging copy costs.
        store: Directory of the file tier; None without one.
        direct_io: Whether the store's file is read and written past the page cache; None without
            a store.
        compute: How fast the device computes; None in profiles of older versions.
        both_ways: How fast links to and from the file are while both are busy, with a request at a
            time each, as planned steps use them. Many disks share their rate between reading and
            writing.
        load: Processes of all kinds that were running or waiting for each core, on the average of
            the minute before it was measured; None where that is unknown.
        measured_at: Seconds since the epoch; 0 where that is unknown.
        caches: Caches of the device, the nearest to the processor first; empty where unknown.
        memory_rates: How fast the memory behind the caches is read: by one core, and by all of them
            together; empty on a GPU, and where it was not measured.
        page_rates: How fast one core reads random rows of 256 bytes, by the bytes of the pages that
            they lie in: small ones and huge ones; empty where it was not measured.
        peer: How fast a device receives from others of its node; None where that is unknown.
        network: How fast it receives from devices of other nodes; None where that is unknown.
        devices_per_node: Devices that `peer` joins.
    """

    name: str
    device: str
    device_name: str
    num_cores: int
    tiers: dict[Tier, TierProfile]
    links: dict[Link, LinkProfile]
    memcpy: LinkProfile
    store: str | None = None
    direct_io: bool | None = None
    compute: ComputeProfile | None = None
    both_ways: dict[Link, LinkProfile] = field(default_factory=dict)
    load: float | None = None
    measured_at: float = 0.0
    caches: tuple[CacheProfile, ...] = ()
    memory_rates: tuple[LinkProfile, ...] = ()
    page_rates: dict[int, LinkProfile] = field(default_factory=dict)
    peer: LinkProfile | None = None
    network: LinkProfile | None = None
    devices_per_node: int = 8

    @property
    def spread(self) -> float:
        """The widest spread of a link, as a share of its median."""
        links = [*self.links.values(), *self.both_ways.values(), self.memcpy]
        return max(link.spread for link in links)

    @property
    def was_busy(self) -> bool:
        """True if other processes took so much of the machine that its rates are too low."""
        return (self.load or 0.0) > MAX_LOAD or self.spread > MAX_SPREAD

    def while_both_are_busy(self) -> MachineProfile:
        """Return the profile with the rates that links have while both directions are busy."""
        return replace(self, links={**self.links, **self.both_ways})

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data for JSON: fields by name, tiers and links by value."""
        data = asdict(self)
        for name in ("tiers", "links", "both_ways", "page_rates"):
            data[name] = {str(key): profile for key, profile in data[name].items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MachineProfile:
        """Make an equal profile from what `to_dict` returned, also after a way through JSON.

        Raises:
            ValueError: Something is missing, or is not what it should be.
        """
        try:
            return _read_plain(cls, data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data is not a machine profile ({type(error).__name__}: {error}); "
                "pass what MachineProfile.to_dict returned"
            ) from error

    def __str__(self) -> str:
        device = f"{self.device_name} ({self.device})"
        rows: list[tuple[str, object]] = [("machine", self.name), ("device", device)]
        rows.append(("cores", str(self.num_cores)))
        if self.store is not None:
            kind = "direct I/O" if self.direct_io else "through the page cache"
            rows.append(("store", f"{self.store} ({kind})"))
        rows += [
            (f"{tier} capacity", format_bytes(profile.capacity_bytes))
            for tier, profile in self.tiers.items()
        ]
        rows += [(link.value, profile) for link, profile in self.links.items()]
        rows += [(f"{link.value}, both ways", profile) for link, profile in self.both_ways.items()]
        rows.append(("memcpy, one thread", self.memcpy))
        for cache in self.caches:
            size = format_bytes(cache.capacity_bytes)
            rate = "not measured" if cache.rate is None else cache.rate
            rows.append((f"{cache.name} cache, {size}", rate))
        of = ("memory, one core", "memory, all cores")
        rows += zip(of, self.memory_rates, strict=False)
        rows += [
            (f"random rows, pages of {format_bytes(page_bytes)}", rate)
            for page_bytes, rate in self.page_rates.items()
        ]
        if self.compute is not None:
            rows += [
                (f"compute, {dtype}", f"{rate / 1e12:.3g} TFLOP/s")
                for dtype, rate in self.compute.flops_per_second.items()
            ]
            rows.append(("memory", format_bandwidth(self.compute.memory_bytes_per_second)))
            rows.append(("launch", f"{self.compute.launch_seconds * 1e6:.1f} us"))
        if self.load is not None:
            rows.append(("load when measured", f"{self.load:.2f} processes for each core"))
        if self.was_busy:
            remark = (
                f"rates are too low or vary (widest spread {self.spread:.0%}); measured again "
                "once the machine is quieter, or by probe(refresh=True)"
            )
            rows.append(("busy when measured", remark))
        return report_table(rows, title="penstock.probe")


def _read_plain(kind: Any, data: Any) -> Any:
    """Return a value of a type from the plain data that JSON has for it."""
    if is_dataclass(kind):
        types, make = _find_types(kind), cast(Any, kind)
        given = [each.name for each in fields(kind) if each.name in data]
        return make(**{name: _read_plain(types[name], data[name]) for name in given})
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (dict, Mapping):
        return {_read_plain(parts[0], key): _read_plain(parts[1], data[key]) for key in data}
    if origin is tuple and parts[1:] == (Ellipsis,):
        return tuple(_read_plain(parts[0], each) for each in data)
    if origin is tuple:
        return tuple(_read_plain(part, each) for part, each in zip(parts, data, strict=True))
    if origin is UnionType:  # with None
        return None if data is None else _read_plain(parts[0], data)
    return kind(data)


_find_types = functools.cache(get_type_hints)  # takes longer than all else where a plan is read


# Machines that are not there, from published figures times what is reached. The rates of arithmetic
# and memory are those of NVIDIA's datasheets for the SXM modules (V100: "Tesla V100 GPU
# Accelerator", A100: "A100 Tensor Core GPU", H100 and H200: likewise), dense, times the fractions
# below, which large operators reach. float32 is without TF32, as PyTorch's default. PCIe is what
# pinned copies of many mebibytes reach each way, of 15.75, 31.5 and 63 GB/s.
ARITHMETIC_FRACTION = 0.7
MEMORY_FRACTION = 0.85
_HOST_BYTES = 256 * 2**30  # assumed: such machines have at least this per GPU
_MEMCPY = 10e9
_LAUNCH_SECONDS = 4e-6

# TFLOP/s by dtype.
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0, "bfloat16": 15.7}
_AMPERE = {"float64": 9.7, "float32": 19.5, "float16": 312.0, "bfloat16": 312.0}
_HOPPER = {"float64": 34.0, "float32": 67.0, "float16": 989.0, "bfloat16": 989.0}
# KiB of shared memory of a multiprocessor that a block can use, and MiB of L2: CUDA's programming
# guide, technical specifications by compute capability, and the whitepapers of the architectures.
_CACHES = {"v100": (96, 6), "a100": (163, 40), "h100": (227, 50), "h200": (227, 50)}
# By name: the device's name, its bytes, its arithmetic, GB/s of its memory, bytes/s of PCIe.
_MACHINES = {
    "v100-16gb-pcie3": ("Tesla V100 16 GB", 16 * 2**30, _VOLTA, 900.0, 12.5e9),
    "a100-80gb": ("A100 80 GB", 80 * 2**30, _AMPERE, 2039.0, 25e9),
    "h100-80gb": ("H100 80 GB", 80 * 2**30, _HOPPER, 3350.0, 50e9),
    "h200": ("H200 141 GB", 141 * 10**9, _HOPPER, 4800.0, 50e9),
}


# Bytes per second that a device receives from its node and from others: NVLink of the SXM modules
# (PCIe on the V100) and one share of eight of the node's InfiniBand (100 Gbit/s in all with V100s,
# 200 and 400 Gbit/s for each device of a DGX A100 and H100).
_PEERS = {
    "v100-16gb-pcie3": (12.5e9, 1.5e9),
    "a100-80gb": (240e9, 20e9),
    "h100-80gb": (360e9, 40e9),
    "h200": (360e9, 40e9),
}


def machine(name: str) -> MachineProfile:
    """Return the profile of a GPU with its host memory, without a file tier, that need not be here.

    As nothing was measured, `num_runs` of its links is 0.

    Example:
        >>> machine("v100-16gb-pcie3").tiers[Tier.DEVICE].capacity_bytes == 16 * 2**30
        True

    Args:
        name: `"v100-16gb-pcie3"`, `"a100-80gb"`, `"h100-80gb"` or `"h200"`.

    Raises:
        ValueError: There is none of this name.
    """
    if name not in _MACHINES:
        raise ValueError(
            f"machine is {name!r}; built-in machines are {', '.join(map(repr, _MACHINES))}; for "
            "this machine use penstock.probe()"
        )
    device_name, memory_bytes, teraflops, gigabytes_per_second, pcie_rate = _MACHINES[name]
    pcie = _rate(pcie_rate)
    shared, last = _CACHES[name.partition("-")[0]]
    return MachineProfile(
        name=name,
        device="cuda",
        device_name=device_name,
        num_cores=8,
        tiers={
            Tier.DEVICE: TierProfile(memory_bytes),
            Tier.HOST: TierProfile(_HOST_BYTES),
        },
        links={Link.DEVICE_TO_HOST: pcie, Link.HOST_TO_DEVICE: pcie},
        memcpy=_rate(_MEMCPY),
        compute=_compute(teraflops, gigabytes_per_second),
        caches=(
            CacheProfile(name="shared", capacity_bytes=shared * 2**10, line_bytes=128),
            CacheProfile(name="L2", capacity_bytes=last * 2**20, line_bytes=128),
        ),
        peer=_rate(_PEERS[name][0]),
        network=_rate(_PEERS[name][1]),
    )


def _compute(teraflops: dict[str, float], gigabytes_per_second: float) -> ComputeProfile:
    rates = {dtype: rate * 1e12 * ARITHMETIC_FRACTION for dtype, rate in teraflops.items()}
    return ComputeProfile(
        flops_per_second=rates,
        memory_bytes_per_second=gigabytes_per_second * 1e9 * MEMORY_FRACTION,
        launch_seconds=_LAUNCH_SECONDS,
        source=f"datasheet, {ARITHMETIC_FRACTION:.0%} of arithmetic, {MEMORY_FRACTION:.0%} of "
        "memory",
    )


def _rate(bytes_per_second: float) -> LinkProfile:
    return LinkProfile(bytes_per_second, (bytes_per_second, bytes_per_second), 0)
