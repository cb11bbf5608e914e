"""From a choice of the engine to a plan: intervals of values, addresses, transfers and copies.

An object's stay on the device is an interval of positions; stays that hand their room over are one
buffer for the packer. Positions here are those of one step; where a stay goes on in the next step
its end lies beyond the last position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.memory import Link, Tier
from penstock.planner._plan import Copy, Placement, Transfer
from penstock.planner.packing._pack import pack
from penstock.planner.packing._types import Buffer
from penstock.planner.search._engine import CREATE, OperatorSequence, Replay
from penstock.planner.search._residency import Residency


@dataclass(slots=True)
class Stay:
    """An object on the device from one boundary to another.

    Attributes:
        item: The object.
        start: First boundary.
        end: Last boundary, exclusive; beyond the step where it goes on in the next one.
        made_at_start: Whether an operator makes it where it starts; else it comes in, or is there.
        next_stay: The stay that takes over its room where it ends, if any.
    """

    item: int
    start: int
    end: int
    made_at_start: bool = False
    next_stay: Stay | None = None
    taken_over: bool = False


@dataclass(frozen=True)
class Movement:
    """What `emit` found: everything of a plan but its times."""

    placements: tuple[Placement, ...]
    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    arena_bytes: int


def emit(
    residency: Residency,
    *,
    out_link: Link,
    back_link: Link,
    capacity: int | None,
    pack_seconds: float,
    seed: int,
) -> Movement:
    """Turn a choice of the engine into placements with addresses, transfers and copies.

    Args:
        residency: The choice.
        out_link: The way out of the device.
        back_link: The way back.
        capacity: Bytes of the arena; None: as few as the packer finds.
        pack_seconds: Time for the packer.
        seed: For the packer.

    Returns:
        The movement.

    Raises:
        InfeasibleError: The packer found nothing within the capacity; its `minimum_device_bytes`
            is what it did find.
    """
    sequence = residency.sequence
    values = _Values(sequence)
    moves = _moves(sequence, residency.evicted, residency.replay)
    stays = _stays(sequence, moves)
    _link_handovers(sequence, stays)
    offsets = _addresses(sequence, stays, capacity, pack_seconds, seed)
    placements = [
        placement
        for stay, offset in zip(stays, offsets, strict=True)
        for placement in values.placements(stay, offset)
    ]
    transfers = [*_transfers(values, moves, out_link, back_link)]
    copies = [*_copies(sequence, values, moves, out_link.destination)]
    return Movement(
        placements=tuple(sorted(placements, key=lambda p: (p.start, p.offset, p.value))),
        transfers=tuple(transfers),
        copies=tuple(sorted(copies, key=lambda c: (c.start, c.value))),
        arena_bytes=max((p.offset + p.num_bytes for p in placements), default=0),
    )


@dataclass(slots=True)
class _Move:
    """An evicted gap: when the object leaves and comes back."""

    item: int
    use: int  # position of the last use before; -1 if it has none
    next_use: int  # position of the next, beyond the step in the next one
    dirty: bool
    out_end: int
    in_start: int  # beyond the step in the next one, like `next_use`
    never_used: bool = False


def _moves(sequence: OperatorSequence, evicted: np.ndarray, replay: Replay) -> list[_Move]:
    """The evicted gaps by object and position, with windows that are in order."""
    num_positions = len(sequence.order)
    dirty = sequence.dirty(evicted)
    moves = []
    for gap in np.nonzero(evicted)[0].tolist():
        use, next_use = int(sequence.gap_start[gap]), int(sequence.gap_end[gap])
        item = int(sequence.gap_object[gap])
        if use < 0:
            moves.append(_Move(item, use, next_use, False, 0, 0, never_used=True))
            continue
        # The engine counts from the step of the next use.
        in_start = int(replay.in_start[gap])
        if next_use >= num_positions:
            in_start += num_positions
        out_end = int(replay.out_end[gap]) if dirty[gap] else use + 1
        out_end = min(max(out_end, use + 1), next_use)
        in_start = min(max(in_start, out_end), next_use)
        moves.append(_Move(item, use, next_use, bool(dirty[gap]), out_end, in_start))
    return moves


def _stays(sequence: OperatorSequence, moves: list[_Move]) -> list[Stay]:
    num_positions = len(sequence.order)
    moves_of: dict[int, list[_Move]] = defaultdict(list)
    for move in moves:
        moves_of[move.item].append(move)
    problem = sequence.problem
    uses_of = _uses(sequence)
    stays: list[Stay] = []
    for item, storage in enumerate(problem.graph.storages):
        if not storage.num_bytes:
            continue
        uses = uses_of.get(item, [])
        if storage.persistent:
            stays += _persistent_stays(item, moves_of[item], num_positions)
        else:
            kept = storage.final is not None
            start = 0 if storage.initial is not None else None
            stays += _temporary_stays(item, uses, moves_of[item], start, kept, num_positions)
    return stays


def _uses(sequence: OperatorSequence) -> dict[int, list[tuple[int, int]]]:
    """For each object its uses: position and kind."""
    problem = sequence.problem
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    first, objects, kinds = (
        problem.first_access.tolist(),
        problem.access_object.tolist(),
        problem.access_kind.tolist(),
    )
    for position, operator in enumerate(sequence.order.tolist()):
        for access in range(first[operator], first[operator + 1]):
            item, kind = objects[access], kinds[access]
            persistent = problem.graph.storages[item].persistent
            if sequence.again[position] and kind != 0 and persistent:
                continue
            uses[item].append((position, kind))
    return uses


def _persistent_stays(item: int, moves: list[_Move], num_positions: int) -> Iterator[Stay]:
    """From one evicted gap to the next, around the step."""
    if not moves:
        yield Stay(item, 0, num_positions)
        return
    if moves[0].never_used:
        return
    for index, move in enumerate(moves):
        following = moves[(index + 1) % len(moves)]
        around = num_positions if index + 1 == len(moves) else 0
        # It comes back for one use and leaves after another.
        start, end = move.in_start, following.out_end + around
        shift = num_positions if start >= num_positions else 0
        yield Stay(item, start - shift, end - shift)


def _temporary_stays(
    item: int,
    uses: list[tuple[int, int]],
    moves: list[_Move],
    start: int | None,
    kept: bool,
    num_positions: int,
) -> Iterator[Stay]:
    leaves = {move.use: move for move in moves}
    begin, made = start, False
    for index, (position, _) in enumerate(uses):
        if begin is None:
            begin, made = position, True
        last = index + 1 == len(uses)
        move = leaves.get(position)
        if move is not None and not (not last and uses[index + 1][0] == position):
            yield Stay(item, begin, move.out_end, made)
            begin, made = move.in_start, False
        elif last or uses[index + 1][1] == CREATE:
            end = num_positions if last and kept else position + 1
            yield Stay(item, begin, end, made)
            begin = None


def _link_handovers(sequence: OperatorSequence, stays: list[Stay]) -> None:
    ending: dict[tuple[int, int], Stay] = {}
    starting: dict[tuple[int, int], Stay] = {}
    for stay in stays:
        ending[stay.item, stay.end] = stay
        starting[stay.item, stay.start] = stay
    for position, (source, target) in enumerate(sequence.handed.tolist()):
        if source < 0:
            continue
        old, new = ending.get((source, position + 1)), starting.get((target, position))
        if old is not None and new is not None:
            old.end = position
            old.next_stay, new.taken_over = new, True


def _addresses(
    sequence: OperatorSequence,
    stays: list[Stay],
    capacity: int | None,
    pack_seconds: float,
    seed: int,
) -> list[int]:
    """Offsets of the stays: one buffer for those that hand their room over."""
    num_positions = len(sequence.order)
    buffers: list[Buffer] = []
    chains: list[list[Stay]] = []
    for stay in stays:
        if stay.taken_over:
            continue
        chain = [stay]
        while (following := chain[-1].next_stay) is not None:
            chain.append(following)
        chains.append(chain)
        start, end = stay.start, chain[-1].end
        num_bytes = int(sequence.problem.object_bytes[stay.item])
        if end > num_positions and end - num_positions < start:
            gap = (end - num_positions, start)
            buffers.append(Buffer(0, num_positions, num_bytes, gaps=(gap,)))
        elif end > num_positions:
            buffers.append(Buffer(0, num_positions, num_bytes))
        else:
            buffers.append(Buffer(start, end, num_bytes))
    packing = pack(buffers, capacity, pack_seconds, seed)
    offset_of = {
        id(stay): offset
        for chain, offset in zip(chains, packing.offsets, strict=True)
        for stay in chain
    }
    return [offset_of[id(stay)] for stay in stays]


class _Values:
    """Which value an object holds before and after each use."""

    def __init__(self, sequence: OperatorSequence) -> None:
        self._sequence = sequence
        self._graph: StepGraph = sequence.problem.graph
        self._num_positions = len(sequence.order)
        self._changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, index in enumerate(sequence.order.tolist()):
            operator = self._graph.operators[index]
            again = bool(sequence.again[position])
            for value in operator.creates:
                self._note(value, position)
            for _, new in operator.mutates:
                if not (again and self._is_persistent(new)):
                    self._note(new, position)

    def _is_persistent(self, value: int) -> bool:
        return self._graph.storages[self._graph.storage_of_value[value]].persistent

    def _note(self, value: int, position: int) -> None:
        self._changes[self._graph.storage_of_value[value]].append((position, value))

    def num_bytes(self, item: int) -> int:
        return self._graph.storages[item].num_bytes

    def after(self, item: int, position: int) -> int:
        """The value once the operator at a position has run; the next step counts on."""
        changes = self._changes.get(item, [])
        storage = self._graph.storages[item]
        at = position % self._num_positions if position >= 0 else position
        current = storage.initial
        for change, value in changes:
            if change > at:
                break
            current = value
        assert current is not None, "an object is used before it is made"
        return current

    def placements(self, stay: Stay, offset: int) -> Iterator[Placement]:
        """One placement for each value that the object holds during the stay."""
        num_bytes = self.num_bytes(stay.item)
        # Within the step in which the stay starts; where it goes on, `final` becomes `initial`.
        boundaries = sorted(
            position + around
            for position, _ in self._changes.get(stay.item, [])
            for around in (0, self._num_positions)
            if stay.start <= position + around < stay.end
        )
        points = [*boundaries, stay.end]
        if stay.made_at_start:
            pieces = [*itertools.pairwise(points)]
        else:  # comes in, perhaps only for the operator that changes it there and then
            pieces = [(stay.start, points[0]), *itertools.pairwise(points)]
        for index, (start, end) in enumerate(pieces):
            is_made = index > 0 or stay.made_at_start
            value = self.after(stay.item, start if is_made else start - 1)
            if not is_made and start == 0:
                value = self._initial(stay.item)
            wraps = start >= self._num_positions
            shift = self._num_positions if wraps else 0
            yield Placement(value, offset, num_bytes, start - shift, end - shift)

    def _initial(self, item: int) -> int:
        initial = self._graph.storages[item].initial
        assert initial is not None
        return initial


def _transfers(
    values: _Values, moves: list[_Move], out_link: Link, back_link: Link
) -> Iterator[Transfer]:
    """Those out and those in by their start, the engine's order on the links."""
    n = values._num_positions
    leaving = []
    for move in filter(lambda move: move.dirty, moves):
        value = values.after(move.item, move.use)
        start, end = move.use + 1, move.out_end
        if start == n:
            value, start, end = values._initial(move.item), 0, end - n
        leaving.append(Transfer(value, out_link, values.num_bytes(move.item), start, end))
    yield from sorted(leaving, key=lambda t: (t.start, t.end, t.value))
    coming = [move for move in moves if not move.never_used]
    ordered = []
    for move in coming:
        start, end = move.in_start, move.next_use
        if start >= n:
            value, start, end = values._initial(move.item), start - n, end - n
        else:
            value = values.after(move.item, move.use)
        ordered.append(Transfer(value, back_link, values.num_bytes(move.item), start, end))
    yield from sorted(ordered, key=lambda t: (t.start, t.end, t.value))


def _copies(
    sequence: OperatorSequence, values: _Values, moves: list[_Move], tier: Tier
) -> Iterator[Copy]:
    n = len(sequence.order)
    moves_of: dict[int, list[_Move]] = defaultdict(list)
    for move in moves:
        moves_of[move.item].append(move)
    for item, own in moves_of.items():
        num_bytes = values.num_bytes(item)
        writers = [index for index, move in enumerate(own) if move.dirty]
        if not writers:  # no step changes it
            yield Copy(values._initial(item), tier, num_bytes, 0, n)
            continue
        for index, writer in enumerate(writers):
            move = own[writer]
            around = index + 1 == len(writers)
            readers = own[writer : writers[index + 1]] if not around else own[writer:]
            end = max(reader.next_use for reader in readers) + 1
            if around and sequence.problem.graph.storages[item].persistent and writers[0] > 0:
                end = max(end, own[writers[0] - 1].next_use + n + 1)
            start = move.use + 1
            value = values.after(item, move.use)
            if start == n:
                value, start, end = values._initial(item), 0, end - n
            yield Copy(value, tier, num_bytes, start, min(end, start + n))
