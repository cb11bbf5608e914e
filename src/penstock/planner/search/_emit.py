"""From a choice, its times and its addresses to placements, transfers and copies.

Objects become values again here: what an operator changes in place is another value afterwards,
and what a step leaves behind has another name in the next. Intervals of the next step count on
beyond the last position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from penstock.graph import StepGraph
from penstock.memory import Link, Tier
from penstock.planner._plan import Placement, Transfer
from penstock.planner.search._engine import OperatorSequence
from penstock.planner.search._residency import Residency
from penstock.planner.search._stays import Move, Stay, chains_of, moves_of, stays_of


def emit(
    residency: Residency, offsets: Sequence[int], links: Sequence[tuple[Link, Link]]
) -> tuple[list[Placement], list[Transfer], dict[int, Tier]]:
    """Turn a choice of the engine into placements, transfers and values that rest below.

    Args:
        residency: The choice, with the times that its addresses allow.
        offsets: Of each chain of stays (`chains_of`).
        links: Out of the device to each tier and back.
    """
    sequence = residency.sequence
    values = _Values(sequence)
    moves = moves_of(residency, residency.replay)
    chains = chains_of(stays_of(sequence, moves))
    placements = [
        placement
        for chain, offset in zip(chains, offsets, strict=True)
        for stay in chain
        for placement in values.placements(stay, offset)
    ]
    transfers = [
        transfer
        for tier, (out_link, back_link) in enumerate(links)
        for transfer in _transfers(values, moves, tier, out_link, back_link)
    ]
    unused = {
        values._initial(move.item): links[move.tier][0].destination
        for move in moves
        if move.never_used
    }
    return placements, transfers, unused


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
    values: _Values, moves: list[Move], tier: int, out_link: Link, back_link: Link
) -> Iterator[Transfer]:
    """Those out and those in by their start, the engine's order on the links."""
    n = values._num_positions
    moves = [move for move in moves if move.tier == tier]
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
