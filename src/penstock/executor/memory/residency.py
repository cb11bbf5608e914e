"""Residency index: the place of each value at each boundary, on the device and below it.

A plan's intervals wrap around: an interval that lasts beyond the last boundary N goes on at the
beginning of the next step, where the value `final` of a persistent storage is called `initial`.
Here every interval is seen from one step, so it may begin before 0.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Copy, Placement, Plan


class ResidencyInterval(NamedTuple):
    """A value in one place, from one boundary to another.

    Attributes:
        start: First boundary; below zero if the value came in the step before.
        end: Last boundary, exclusive.
        tier: The tier.
        place: On the device the offset in the arena, below it the index of the copy.
        transfer: Index of the transfer that brings the value; None if an operator makes it, the
            caller gives it, or the step before left it.
        steps_ago: 1 if that transfer began in the step before.
    """

    start: int
    end: int
    tier: Tier
    place: int
    transfer: int | None
    steps_ago: int


class ResidencyIndex:
    """The residency intervals of a plan that `check` accepts.

    Attributes:
        intervals: By value.
    """

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self._graph = graph
        self._num_positions = len(plan.order)
        self._writers: dict[tuple[Tier, int, int], int] = {}
        for index, (value, link, _, start, _) in enumerate(plan.transfers):
            self._writers[link.destination, value, start] = index
        self.intervals: defaultdict[int, list[ResidencyInterval]] = defaultdict(list)
        for placement in plan.placements:
            self._add(placement, Tier.DEVICE, placement.offset)
        for index, copy in enumerate(plan.copies):
            self._add(copy, copy.tier, index)

    def _add(self, interval: Placement | Copy, tier: Tier, place: int) -> None:
        value, start, end = interval.value, interval.start, interval.end
        transfer = self._writers.get((tier, value, start))
        self.intervals[value].append(ResidencyInterval(start, end, tier, place, transfer, 0))
        storage = self._graph.storage(value)
        n = self._num_positions
        # The last value that ends at N is still there when the next step begins: it may leave just
        # then, or the first operator may write over it.
        if end >= n and storage.persistent and value == storage.final:
            assert storage.initial is not None
            self.intervals[storage.initial].append(
                ResidencyInterval(start - n, end - n, tier, place, transfer, 1)
            )

    def find_operand(self, value: int, position: int) -> int:
        """Return the offset at which the operator at a position reads a value."""
        ending = None  # the operator may write over an operand whose interval ends before it
        for interval in self.intervals[value]:
            if interval.tier is Tier.DEVICE:
                if interval.start <= position < interval.end:
                    return interval.place
                if interval.end == position:
                    ending = interval.place
        assert ending is not None, f"value {value} is not on the device at {position}"
        return ending

    def find_source(self, value: int, tier: Tier, boundary: int) -> int:
        """Return the place from which a transfer that starts at a boundary takes a value."""
        for fits in (
            lambda interval: interval.start < boundary < interval.end,
            lambda interval: interval.start < boundary == interval.end,
            lambda interval: (
                interval.start <= boundary < interval.end and interval.transfer is None
            ),
            # Below the device also a copy that arrives at this very boundary.
            lambda interval: interval.start == boundary and tier is not Tier.DEVICE,
        ):
            for interval in self.intervals[value]:
                if interval.tier is tier and fits(interval):
                    return interval.place
        raise AssertionError(f"value {value} cannot leave the {tier} at {boundary}")

    def find_destination(self, value: int, tier: Tier, boundary: int) -> int:
        """Return the place of a value that a transfer or an operator makes from a boundary on."""
        for interval in self.intervals[value]:
            if interval.tier is tier and interval.start == boundary:
                return interval.place
        raise AssertionError(f"value {value} does not come to the {tier} at {boundary}")

    def find_at_step_boundary(self, storage: int) -> list[ResidencyInterval]:
        """Return the places of a persistent storage at the beginning of a step: complete ones, and
        those that a transfer of the step before completes.
        """
        initial = self._graph.storages[storage].initial
        assert initial is not None
        return [
            interval
            for interval in self.intervals[initial]
            if interval.start < 0 or (interval.start == 0 and interval.transfer is None)
        ]
