"""A split of a step: a placement for each storage and a loop axis for each operator, and its costs.

An operator that is split by an axis needs operands split by it, and makes results that are, or
partial sums. Between that and the placement in which a storage rests lie collectives; so bytes
that are exchanged are a sum over pairs of an operator and a storage.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock._lazy import cached_property
from penstock.graph.step_graph import Kind, StepGraph
from penstock.partitioner._fold import Groups
from penstock.partitioner._mesh import (
    PARTIAL,
    REPLICATED,
    Mesh,
    Move,
    Placement,
    find_moves,
    share,
)
from penstock.partitioner.axes import GraphAxes, Use

REPEATED_WORK = 1 / 64
"""Cost of a byte that ranks read or write in repeated work, in bytes exchanged: a device's memory
is about so much faster than its links."""
FORBIDDEN = 1e30

Split = tuple[int, ...]
"""At each level an axis of the operator, `REPLICATED` (all ranks do all of it) or `PARTIAL` (it
runs on partial sums)."""


class Traffic(NamedTuple):
    """Exchange of one operand or result of an operator.

    Attributes:
        moves: Collectives.
        extra_bytes: Memory of a rank for a copy in the placement that the operator has.
    """

    moves: tuple[Move, ...]
    extra_bytes: int


class ExchangeCost(NamedTuple):
    """Exchange of a split step.

    Attributes:
        num_bytes: Bytes that a rank receives.
        weighted_bytes: The same, each as many times as its link is slower than one within a node.
        cost: With the cost of repeated work.
    """

    num_bytes: float
    weighted_bytes: float
    cost: float


class GroupCost(NamedTuple):
    """Costs of a group of operators, of one split and one placement of each of its storages.

    Attributes:
        received: For each move the bytes that a rank receives, and the same weighted.
        work: Cost of repeated work.
        extra_bytes: Memory of a rank beside the storages.
    """

    received: tuple[tuple[float, float], ...]
    work: float
    extra_bytes: int


class GroupUse(NamedTuple):
    """An operand or result of the operators of a group.

    Attributes:
        use: Of the group's first operator.
        owner: Group of its storage.
        form: Number of the use's form, that is of all but its storage and place, and of the
            extents of its storage.
        is_output: Whether it is a result.
    """

    use: Use
    owner: int
    form: int
    is_output: bool


@dataclass(frozen=True)
class StepSplit:
    """Splits of all operators and placements of all storages of a step.

    Attributes:
        mesh: Levels of ranks.
        placements: For each group of storages.
        splits: For each group of operators.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    splits: tuple[Split, ...]


