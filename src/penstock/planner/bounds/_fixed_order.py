"""Live ranges and holes of a fixed order that runs once, as arrays, and the bytes they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._live_ranges import live_ranges, occupied_bytes
from penstock.planner._request import LinkRates


@dataclass(frozen=True, kw_only=True)
class LiveRangeTable:
    """All live ranges and holes of an order; arrays have one entry per live range or per hole."""

    num_bytes: np.ndarray  # bytes of each live range's value
    defined: np.ndarray  # position of its first use
    made_by: np.ndarray  # operator that defines it; -1 for what is given
    # Whether no step changes it, so that a copy below the device never becomes stale.
    is_constant: np.ndarray
    hole_range: np.ndarray  # live range of each hole; only holes with a position inside
    hole_begin: np.ndarray  # position of the use before the hole
    hole_end: np.ndarray  # position of the use after it
    # Per position: bytes on the device while its operator runs, if nothing is evicted; of a place
    # that is reused at once, old and new value count once.
    live_bytes: np.ndarray
    # Per position: bytes that its operator needs and makes, counted in that way.
    used_bytes: np.ndarray

    def evictable_bytes(self) -> np.ndarray:
        """Return per position the bytes of the values that are in a hole there."""
        holes = self.hole_begin + 1, self.hole_end, self.num_bytes[self.hole_range]
        return occupied_bytes(*holes, len(self.live_bytes))


@dataclass(frozen=True)
class FixedOrder:
    """A step whose operators first run in a given order, in an arena with links."""

    graph: StepGraph
    table: LiveRangeTable  # live ranges and holes of the order
    seconds: np.ndarray  # time of the operator at each position
    capacity: int  # bytes of the arena
    rates: LinkRates  # of the links
    # Time of each operator (by index) if it may run again; None if none may.
    again: np.ndarray | None

    @property
    def compute_seconds(self) -> float:
        """Time of all operators, each once."""
        return float(self.seconds.sum())

    @property
    def excess(self) -> np.ndarray:
        """Per position: bytes by which the live bytes exceed the capacity; may be negative."""
        return self.table.live_bytes - self.capacity


def tabulate_live_ranges(
    graph: StepGraph, order: Sequence[int], *, may_grow: bool = False
) -> LiveRangeTable:
    """Find the live ranges of all values.

    `may_grow`: operators may run again, so that something may run after the last one.
    """
    ranges = live_ranges(graph, order, may_grow=may_grow)
    holes: list[tuple[int, int, int]] = []
    for index, live_range in enumerate(ranges):
        holes += [(index, hole.begin, hole.end) for hole in live_range.holes if hole.positions]
    columns = np.array(holes, dtype=np.int64).reshape(-1, 3)
    saved = np.array([saved_bytes(graph, operator) for operator in order], dtype=np.int64)
    num_bytes = np.array([graph.num_bytes(each.value) for each in ranges], np.int64)
    defined = np.array([each.uses[0] for each in ranges], np.int64)
    live_bytes = occupied_bytes(defined, [each.end for each in ranges], num_bytes, len(order))
    return LiveRangeTable(
        num_bytes=num_bytes,
        defined=defined,
        made_by=np.array([each.made_by for each in ranges], np.int64),
        is_constant=np.array([each.is_constant for each in ranges], bool),
        hole_range=columns[:, 0],
        hole_begin=columns[:, 1],
        hole_end=columns[:, 2],
        live_bytes=live_bytes - saved,
        used_bytes=operator_bytes(graph)[list(order)],
    )


def operator_bytes(graph: StepGraph) -> np.ndarray:
    """Return the least bytes that are on the device while each operator runs, in any plan.

    Its operands and its results, as many of these in the place of operands as it allows.
    """
    used = [
        sum(map(graph.num_bytes, {*operator.reads, *operator.makes})) - saved_bytes(graph, index)
        for index, operator in enumerate(graph.operators)
    ]
    return np.array(used, dtype=np.int64)


def saved_bytes(graph: StepGraph, index: int) -> int:
    """Return the most bytes that results may share with operands (`Operator.may_overwrite`)."""
    shared: dict[int, int] = {}
    for read, created in graph.operators[index].may_overwrite:
        both = min(graph.num_bytes(read), graph.num_bytes(created))
        shared[created] = max(shared.get(created, 0), both)
    return sum(shared.values())
