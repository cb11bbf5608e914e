"""Evictions between two uses: the resident intervals and transfers that follow, and addresses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, alignment_bytes
from penstock.memory import Link
from penstock.planner._live_ranges import LiveRange, ResidentInterval
from penstock.planner._plan_records import Placement, Transfer
from penstock.planner.packing import Buffer, pack


class Eviction(NamedTuple):
    """A value that leaves after one of its uses and returns for the next."""

    live_range: int  # index of the live range
    hole: int  # index of the hole in it
    leaves: int  # boundary at which it leaves
    returns: int  # boundary at which it comes back
    # Value that the operator of the use before the hole writes in its place.
    reused_by: int | None = None


def last_read(graph: StepGraph, live_range: LiveRange) -> int | None:
    """Return the position at which a result may reuse the place, as it is the last use; or None."""
    value, end = live_range.value, live_range.end
    is_kept = graph.storages[graph.storage_of_value[value]].final == value
    return None if is_kept or live_range.uses[-1] != end - 1 else end - 1


def derive_movement(
    graph: StepGraph,
    num_positions: int,
    live_ranges: Sequence[LiveRange],
    evictions: Sequence[Eviction],
) -> tuple[list[ResidentInterval], list[Transfer]]:
    """Return the resident intervals, and the transfers between the device and the host.

    Evictions of one live range are in the order of its uses.
    """
    intervals: list[ResidentInterval] = []
    transfers: list[Transfer] = []
    own: dict[int, list[Eviction]] = {}
    for eviction in evictions:
        own.setdefault(eviction.live_range, []).append(eviction)
    for index, live_range in enumerate(live_ranges):
        if live_range.is_constant and index not in own:
            intervals.append(ResidentInterval(live_range.value, 0, num_positions))
            continue
        segments, moved = _cut(live_range, own.get(index, ()))
        for start, end in segments:
            value, begin = rename(graph, live_range.value, start, num_positions)
            intervals.append(ResidentInterval(value, begin, begin + end - start))
        for link, start, end in moved:
            value, begin = rename(graph, live_range.value, start, num_positions)
            num_bytes = graph.num_bytes(value)
            transfers.append(Transfer(value, link, num_bytes, begin, begin + end - start))
    transfers.sort(key=lambda transfer: (transfer.end, transfer.start))
    return intervals, transfers


def _cut(
    live_range: LiveRange, evictions: Sequence[Eviction]
) -> tuple[list[tuple[int, int]], list[tuple[Link, int, int]]]:
    """Return the parts of a live range on the device, and its transfers; positions count on."""
    begin, is_written = live_range.uses[0], live_range.is_constant
    segments: list[tuple[int, int]] = []
    transfers: list[tuple[Link, int, int]] = []
    for eviction in evictions:
        leaves, returns = eviction.leaves, eviction.returns
        if is_written and eviction.reused_by is None:
            leaves = live_range.uses[eviction.hole] + 1  # nothing has to be written
        if not is_written:  # the copy may be made while the value is still there
            start = live_range.uses[0] + 1
            transfers.append((Link.DEVICE_TO_HOST, start, eviction.leaves))
            is_written = True
        segments.append((begin, leaves))
        transfers.append((Link.HOST_TO_DEVICE, returns, live_range.uses[eviction.hole + 1]))
        begin = returns
    if not live_range.is_constant:
        return [*segments, (begin, live_range.end)], transfers
    num_positions = live_range.uses[-1] - live_range.uses[0]
    # The segment after the last eviction goes on before the first one.
    return [(begin, segments[0][1] + num_positions), *segments[1:]], transfers


def rename(graph: StepGraph, value: int, position: int, num_positions: int) -> tuple[int, int]:
    """Return the name of a value in the step of a position, and the position in that step."""
    if position < num_positions:
        return value, position
    initial = graph.storages[graph.storage_of_value[value]].initial
    assert initial is not None
    return initial, position - num_positions


def aligned_graph(graph: StepGraph) -> StepGraph:
    """Return the graph with the bytes that placements take: up to where the next may begin."""
    unit = alignment_bytes(graph)
    storages = (
        dataclasses.replace(storage, num_bytes=_round_up(storage.num_bytes, unit))
        for storage in graph.storages
    )
    return dataclasses.replace(graph, storages=tuple(storages))


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def place(
    graph: StepGraph, intervals: Sequence[ResidentInterval], offsets: Sequence[int]
) -> list[Placement]:
    """Return the intervals as placements at their offsets."""
    return [
        Placement(interval.value, offset, graph.num_bytes(interval.value), *interval[1:])
        for interval, offset in zip(intervals, offsets, strict=True)
    ]


def first_fit(
    graph: StepGraph, order: Sequence[int], intervals: Sequence[ResidentInterval]
) -> list[int]:
    """Return an address for each interval: the first that fits, the largest first.

    Intervals that reuse a place in place keep its address.
    """
    groups, unit = group_by_address(graph, order, intervals), alignment_bytes(graph)
    sizes = [
        max(_round_up(graph.num_bytes(intervals[i].value), unit) for i in members)
        for members in groups
    ]
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, list[int]]] = []
    for group in sorted(range(len(groups)), key=lambda g: -sizes[g]):
        taken = sorted(
            (start, end)
            for start, end, members in placed
            if any(
                overlap(intervals[a], intervals[b], len(order))
                for a in groups[group]
                for b in members
            )
        )
        offset = 0
        for start, end in taken:
            if offset + sizes[group] <= start:
                break
            offset = max(offset, end)
        placed.append((offset, offset + sizes[group], groups[group]))
        for index in groups[group]:
            offsets[index] = offset
    return offsets


def find_offsets(
    graph: StepGraph,
    order: Sequence[int],
    intervals: Sequence[ResidentInterval],
    device_bytes: int | None,
    *,
    time_limit: float = 5.0,
) -> list[int] | None:
    """Return addresses within a budget, workspace included; None if none were found.

    The packer has `time_limit` seconds, where the first fit does not do.
    """
    groups = group_by_address(graph, order, intervals)
    for members in groups:  # a value may come back before its place is free again
        for a, b in itertools.combinations(members, 2):
            if overlap(intervals[a], intervals[b], len(order)):
                return None
    offsets = first_fit(graph, order, intervals)
    if device_bytes is None:
        return offsets
    capacity = device_bytes - graph.workspace_bytes
    placements = place(graph, intervals, offsets)
    if max((p.offset + p.num_bytes for p in placements), default=0) <= capacity:
        return offsets
    buffers = [_buffer(graph, len(order), [intervals[i] for i in members]) for members in groups]
    try:
        packing = pack(buffers, capacity=capacity, time_limit=time_limit)
    except InfeasibleError:
        return None
    for members, offset in zip(groups, packing.offsets, strict=True):
        for index in members:
            offsets[index] = offset
    return offsets


def _buffer(graph: StepGraph, num_positions: int, intervals: Sequence[ResidentInterval]) -> Buffer:
    """Return a buffer at one address for several intervals; between them its bytes are free."""
    busy = sorted(
        {
            position % num_positions
            for interval in intervals
            for position in range(interval.start, max(interval.end, interval.start + 1))
        }
    )
    free = tuple(
        (before + 1, after) for before, after in itertools.pairwise(busy) if after > before + 1
    )
    unit = alignment_bytes(graph)
    size = max(_round_up(graph.num_bytes(interval.value), unit) for interval in intervals)
    return Buffer(busy[0], busy[-1] + 1, size, alignment=unit, gaps=free)


def overlap(a: ResidentInterval, b: ResidentInterval, num_positions: int) -> bool:
    """Return whether two intervals have a position of the cycle in common."""
    return any(
        a.start < b.end + shift and b.start + shift < a.end
        for shift in (-num_positions, 0, num_positions)
    )


def group_by_address(
    graph: StepGraph, order: Sequence[int], intervals: Sequence[ResidentInterval]
) -> list[list[int]]:
    """Group indices of intervals that share an address, by in-place reuse or across steps."""
    num_positions = len(order)
    group = list(range(len(intervals)))

    def root(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    starting = {(each.value, each.start): index for index, each in enumerate(intervals)}
    ending = {(each.value, each.end): index for index, each in enumerate(intervals)}
    for index, interval in enumerate(intervals):
        storage = graph.storages[graph.storage_of_value[interval.value]]
        if interval.end >= num_positions and storage.persistent and storage.initial is not None:
            key = storage.initial, interval.end - num_positions  # its name in the next step
            if key == (storage.initial, 0) and key in starting:
                group[root(index)] = root(starting[key])  # it goes on there
            else:
                ending.setdefault(key, index)
    for position, index in enumerate(order):
        operator = graph.operators[index]
        reused: set[int] = set()
        for old, new in operator.mutates + operator.may_overwrite:
            first, second = ending.get((old, position)), starting.get((new, position))
            arriving = starting.get((old, position))
            if arriving is not None:  # an earlier interval of the value leaves: it is not reused
                first = arriving if intervals[arriving].end == position else None
            if first is not None and second is not None and not {old, new} & reused:
                reused |= {old, new}
                group[root(first)] = root(second)
    members: dict[int, list[int]] = {}
    for index in range(len(intervals)):
        members.setdefault(root(index), []).append(index)
    return list(members.values())
