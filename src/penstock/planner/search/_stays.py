"""When each object is where: the moves that a choice asks for, and the stays between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

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
        arrives: The gap after which it comes in; -1 if it is made, or given, where it starts, -2 if
            it is always there.
        leaves: The gap in which it leaves; -1 if nobody needs it any more, -2 if it always stays.
        next_stay: The stay that takes over its room where it ends, if any.
    """

    item: int
    start: int
    end: int
    made_at_start: bool = False
    arrives: int = -1
    leaves: int = -1
    next_stay: Stay | None = None
    taken_over: bool = False


@dataclass(slots=True)
class Move:
    """An evicted gap: when the object leaves and comes back."""

    gap: int
    item: int
    tier: int
    use: int  # position of the last use before; -1 if it has none
    next_use: int  # position of the next, beyond the step in the next one
    dirty: bool
    out_end: int
    in_start: int  # beyond the step in the next one, like `next_use`
    never_used: bool = False


def moves_of(residency: Residency, replay: Replay) -> list[Move]:
    """The evicted gaps by object and position, with windows that are in order."""
    sequence, evicted = residency.sequence, residency.evicted
    tiers = np.zeros(len(evicted), np.uint8) if residency.tier is None else residency.tier
    num_positions = len(sequence.order)
    dirty = sequence.dirty(evicted)
    moves = []
    for gap in np.nonzero(evicted)[0].tolist():
        use, next_use = int(sequence.gap_start[gap]), int(sequence.gap_end[gap])
        item, tier = int(sequence.gap_object[gap]), int(tiers[gap])
        if use < 0:
            moves.append(Move(gap, item, tier, use, next_use, False, 0, 0, never_used=True))
            continue
        # The engine counts from the step of the next use.
        in_start = int(replay.in_start[gap])
        if next_use >= num_positions:
            in_start += num_positions
        out_end = int(replay.out_end[gap]) if dirty[gap] else use + 1
        out_end = min(max(out_end, use + 1), next_use)
        in_start = min(max(in_start, out_end), next_use)
        moves.append(Move(gap, item, tier, use, next_use, bool(dirty[gap]), out_end, in_start))
    return moves


def stays_of(sequence: OperatorSequence, moves: list[Move]) -> list[Stay]:
    num_positions = len(sequence.order)
    own: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        own[move.item].append(move)
    problem = sequence.problem
    uses_of = sequence.uses
    stays: list[Stay] = []
    for item, storage in enumerate(problem.graph.storages):
        if not storage.num_bytes:
            continue
        uses = uses_of.get(item, [])
        if storage.persistent:
            stays += _persistent_stays(item, own[item], num_positions)
        else:
            kept = storage.final is not None
            start = 0 if storage.initial is not None else None
            stays += _temporary_stays(item, uses, own[item], start, kept, num_positions)
    _link_handovers(sequence, stays)
    return stays


def _persistent_stays(item: int, moves: list[Move], num_positions: int) -> Iterator[Stay]:
    """From one evicted gap to the next, around the step."""
    if not moves:
        yield Stay(item, 0, num_positions, arrives=-2, leaves=-2)
        return
    if moves[0].never_used:
        return
    for index, move in enumerate(moves):
        following = moves[(index + 1) % len(moves)]
        around = num_positions if index + 1 == len(moves) else 0
        # It comes back for one use and leaves after another.
        start, end = move.in_start, following.out_end + around
        shift = num_positions if start >= num_positions else 0
        yield Stay(item, start - shift, end - shift, arrives=move.gap, leaves=following.gap)


def _temporary_stays(
    item: int,
    uses: list[tuple[int, int]],
    moves: list[Move],
    start: int | None,
    kept: bool,
    num_positions: int,
) -> Iterator[Stay]:
    leaves = {move.use: move for move in moves}
    begin, made, arrives = start, False, -1
    for index, (position, _) in enumerate(uses):
        if begin is None:
            begin, made = position, True
        last = index + 1 == len(uses)
        move = leaves.get(position)
        if move is not None and not (not last and uses[index + 1][0] == position):
            yield Stay(item, begin, move.out_end, made, arrives, move.gap)
            begin, made, arrives = move.in_start, False, move.gap
        elif last or uses[index + 1][1] == CREATE:
            end = num_positions if last and kept else position + 1
            yield Stay(item, begin, end, made, arrives)
            begin, arrives = None, -1


def _link_handovers(sequence: OperatorSequence, stays: list[Stay]) -> None:
    positions = np.flatnonzero(sequence.handed[:, 0] >= 0)
    pairs = sequence.handed[positions].tolist()
    givers, takers = {giver for giver, _ in pairs}, {taker for _, taker in pairs}
    ending = {(stay.item, stay.end): stay for stay in stays if stay.item in givers}
    starting = {(stay.item, stay.start): stay for stay in stays if stay.item in takers}
    for position, (source, target) in zip(positions.tolist(), pairs, strict=True):
        old, new = ending.get((source, position + 1)), starting.get((target, position))
        if old is not None and new is not None:
            old.end = position
            old.next_stay, new.taken_over = new, True


def chains_of(stays: Sequence[Stay]) -> list[list[Stay]]:
    """Stays of which each takes over the room of the one before."""
    chains = []
    for stay in stays:
        if stay.taken_over:
            continue
        chain = [stay]
        while (following := chain[-1].next_stay) is not None:
            chain.append(following)
        chains.append(chain)
    return chains
