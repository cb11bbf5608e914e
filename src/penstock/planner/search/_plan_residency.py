"""From evictions, their times and addresses to a plan: storages become values again.

After an operator has changed a storage in place, it holds another value; what a step leaves has
another name in the next one. Positions of the next step count on beyond the last position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.memory import Link
from penstock.planner._assemble import assemble
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Placement, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner.search._intervals import (
    EvictedHole,
    StorageInterval,
    chain_intervals,
    cut_into_intervals,
    list_evicted_holes,
)
from penstock.planner.search._residency import EvictionChoice
from penstock.planner.search._sequence import OperatorSequence


def plan_residency(
    request: PlanRequest,
    choice: EvictionChoice,
    offsets: Sequence[int],
    *,
    method: str,
    bound: Bound | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Plan:
    """Turn a choice of evictions with addresses into a plan.

    Args:
        request: The step, and what the plan is for; tiers of the choice are those of its `links`.
        choice: The choice, with the times that its addresses allow.
        offsets: Of each chain of intervals (`chain_intervals`).
        method: As of `assemble`; so are the others.
        bound: Lower bound of the time of a step.
        notes: For `Plan.notes`.
    """
    sequence, links = choice.sequence, request.links
    values = _Values(sequence)
    holes = list_evicted_holes(choice, choice.replay)
    chains = chain_intervals(cut_into_intervals(sequence, holes))
    placements = [
        placement
        for chain, offset in zip(chains, offsets, strict=True)
        for interval in chain
        for placement in values.placements(interval, offset)
    ]
    transfers: list[Transfer] = []
    for tier, tier_links in enumerate(links):
        transfers += _transfers(values, [h for h in holes if h.tier == tier], *tier_links)
    unused = {
        values.initial(hole.storage): links[hole.tier][0].destination
        for hole in holes
        if hole.is_unused
    }
    return assemble(
        request,
        sequence.order.tolist(),
        placements,
        transfers,
        method=method,
        bound=bound,
        notes=notes,
        unused=unused,
    )


class _Values:
    """Values that the storages of a sequence hold before and after each use."""

    def __init__(self, sequence: OperatorSequence) -> None:
        self.graph = sequence.problem.graph
        self.num_positions = len(sequence.order)
        self._changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, index in enumerate(sequence.order.tolist()):
            operator = self.graph.operators[index]
            is_second_run = bool(sequence.again[position])
            for value in operator.creates:
                self._note(value, position)
            for _, new in operator.mutates:
                if not (is_second_run and self._is_persistent(new)):
                    self._note(new, position)

    def _is_persistent(self, value: int) -> bool:
        return self.graph.storages[self.graph.storage_of_value[value]].persistent

    def _note(self, value: int, position: int) -> None:
        self._changes[self.graph.storage_of_value[value]].append((position, value))

    def initial(self, storage: int) -> int:
        """Return the value that a storage holds when the step begins."""
        initial = self.graph.storages[storage].initial
        assert initial is not None
        return initial

    def after(self, storage: int, position: int) -> int:
        """Return the value once the operator at a position has run; the next step counts on."""
        at = position % self.num_positions if position >= 0 else position
        current = self.graph.storages[storage].initial
        for change, value in self._changes.get(storage, ()):
            if change > at:
                break
            current = value
        assert current is not None, "a storage is used before it is made"
        return current

    def placements(self, interval: StorageInterval, offset: int) -> Iterator[Placement]:
        """Yield one placement for each value that the storage holds during the interval."""
        num_positions, storage = self.num_positions, interval.storage
        # Where the interval goes on in the next step, `final` becomes `initial`.
        boundaries = sorted(
            position + around
            for position, _ in self._changes.get(storage, ())
            for around in (0, num_positions)
            if interval.start <= position + around < interval.end
        )
        points = [*boundaries, interval.end]
        pieces = [*itertools.pairwise(points)]
        if not interval.is_made:  # comes in, perhaps only for the operator that changes it there
            pieces = [(interval.start, points[0]), *pieces]
        for number, (start, end) in enumerate(pieces):
            is_made = number > 0 or interval.is_made
            value = self.after(storage, start if is_made else start - 1)
            if not is_made and start == 0:
                value = self.initial(storage)
            shift = num_positions if start >= num_positions else 0
            num_bytes = self.graph.storages[storage].num_bytes
            yield Placement(value, offset, num_bytes, start - shift, end - shift)


def _transfers(
    values: _Values, holes: Sequence[EvictedHole], out_link: Link, back_link: Link
) -> list[Transfer]:
    """Return transfers out, then transfers in, by their start: the engine's order on the links."""
    num_positions = values.num_positions

    def transfer(hole: EvictedHole, link: Link, start: int, end: int) -> Transfer:
        value, shift = values.after(hole.storage, hole.use), 0
        if start >= num_positions:
            value, shift = values.initial(hole.storage), num_positions
        num_bytes = values.graph.storages[hole.storage].num_bytes
        return Transfer(value, link, num_bytes, start - shift, end - shift)

    out = [transfer(hole, out_link, hole.use + 1, hole.out_end) for hole in holes if hole.is_dirty]
    back = [
        transfer(hole, back_link, hole.in_start, hole.next_use)
        for hole in holes
        if not hole.is_unused
    ]
    return [
        *sorted(out, key=lambda t: (t.start, t.end, t.value)),
        *sorted(back, key=lambda t: (t.start, t.end, t.value)),
    ]
