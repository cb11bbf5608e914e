"""Levels of memory, and the bytes that a computation moves at each of them.

A level holds bytes for the levels nearer to the processor; its bytes are those that it hands to
them and takes from them. So the bytes of "L2" are what misses in L1, and those of "memory" what
misses in the last cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from penstock.codegen import ceil_div
from penstock.memory import Link, MachineProfile, Tier, probe
from penstock.tables import Report
from penstock.units import format_bytes, parse_bytes, parse_count

FastMemory = int | str | MachineProfile
"""A size in bytes, such as `49152` or `"48KiB"`, or a machine with all its levels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLevel:
    """One level of a machine's memory, as one core sees it.

    Attributes:
        name: `"L1"`, `"L2"`, `"L3"`, `"shared"`, `"memory"`, `"link"` or `"file"`.
        capacity_bytes: Bytes that it holds.
        bytes_per_second: Rate at which one core reads it; None where it was not measured.
    """

    name: str
    capacity_bytes: int
    bytes_per_second: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelBytes:
    """Bytes that a computation moves at one level, counted or predicted.

    Attributes:
        level: Name of the level that serves the bytes.
        loaded_bytes: Bytes that nearer levels load from it.
        stored_bytes: Bytes that nearer levels store to it.
        fast_memory_bytes: Capacity of the memory in front of it.
        lower_bound_bytes: Bytes, loaded and stored together, that no algorithm goes below.
        regime: The algorithm that moves them.
        tiles: Its tile sizes, in elements.
    """

    level: str
    loaded_bytes: int
    stored_bytes: int
    fast_memory_bytes: int = 0
    lower_bound_bytes: int = 0
    regime: str = ""
    tiles: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """Loaded and stored bytes together."""
        return self.loaded_bytes + self.stored_bytes

    @property
    def ratio(self) -> float:
        """Moved bytes over the lower bound; infinite without one."""
        return self.moved_bytes / self.lower_bound_bytes if self.lower_bound_bytes else float("inf")