class Model:
    """A step with its axes and groups, and the costs of splits.

    Attributes:
        graph: The step.
        axes: Axes of its operators and storages.
        groups: Operators and storages that are split alike.
        changed: Storages that operators write into.
    """

    def __init__(self, graph: StepGraph, axes: GraphAxes, groups: Groups) -> None:
        self.graph = graph
        self.axes = axes
        self.groups = groups
        self.changed = {
            graph.storage_of_value[old] for each in graph.operators for old, _ in each.mutates
        }
        self.extents = tuple(axes.sizes(storage) for storage in range(len(graph.storages)))
        self.num_bytes = np.array(axes.num_bytes, dtype=np.int64)
        self.first, self.last = find_live_ranges(graph)
        self._group_of_storage = np.array(groups.of_storage, dtype=np.int64)
        self._group_of_operator = np.array(groups.of_operator, dtype=np.int64)
        self._forms: dict[tuple[Use, tuple[int, ...]], int] = {}
        self.uses = [self._find_uses(members[0]) for members in groups.operators]
        self._known_forms = [*self._forms]
        kinds: dict[object, int] = {}
        self._kind_of_form = [
            kinds.setdefault((use.num_bytes, use.blocked, use.halo, extents), form)
            for form, (use, extents) in enumerate(self._known_forms)
        ]
        self._owners = [tuple(use.owner for use in uses) for uses in self.uses]
        self._costs: dict[Mesh, dict[object, GroupCost]] = {}
        self._traffic = functools.cache(self._find_traffic)
        self.table = functools.cache(self._find_table)

    def _find_uses(self, operator: int) -> tuple[GroupUse, ...]:
        """Return the operands and results of an operator; two operands that are one once."""
        axes, found = self.axes.operators[operator], []
        for is_output, uses in ((False, axes.inputs), (True, axes.outputs)):
            for use in dict.fromkeys(uses):
                key = dataclasses.replace(use, storage=0, offset=0), self.extents[use.storage]
                form = self._forms.setdefault(key, len(self._forms))
                owner = self.groups.of_storage[use.storage]
                found.append(GroupUse(use, owner, form, is_output))
        return tuple(found)

    def _find_traffic(
        self, kind: int, own: Placement, split: Split, rest: Placement, mesh: Mesh, is_output: bool
    ) -> Traffic | None:
        """Return the exchange between a placement at rest and an operator's own; None if none can.

        Args:
            kind: Number of a form with the same exchange between the same placements.
            own: The placement in which the operator has it.
            split: Of the operator; `()` where there is no halo.
            rest: The placement at rest.
            mesh: Levels of ranks.
            is_output: Whether it is a result.
        """
        use, extents = self._known_forms[kind]
        held, need = (own, rest) if is_output else (rest, own)
        blocked = frozenset(range(len(extents))) & use.blocked
        moves = find_moves(use.num_bytes, held, need, mesh=mesh, extents=extents, blocked=blocked)
        if moves is None:
            return None
        extra = math.ceil(use.num_bytes * share(own, mesh.sizes)) if moves else 0
        return Traffic((*moves, *_halo(use, split, own, mesh)), extra)

    def traffic(self, use: GroupUse, split: Split, rest: Placement, mesh: Mesh) -> Traffic | None:
        """Return the exchange of an operand or result; None if none can be."""
        kind = self._kind_of_form[use.form]
        return self._traffic(kind, *_own_placement(use, split), rest, mesh, use.is_output)

    def _find_table(
        self,
        form: int,
        splits: tuple[Split, ...],
        placements: tuple[Placement, ...],
        mesh: Mesh,
        is_output: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return for each split and placement the weighted bytes received, and the extra bytes."""
        use = GroupUse(self._known_forms[form][0], 0, form, is_output)
        kind = self._kind_of_form[form]
        costs = np.zeros((len(splits), len(placements)))
        extra = np.zeros_like(costs)
        rows: dict[tuple[Placement, Split], int] = {}
        for i, split in enumerate(splits):
            own, of_halo = place = _own_placement(use, split)
            if (known := rows.setdefault(place, i)) != i:
                costs[i], extra[i] = costs[known], extra[known]
                continue
            for j, placement in enumerate(placements):
                found = self._traffic(kind, own, of_halo, placement, mesh, is_output)
                if found is None:
                    costs[i, j] = FORBIDDEN
                elif found.moves:
                    costs[i, j] = sum(m.num_bytes * mesh.weights[m.level] for m in found.moves)
                    extra[i, j] = found.extra_bytes
        return costs, extra

    @cached_property
    def linearly_read(self) -> set[int]:
        """Storages that an operator may read as partial sums."""
        return {
            use.storage for axes in self.axes.operators if axes.is_linear for use in axes.inputs
        }

    def may_be_partial(self, storage: int) -> bool:
        """Return whether a storage may rest as partial sums."""
        each = self.graph.storages[storage]
        is_made_once = storage not in self.changed and each.initial is None and each.final is None
        return is_made_once and each.kind in (Kind.ACTIVATION, Kind.GRADIENT)

    def live_bytes(self, local_bytes: np.ndarray) -> np.ndarray:
        """Return the bytes of storages that are live at each operator."""
        total = np.zeros(len(self.graph.operators) + 1, dtype=np.int64)
        np.add.at(total, self.first, local_bytes)
        np.subtract.at(total, self.last, local_bytes)
        return np.cumsum(total)[:-1]

    def is_live_before(self, operator: int) -> np.ndarray:
        """Return which storages exist before an operator has made anything, and after it."""
        begins = [each.initial is not None for each in self.graph.storages]
        first = np.where(np.array(begins, dtype=bool), -1, self.first)
        return (first < operator) & (operator < self.last)

    def local_bytes(self, step: StepSplit) -> np.ndarray:
        """Return the bytes of a rank's piece of each storage."""
        sizes = step.mesh.sizes
        pieces = [round(1 / share(placement, sizes)) for placement in step.placements]
        return -(-self.num_bytes // np.array(pieces, dtype=np.int64)[self._group_of_storage])

    def device_bytes(self, step: StepSplit) -> np.ndarray:
        """Return the bytes that a rank needs at each operator."""
        extra = [cost.extra_bytes for cost in self._group_costs(step)]
        total = self.live_bytes(self.local_bytes(step))
        return total + np.array(extra, dtype=np.int64)[self._group_of_operator]

    def _group_costs(self, step: StepSplit) -> Iterator[GroupCost]:
        """Yield the costs of each group of operators, which are counted once: steps are alike."""
        known, placements = self._costs.setdefault(step.mesh, {}), step.placements
        for group, (split, owners) in enumerate(zip(step.splits, self._owners, strict=True)):
            key = group, split, *[placements[owner] for owner in owners]
            if (cost := known.get(key)) is None:
                cost = known[key] = self._count_group(step, group)
            yield cost

    def _count_group(self, step: StepSplit, group: int) -> GroupCost:
        members, split, mesh = self.groups.operators[group], step.splits[group], step.mesh
        received, extra = [], 0
        for _, traffic in self.exchanges(step, group):
            extra += traffic.extra_bytes
            for move in traffic.moves:
                num_bytes = len(members) * move.num_bytes
                received.append((num_bytes, num_bytes * mesh.weights[move.level]))
        workspace = self.graph.operators[members[0]].workspace_bytes
        extra += math.ceil(workspace * share(split, mesh.sizes))
        return GroupCost(tuple(received), self.repeated_work(members, split, mesh), extra)

    def exchanges(self, step: StepSplit, group: int) -> Iterator[tuple[GroupUse, Traffic]]:
        """Yield the operands and results of a group of operators with their exchange."""
        for use in self.uses[group]:
            placement = step.placements[use.owner]
            found = self.traffic(use, step.splits[group], placement, step.mesh)
            assert found is not None, "the search allows only placements that can be reached"
            yield use, found

    def exchange(self, step: StepSplit) -> ExchangeCost:
        """Return the bytes that a rank receives, and what they cost."""
        total, weighted, work = 0.0, 0.0, 0.0
        for cost in self._group_costs(step):
            work += cost.work
            for num_bytes, weighted_bytes in cost.received:
                total += num_bytes
                weighted += weighted_bytes
        return ExchangeCost(total, weighted, weighted + work)

    def repeated_work(self, members: Sequence[int], split: Split, mesh: Mesh) -> float:
        """Return the cost of the work that more than one rank does, in bytes exchanged."""
        operator = self.graph.operators[members[0]]
        touched = len(members) * (operator.bytes_read + operator.bytes_written)
        return REPEATED_WORK * touched * (share(split, mesh.sizes) - 1 / mesh.num_ranks)


def _own_placement(use: GroupUse, split: Split) -> tuple[Placement, Split]:
    """Return the placement in which a split operator has a tensor, and its split if for a halo."""
    find = made_placement if use.is_output else needed_placement
    return find(use.use, split), split if use.use.halo else ()


def needed_placement(use: Use, split: Split) -> Placement:
    """Return the placement in which a split operator reads an operand."""
    return tuple(_axis(use, axis) for axis in split)


def made_placement(use: Use, split: Split) -> Placement:
    """Return the placement in which a split operator makes a result."""
    return tuple(PARTIAL if axis in use.sums else _axis(use, axis) for axis in split)


def _axis(use: Use, axis: int) -> int:
    if axis < 0:
        return axis
    found = use.axis_of_loop[axis]
    return REPLICATED if found is None else found


def _halo(use: Use, split: Split, own: Placement, mesh: Mesh) -> tuple[Move, ...]:
    """Return the exchanges of rows beyond a rank's own."""
    moves = []
    for level, axis in enumerate(split):
        if axis >= 0 and use.halo and use.halo[axis]:
            others = tuple(each for index, each in enumerate(own) if index != level)
            sizes = tuple(each for index, each in enumerate(mesh.sizes) if index != level)
            moves.append(Move(level, "halo", use.num_bytes * use.halo[axis] * share(others, sizes)))
    return tuple(moves)


def find_live_ranges(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return for each storage the first operator at which it is live, and the one after its last.

    Parameters, optimizer state, inputs and results are live before or after their uses.
    """
    num = len(graph.operators)
    first, last = np.full(len(graph.storages), num), np.zeros(len(graph.storages), dtype=np.int64)
    for index, operator in enumerate(graph.operators):
        for value in (*operator.needs, *operator.makes):
            storage = graph.storage_of_value[value]
            first[storage] = min(first[storage], index)
            last[storage] = index + 1
    for index, storage in enumerate(graph.storages):
        if storage.initial is not None:
            first[index] = 0
        if storage.persistent or storage.final is not None:
            last[index] = num
    return np.minimum(first, last), last
