"""From evictions, their times and addresses to a plan: storages become values again.

After an operator has changed a storage in place, it holds another value; what a step leaves has
another name in the next one. Positions of the next step count on beyond the last position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.memory import Link, Tier
from penstock.planner._assemble import assemble
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Placement, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner.search._problem import NO_HOLE
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

    Tiers of the choice are those of the request's `links`, its times those that its addresses
    allow; there is an offset for each chain of parts that reuse each other's place.
    """
    values, links = _Values(choice.sequence), request.links
    placements = [
        placement
        for part in choice.parts()
        for placement in values.placements(part, offsets[part["chain"]])
    ]
    transfers, unused = _transfers(values, choice, links)
    return assemble(
        request,
        choice.sequence.order.tolist(),
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
            for value in operator.makes:
                index = self.graph.storage_of_value[value]
                is_kept = self.graph.storages[index].persistent and value not in operator.creates
                if not (is_kept and sequence.again[position]):  # else the second run leaves it
                    self._changes[index].append((position, value))

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

    def placements(self, part: np.void, offset: int) -> Iterator[Placement]:
        """Yield one placement for each value that the storage holds during a `PART`."""
        num_positions = self.num_positions
        index, begin, end, arrives = (
            int(part[name]) for name in ("object", "start", "end", "arrives")
        )
        storage = self.graph.storages[index]
        is_made = arrives == NO_HOLE and (begin > 0 or storage.initial is None)
        # Where the part goes on in the next step, `final` becomes `initial`.
        boundaries = sorted(
            position + around
            for position, _ in self._changes.get(index, ())
            for around in (0, num_positions)
            if begin <= position + around < end
        )
        points = [*boundaries, end]
        pieces = [*itertools.pairwise(points)]
        if not is_made:  # comes in, perhaps only for the operator that changes it there
            pieces = [(begin, points[0]), *pieces]
        for number, (start, stop) in enumerate(pieces):
            is_given = number == 0 and not is_made
            value = self.after(index, start - 1 if is_given else start)
            if is_given and start == 0:
                value = self.initial(index)
            shift = num_positions if start >= num_positions else 0
            yield Placement(value, offset, storage.num_bytes, start - shift, stop - shift)

    def transfer(self, storage: int, use: int, link: Link, start: int, end: int) -> Transfer:
        """Return the transfer of what a storage holds after a use."""
        value, shift = self.after(storage, use), 0
        if start >= self.num_positions:
            value, shift = self.initial(storage), self.num_positions
        num_bytes = self.graph.storages[storage].num_bytes
        return Transfer(value, link, num_bytes, start - shift, end - shift)


def _transfers(
    values: _Values, choice: EvictionChoice, links: Sequence[tuple[Link, Link]]
) -> tuple[list[Transfer], dict[int, Tier]]:
    """Return transfers by link and start, the engine's order; and tiers of what nothing uses."""
    sequence, unused = choice.sequence, {}
    tiers = np.zeros(len(choice.evicted)) if choice.tier is None else choice.tier
    columns = sequence.hole_object, sequence.hole_start, sequence.hole_end, *choice.windows()
    holes = np.stack([*columns, sequence.dirty(choice.evicted)], axis=1)
    transfers: list[Transfer] = []
    for tier, (out, back) in enumerate(links):
        leaving, returning = [], []
        for storage, use, next_use, out_end, in_start, is_dirty in holes[
            (choice.evicted != 0) & (tiers == tier)
        ].tolist():
            if use < 0:
                unused[values.initial(storage)] = out.destination
                continue
            if is_dirty:
                leaving.append(values.transfer(storage, use, out, use + 1, out_end))
            returning.append(values.transfer(storage, use, back, in_start, next_use))
        for moved in (leaving, returning):
            transfers += sorted(moved, key=lambda t: (t.start, t.end, t.value))
    return transfers, unused
