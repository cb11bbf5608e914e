"""Evictions between two uses, and the resident intervals and transfers that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.memory import Link
from penstock.planner._live_ranges import LiveRange, ResidentInterval, columns_of, occupied_bytes
from penstock.planner._plan_records import Transfer


class Eviction(NamedTuple):
    """A value that leaves after one of its uses and returns for the next.

    Attributes:
        live_range: Index of the live range.
        hole: Index of the hole in it.
        leaves: Boundary at which it leaves.
        returns: Boundary at which it comes back.
        reused_by: Value that the operator of the use before the hole writes in its place.
    """

    live_range: int
    hole: int
    leaves: int
    returns: int
    reused_by: int | None = None


def last_read(graph: StepGraph, live_range: LiveRange) -> int | None:
    """Return the position at which a result may reuse the place, as it is the last use; or None."""
    value, end = live_range.value, live_range.end
    is_kept = graph.storages[graph.storage_of_value[value]].final == value
    return None if is_kept or live_range.uses[-1] != end - 1 else end - 1


def live_bytes(
    graph: StepGraph, num_positions: int, live_ranges: Sequence[LiveRange]
) -> np.ndarray:
    """Return the bytes on the device at each position, if nothing is evicted."""
    ranges = [(each.uses[0], each.end, graph.num_bytes(each.value)) for each in live_ranges]
    return occupied_bytes(*columns_of(ranges), num_positions)


def derive_movement(
    graph: StepGraph,
    num_positions: int,
    live_ranges: Sequence[LiveRange],
    evictions: Sequence[Eviction],
) -> tuple[list[ResidentInterval], list[Transfer]]:
    """Return the resident intervals, and the transfers between the device and the host.

    Args:
        graph: The step.
        num_positions: Of the order.
        live_ranges: All live ranges in it.
        evictions: Those of one live range in the order of its uses.
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
        storage = graph.storages[graph.storage_of_value[live_range.value]]
        segments, moved = _cut(live_range, own.get(index, ()))
        for start, end in segments:
            value, shift = _rename(live_range, storage.initial, start, num_positions)
            intervals.append(ResidentInterval(value, start - shift, end - shift))
        for link, start, end in moved:
            value, shift = _rename(live_range, storage.initial, start, num_positions)
            num_bytes = storage.num_bytes
            transfers.append(Transfer(value, link, num_bytes, start - shift, end - shift))
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


def _rename(
    live_range: LiveRange, initial: int | None, start: int, num_positions: int
) -> tuple[int, int]:
    """Return the name of a value in the step of a boundary, and the boundary where it begins."""
    if start < num_positions:
        return live_range.value, 0
    assert initial is not None
    return initial, num_positions
