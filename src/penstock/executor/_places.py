"""Where every value of a plan lies at every boundary, on the device and below it.

A plan's intervals go round: what lasts beyond the last boundary N goes on at the beginning of the
next step, where the value `final` of a persistent storage is called `initial`. Here every interval
is seen from one step, so it may begin before 0.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner import Copy, Placement, Plan


class Stay(NamedTuple):
    """A value in one place for a while.

    Attributes:
        start: First boundary; below zero where it came in the step before.
        end: Last boundary, exclusive.
        tier: The tier.
        place: On the device the offset in the arena, below it the index of the copy.
        transfer: Index of the transfer that brings it; None if an operator makes it, the caller
            gives it, or the step before left it.
        steps_ago: 1 where that transfer began in the step before.
    """

    start: int
    end: int
    tier: Tier
    place: int
    transfer: int | None
    steps_ago: int


class Places:
    """Looks up where values are.

    Args:
        graph: The step.
        plan: A plan for it that `check` accepts.
    """

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self._graph = graph
        self._num_positions = len(plan.order)
        self._writers: dict[tuple[Tier, int, int], int] = {}
        for index, (value, link, _, start, _) in enumerate(plan.transfers):
            self._writers[link.destination, value, start] = index
        self.stays: defaultdict[int, list[Stay]] = defaultdict(list)
        for placement in plan.placements:
            self._add(placement, Tier.DEVICE, placement.offset)
        for index, copy in enumerate(plan.copies):
            self._add(copy, copy.tier, index)

    def _add(self, interval: Placement | Copy, tier: Tier, place: int) -> None:
        value, start, end = interval.value, interval.start, interval.end
        transfer = self._writers.get((tier, value, start))
        self.stays[value].append(Stay(start, end, tier, place, transfer, 0))
        storage = self._graph.storages[self._graph.storage_of_value[value]]
        n = self._num_positions
        # The last value that ends at N is still there when the next step begins: it may leave just
        # then, or the first operator may write over it.
        if end >= n and storage.persistent and value == storage.final:
            assert storage.initial is not None
            stay = Stay(start - n, end - n, tier, place, transfer, 1)
            self.stays[storage.initial].append(stay)

    def operand(self, value: int, position: int) -> int:
        """The offset at which the operator at a position finds a value that it needs."""
        handed_over = None
        for stay in self.stays[value]:
            if stay.tier is Tier.DEVICE:
                if stay.start <= position < stay.end:
                    return stay.place
                if stay.end == position:
                    handed_over = stay.place
        assert handed_over is not None, f"value {value} is not on the device at {position}"
        return handed_over

    def result(self, value: int, position: int) -> int:
        """The offset at which the operator at a position makes a value; also of what comes in."""
        return self._first(value, Tier.DEVICE, lambda stay: stay.start == position)

    def source(self, value: int, tier: Tier, boundary: int) -> int:
        """The place from which a transfer takes a value that starts at a boundary."""
        stays = self.stays[value]
        for fits in (
            lambda stay: stay.start < boundary < stay.end,
            lambda stay: stay.start < boundary == stay.end,
            lambda stay: stay.start <= boundary < stay.end and stay.transfer is None,
            # Below the device also what has come at this very boundary.
            lambda stay: stay.start == boundary and stay.tier is not Tier.DEVICE,
        ):
            for stay in stays:
                if stay.tier is tier and fits(stay):
                    return stay.place
        raise AssertionError(f"value {value} cannot leave the {tier} at {boundary}")

    def destination(self, value: int, tier: Tier, boundary: int) -> int:
        """The place to which a transfer brings a value that starts at a boundary."""
        return self._first(value, tier, lambda stay: stay.start == boundary)

    def at_the_seam(self, storage: int) -> list[Stay]:
        """Where a persistent storage is when a step begins: places that are complete, or become
        complete by a transfer that began in the step before.
        """
        block = self._graph.storages[storage]
        assert block.initial is not None
        return [
            stay
            for stay in self.stays[block.initial]
            if stay.start < 0 or (stay.start == 0 and stay.transfer is None)
        ]

    def _first(self, value: int, tier: Tier, fits: object) -> int:
        assert callable(fits)
        for stay in self.stays[value]:
            if stay.tier is tier and fits(stay):
                return stay.place
        raise AssertionError(f"value {value} has no such place on the {tier}")
