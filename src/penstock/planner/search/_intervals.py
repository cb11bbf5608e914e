"""Intervals in which storages are on the device, between their evicted holes, and their chains.

The search handles storages, in which values follow each other; `_plan_residency` names the values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import Storage
from penstock.planner.search._problem import CREATE
from penstock.planner.search._residency import EvictionChoice
from penstock.planner.search._sequence import OperatorSequence, ReplayTimes

NO_HOLE, ALWAYS = -1, -2  # in place of the hole at an end of an interval


@dataclass(slots=True)
class StorageInterval:
    """A storage on the device from one boundary to another.

    Attributes:
        storage: Index of the storage.
        start: First boundary.
        end: Last boundary, exclusive; beyond the step where it goes on in the next one.
        is_made: Whether an operator makes its value where it starts; else the value comes in, or
            is there.
        arrives: The hole after which it comes in; `NO_HOLE` if it is made, or given, where it
            starts; `ALWAYS` if it is always there.
        leaves: The hole in which it leaves; `NO_HOLE` after the last use, `ALWAYS` if it never
            leaves.
        reused_by: The interval that reuses its place in place where it ends, if any.
        reuses_place: Whether it is the `reused_by` of another one.
    """

    storage: int
    start: int
    end: int
    is_made: bool = False
    arrives: int = NO_HOLE
    leaves: int = NO_HOLE
    reused_by: StorageInterval | None = None
    reuses_place: bool = False


@dataclass(slots=True)
class EvictedHole:
    """A hole in which a storage leaves and comes back.

    Attributes:
        hole: Index of the hole.
        storage: Index of the storage.
        tier: Index of the lower tier that it leaves to.
        use: Position of the use before the hole; -1 if there is none.
        next_use: Position of the use after it; beyond the step in the next one.
        is_dirty: Whether it has to be written before it is gone.
        out_end: Boundary by which it has left.
        in_start: Boundary at which it begins to come back; beyond the step in the next one.
        is_unused: Whether no operator uses the storage.
    """

    hole: int
    storage: int
    tier: int
    use: int
    next_use: int
    is_dirty: bool = False
    out_end: int = 0
    in_start: int = 0
    is_unused: bool = False


def list_evicted_holes(choice: EvictionChoice, replay: ReplayTimes) -> list[EvictedHole]:
    """Return the evicted holes by storage and position, with boundaries that are in order."""
    sequence, evicted = choice.sequence, choice.evicted
    tiers = np.zeros(len(evicted), np.uint8) if choice.tier is None else choice.tier
    num_positions = len(sequence.order)
    dirty = sequence.dirty(evicted)
    found = []
    for index in np.nonzero(evicted)[0].tolist():
        use, next_use = int(sequence.hole_start[index]), int(sequence.hole_end[index])
        hole = EvictedHole(
            index, int(sequence.hole_object[index]), int(tiers[index]), use, next_use
        )
        found.append(hole)
        if use < 0:
            hole.is_unused = True
            continue
        hole.is_dirty = bool(dirty[index])
        # The engine counts from the step of the next use.
        in_start = int(replay.in_start[index])
        if next_use >= num_positions:
            in_start += num_positions
        out_end = int(replay.out_end[index]) if dirty[index] else use + 1
        hole.out_end = min(max(out_end, use + 1), next_use)
        hole.in_start = min(max(in_start, hole.out_end), next_use)
    return found


def cut_into_intervals(
    sequence: OperatorSequence, evicted_holes: list[EvictedHole]
) -> list[StorageInterval]:
    """Cut the live ranges of all storages at their evicted holes."""
    num_positions = len(sequence.order)
    own: dict[int, list[EvictedHole]] = defaultdict(list)
    for hole in evicted_holes:
        own[hole.storage].append(hole)
    intervals: list[StorageInterval] = []
    for index, storage in enumerate(sequence.problem.graph.storages):
        if storage.persistent and storage.num_bytes:
            intervals += _cut_persistent(index, own[index], num_positions)
        elif storage.num_bytes:
            uses = sequence.uses.get(index, [])
            intervals += _cut_temporary(index, storage, uses, own[index], num_positions)
    _link_reuses(sequence, intervals)
    return intervals


def _cut_persistent(
    index: int, holes: list[EvictedHole], num_positions: int
) -> Iterator[StorageInterval]:
    """Yield an interval from each evicted hole to the next, around the step."""
    if not holes:
        yield StorageInterval(index, 0, num_positions, arrives=ALWAYS, leaves=ALWAYS)
        return
    if holes[0].is_unused:
        return
    for number, hole in enumerate(holes):
        following = holes[(number + 1) % len(holes)]
        around = num_positions if number + 1 == len(holes) else 0
        start, end = hole.in_start, following.out_end + around
        shift = num_positions if start >= num_positions else 0
        yield StorageInterval(
            index, start - shift, end - shift, arrives=hole.hole, leaves=following.hole
        )


def _cut_temporary(
    index: int,
    storage: Storage,
    uses: list[tuple[int, int]],
    holes: list[EvictedHole],
    num_positions: int,
) -> Iterator[StorageInterval]:
    hole_after = {hole.use: hole for hole in holes}
    begin = 0 if storage.initial is not None else None
    is_made, arrives = False, NO_HOLE
    for number, (position, _) in enumerate(uses):
        if begin is None:
            begin, is_made = position, True
        is_last = number + 1 == len(uses)
        hole = hole_after.get(position)
        if hole is not None and (is_last or uses[number + 1][0] != position):
            yield StorageInterval(index, begin, hole.out_end, is_made, arrives, hole.hole)
            begin, is_made, arrives = hole.in_start, False, hole.hole
        elif is_last or uses[number + 1][1] == CREATE:
            is_result = is_last and storage.final is not None
            end = num_positions if is_result else position + 1
            yield StorageInterval(index, begin, end, is_made, arrives)
            begin, arrives = None, NO_HOLE


def _link_reuses(sequence: OperatorSequence, intervals: list[StorageInterval]) -> None:
    positions = np.flatnonzero(sequence.reused[:, 0] >= 0)
    pairs = sequence.reused[positions].tolist()
    operands, results = {operand for operand, _ in pairs}, {result for _, result in pairs}
    ending = {(each.storage, each.end): each for each in intervals if each.storage in operands}
    starting = {(each.storage, each.start): each for each in intervals if each.storage in results}
    for position, (operand, result) in zip(positions.tolist(), pairs, strict=True):
        old, new = ending.get((operand, position + 1)), starting.get((result, position))
        if old is not None and new is not None:
            old.end = position
            old.reused_by, new.reuses_place = new, True


def chain_intervals(intervals: Sequence[StorageInterval]) -> list[list[StorageInterval]]:
    """Return chains of intervals of which each reuses the place of the one before."""
    chains = []
    for interval in intervals:
        if interval.reuses_place:
            continue
        chain = [interval]
        while (following := chain[-1].reused_by) is not None:
            chain.append(following)
        chains.append(chain)
    return chains
