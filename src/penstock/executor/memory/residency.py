"""Residency index: the place of each value at each boundary, on the device and below it.

A plan's intervals wrap around: an interval that lasts beyond the last boundary N goes on at the
beginning of the next step, where the value `final` of a persistent storage is called `initial`.
Here every interval is seen from one step, so it may begin before 0.

A plan places values in the arena only. The packer places their copies below the device, from the
intervals that the plan gives them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.memory.pages import DIRECT_IO_BYTES, round_up
from penstock.planner import Buffer, Copy, Placement, Plan, pack

_PACK_SECONDS = 1.0
# Direct I/O takes such addresses without a copy, and such offsets of a file.
_ALIGNMENT_BYTES = {Tier.HOST: 512, Tier.FILE: DIRECT_IO_BYTES}


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
    """The residency `intervals`, by value, of a plan that `check` accepts."""

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


class CopyLayout(NamedTuple):
    """Offsets of a plan's copies below the device.

    Attributes:
        offsets: For each tier and each copy there (index in `plan.copies`) its first byte in the
            tier's block. Copies of one value that meet at the step boundary share a place.
        num_bytes: For each tier the bytes of the block; 0 if the plan does not use it.
        homes: For each tier the places that last from step to step, by the storages' names.
    """

    offsets: dict[Tier, dict[int, int]]
    num_bytes: dict[Tier, int]
    homes: dict[Tier, dict[str, int]]


def lay_out_copies(graph: StepGraph, plan: Plan, others: Sequence[CopyLayout] = ()) -> CopyLayout:
    """Assign offsets to the copies of a plan.

    A home that has a place in another plan's layout keeps it, so that nothing has to move when
    plans take turns in the same blocks.
    """
    layout = CopyLayout({}, {Tier.DEVICE: plan.arena_bytes}, {})
    for tier, alignment in _ALIGNMENT_BYTES.items():
        known = {name: offset for other in others for name, offset in other.homes[tier].items()}
        groups = _group_copies(graph, plan, tier)
        names = [_name_home(graph, plan, group) for group in groups]
        buffers = _fix_homes([_buffer_of(plan, each, alignment) for each in groups], names, known)
        packing = pack(buffers, None, _PACK_SECONDS, 0)
        places = list(zip(groups, names, packing.offsets, strict=True))
        layout.offsets[tier] = {index: at for group, _, at in places for index in group}
        layout.num_bytes[tier] = packing.height
        layout.homes[tier] = known | {name: at for _, name, at in places if name is not None}
    return layout


def _name_home(graph: StepGraph, plan: Plan, group: list[int]) -> str | None:
    """Return the name of the storage whose home a group is; None if it is no home."""
    copy = plan.copies[group[0]]
    storage = graph.storage(copy.value)
    begins = copy.start == 0 and copy.value == storage.initial
    goes_on = copy.end > len(plan.order) and copy.value == storage.final
    return storage.name if storage.persistent and (begins or goes_on) else None


def _fix_homes(
    buffers: list[Buffer], names: list[str | None], known: Mapping[str, int]
) -> list[Buffer]:
    """Fix homes at their offsets in other plans, as far as these do not overlap."""
    taken: list[tuple[int, int]] = []
    fixed = []
    for buffer, name in zip(buffers, names, strict=True):
        begin = known.get(name) if name is not None else None
        end = (begin or 0) + buffer.size
        if begin is None or any(begin < high and low < end for low, high in taken):
            fixed.append(buffer)
            continue
        taken.append((begin, end))
        fixed.append(dataclasses.replace(buffer, offset=begin))
    return fixed


def _group_copies(graph: StepGraph, plan: Plan, tier: Tier) -> list[list[int]]:
    """Group one copy that begins the step with those of its storage that end it: one place."""
    num_positions = len(plan.order)
    written = {
        (transfer.value, transfer.start)
        for transfer in plan.transfers
        if transfer.link.destination is tier
    }
    begins: dict[int, int] = {}  # by storage
    ends: defaultdict[int, list[int]] = defaultdict(list)
    groups = []
    for index, copy in enumerate(plan.copies):
        if copy.tier is not tier:
            continue
        storage = graph.storage(copy.value)
        carried = storage.persistent and copy.start == 0 and copy.value == storage.initial
        if carried and (copy.value, 0) not in written:
            begins[graph.storage_of_value[copy.value]] = index
        elif storage.persistent and copy.value == storage.final and copy.end == num_positions:
            ends[graph.storage_of_value[copy.value]].append(index)
        else:
            groups.append([index])
    groups += [[index, *ends.pop(number, [])] for number, index in begins.items()]
    return groups + [[index] for rest in ends.values() for index in rest]


def _buffer_of(plan: Plan, group: list[int], alignment: int) -> Buffer:
    """Return a group as the packer's buffer; it is free in the gaps between its copies."""
    num_positions = len(plan.order)
    copies = [plan.copies[index] for index in group]
    taken = []
    for copy in copies:
        taken.append((copy.start, min(copy.end, num_positions)))
        if copy.end > num_positions:  # it wraps around
            taken.append((0, copy.end - num_positions))
    taken.sort()
    gaps, reached = [], taken[0][1]
    for start, end in taken[1:]:
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, end)
    size = round_up(copies[0].num_bytes, alignment)
    return Buffer(taken[0][0], reached, size, alignment=alignment, gaps=tuple(gaps))