@dataclasses.dataclass(frozen=True)
class IOModel(Report, title="I/O model"):
    """Bytes that an operation moves at each level with its best tiles, beside the lower bound.

    Attributes:
        operation: The operation with its shape.
        levels: By level, the nearest first; one where the fast memory was a size.
        bound: The theorem that the lower bound is from.
    """

    operation: str
    levels: tuple[LevelBytes, ...]
    bound: str

    @property
    def moved_bytes(self) -> int:
        """Bytes of the first level."""
        return self.levels[0].moved_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """Lower bound of the first level."""
        return self.levels[0].lower_bound_bytes

    @property
    def ratio(self) -> float:
        """Moved bytes over the lower bound, of the first level."""
        return self.levels[0].ratio

    @property
    def regime(self) -> str:
        """Algorithm of the first level."""
        return self.levels[0].regime

    @property
    def tiles(self) -> Mapping[str, int]:
        """Tile sizes of the first level, in elements."""
        return self.levels[0].tiles

    def _rows(self) -> list[tuple[str, object]]:
        rows: list[tuple[str, object]] = [("operation", self.operation)]
        for each in self.levels:
            tiles = ", ".join(f"{name} {length}" for name, length in each.tiles.items())
            text = (
                f"{format_bytes(each.moved_bytes)} through {format_bytes(each.fast_memory_bytes)}, "
                f"{each.ratio:.2f} x the bound of {format_bytes(each.lower_bound_bytes)}; "
                f"{each.regime} ({tiles})"
            )
            rows.append((each.level, text))
        return [*rows, ("bound", self.bound)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledSchedule:
    """An algorithm with its tiles, in elements of a two-level memory."""

    regime: str
    tiles: Mapping[str, int]
    loaded: int
    stored: int

    @property
    def moved(self) -> int:
        """Elements loaded and stored."""
        return self.loaded + self.stored


def memory_levels(profile: MachineProfile) -> tuple[MemoryLevel, ...]:
    """Return the levels of a machine, the nearest first.

    Example:
        >>> from penstock.memory import machine
        >>> [level.name for level in memory_levels(machine("h100-80gb"))]
        ['shared', 'L2', 'memory', 'link']

    Args:
        profile: What `penstock.probe` measured, or `penstock.memory.machine`.
    """
    levels = [
        MemoryLevel(
            name=cache.name,
            capacity_bytes=cache.capacity_bytes,
            bytes_per_second=None if cache.rate is None else cache.rate.bytes_per_second,
        )
        for cache in profile.caches
    ]
    compute = profile.compute
    rate = profile.memory_rates[0].bytes_per_second if profile.memory_rates else None
    if rate is None and compute is not None:
        rate = compute.memory_bytes_per_second
    levels.append(_tier_level("memory", profile, Tier.DEVICE, rate))
    for name, tier, links in (
        ("link", Tier.HOST, (Link.HOST_TO_DEVICE,)),
        ("file", Tier.FILE, (Link.FILE_TO_DEVICE, Link.FILE_TO_HOST)),
    ):
        if tier in profile.tiers:
            found = [
                profile.links[link].bytes_per_second for link in links if link in profile.links
            ]
            levels.append(_tier_level(name, profile, tier, found[0] if found else None))
    return tuple(levels)


def level_rates(profile: MachineProfile, num_threads: int) -> dict[str, float]:
    """Return the rate of each level for so many threads, in bytes per second, where it is known."""

    def rate(level: MemoryLevel) -> float | None:
        one = level.bytes_per_second
        if one is None or profile.device == "cuda":
            return one
        together = profile.memory_rates[1:] if level.name == "memory" else ()
        return min([one * num_threads, *(each.bytes_per_second for each in together)])

    rates = {each.name: rate(each) for each in memory_levels(profile)}
    return {name: found for name, found in rates.items() if found is not None}


@functools.cache
def this_machine() -> MachineProfile:
    """Return what `penstock.probe` measures, asked once for the process."""
    return probe()


def _tier_level(name: str, profile: MachineProfile, tier: Tier, rate: float | None) -> MemoryLevel:
    capacity = profile.tiers[tier].capacity_bytes
    return MemoryLevel(name=name, capacity_bytes=capacity, bytes_per_second=rate)


def model_levels(
    fast_memory: FastMemory,
    element_bytes: int,
    choose: Callable[[int], TiledSchedule],
    bound: Callable[[int], int],
    least_elements: int,
) -> tuple[LevelBytes, ...]:
    """Return a model's bytes for a fast memory of a size, or for all levels of a machine.

    Args:
        fast_memory: Bytes, as text or number, or a machine.
        element_bytes: Bytes of an element.
        choose: Returns the best schedule for a fast memory of so many elements.
        bound: Returns the lower bound, in elements, for so many elements.
        least_elements: Elements of the fast memory below which nothing can be computed.

    Raises:
        TypeError: `fast_memory` is neither a size nor a machine.
        ValueError: It is too small, or `element_bytes` is below 1.
    """
    check_counts(element_bytes=element_bytes)
    found = []
    for capacity_bytes, name in _find_capacities(fast_memory):
        elements = _count_elements(capacity_bytes, element_bytes, least_elements)
        best = choose(elements)
        level = LevelBytes(
            level=name,
            loaded_bytes=best.loaded * element_bytes,
            stored_bytes=best.stored * element_bytes,
            fast_memory_bytes=capacity_bytes,
            lower_bound_bytes=bound(elements) * element_bytes,
            regime=best.regime,
            tiles=best.tiles,
        )
        found.append(level)
    return tuple(found)


def _count_elements(capacity_bytes: int, element_bytes: int, least: int) -> int:
    elements = capacity_bytes // element_bytes
    if elements < least:
        raise ValueError(
            f"fast_memory is {format_bytes(capacity_bytes)}, which holds {elements} elements; this "
            f"operation needs {least * element_bytes} bytes or more"
        )
    return elements


def _find_capacities(fast_memory: FastMemory) -> list[tuple[int, str]]:
    """Return the bytes of each memory with the name of the level behind it."""
    if not isinstance(fast_memory, MachineProfile):
        return [(parse_bytes(fast_memory, name="fast_memory"), "slow memory")]
    pairs = itertools.pairwise(memory_levels(fast_memory))
    return [(near.capacity_bytes, far.name) for near, far in pairs]


def check_counts(least: int = 1, **counts: Any) -> None:
    """Check that arguments are whole numbers.

    Raises:
        TypeError: One is no integer.
        ValueError: One is below `least`.
    """
    for name, value in counts.items():
        parse_count(value, name=name, least=least)


def check_amounts(*, above: bool = False, **amounts: Any) -> None:
    """Check that arguments are numbers of at least 0, or above it.

    Raises:
        TypeError: One is no number.
        ValueError: One is less.
    """
    least = "above 0" if above else "of at least 0"
    for name, value in amounts.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} is {value!r}; pass a number {least}")
        amount = float(value)
        if not amount >= 0 or (above and amount == 0):  # NaN is none either
            raise ValueError(f"{name} is {value}; pass a number {least}")


def tile_lengths(length: int) -> list[int]:
    """Return for each number of tiles of a length the smallest tile that has so few, descending.

    No other length of a tile moves fewer bytes: a larger one takes room for nothing.
    """
    found, count = [], 1
    while count <= length:
        tile = ceil_div(length, count)
        found.append(tile)
        if tile == 1:
            break
        count = ceil_div(length, tile - 1)  # the least number of tiles that needs a smaller one
    return found
