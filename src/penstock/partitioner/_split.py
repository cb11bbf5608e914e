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


@dataclass(frozen=True)
class StepSplit:
    """Splits of all operators and placements of all storages of a step.

    Attributes:
        mesh: Levels of ranks.
        placements: For each storage.
        splits: For each operator.
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
        self.num_bytes = np.array([each.num_bytes for each in graph.storages], dtype=np.int64)
        self.first, self.last = _live_ranges(graph)
        self._form = functools.cache(_form_of)
        self._traffic = functools.cache(_find_traffic)
        self._table = functools.cache(_find_table)

    def traffic(
        self, use: Use, split: Split, placement: Placement, mesh: Mesh, *, is_output: bool
    ) -> Traffic | None:
        """Return the exchange between a storage's placement and an operator's; None if none can."""
        extents = self.extents[use.storage]
        form = self._form(use)
        return self._traffic(form, split, placement, mesh, extents, is_output=is_output)

    def table(
        self,
        use: Use,
        splits: tuple[Split, ...],
        placements: tuple[Placement, ...],
        mesh: Mesh,
        *,
        is_output: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return for each split and placement the weighted bytes received, and the extra bytes."""
        extents = self.extents[use.storage]
        return self._table(self._form(use), splits, placements, mesh, extents, is_output=is_output)

    @functools.cached_property
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

    def local_bytes(self, step: StepSplit) -> np.ndarray:
        """Return the bytes of a rank's piece of each storage."""
        sizes = step.mesh.sizes
        pieces = [1 / share(placement, sizes) for placement in step.placements]
        return -(-self.num_bytes // np.rint(pieces).astype(np.int64))

    def device_bytes(self, step: StepSplit) -> np.ndarray:
        """Return the bytes that a rank needs at each operator."""
        extra = [self._extra_bytes(step, members[0]) for members in self.groups.operators]
        total = self.live_bytes(self.local_bytes(step))
        return total + np.array([extra[group] for group in self.groups.of_operator], dtype=np.int64)

    def _extra_bytes(self, step: StepSplit, operator: int) -> int:
        workspace = self.graph.operators[operator].workspace_bytes
        found = math.ceil(workspace * share(step.splits[operator], step.mesh.sizes))
        return found + sum(traffic.extra_bytes for _, traffic, _ in self.exchanges(step, operator))

    def exchanges(self, step: StepSplit, operator: int) -> Iterator[tuple[Use, Traffic, bool]]:
        """Yield the operands and results of an operator with their exchange, and if they are
        results.
        """
        axes, split = self.axes.operators[operator], step.splits[operator]
        seen = set()
        for is_output, uses in ((False, axes.inputs), (True, axes.outputs)):
            for use in uses:
                key = use, is_output
                if key in seen:  # two operands that are one are fetched once
                    continue
                seen.add(key)
                placement = step.placements[use.storage]
                found = self.traffic(use, split, placement, step.mesh, is_output=is_output)
                assert found is not None, "the search allows only placements that can be reached"
                yield use, found, is_output

    def exchanged_bytes(self, step: StepSplit) -> tuple[float, float]:
        """Return the bytes that a rank receives; and weighted by links, with repeated work."""
        total, weighted = 0.0, 0.0
        for members in self.groups.operators:
            weighted += self.repeated_work(members, step.splits[members[0]], step.mesh)
            for _, traffic, _ in self.exchanges(step, members[0]):
                for move in traffic.moves:
                    total += len(members) * move.num_bytes
                    weighted += len(members) * move.num_bytes * step.mesh.weights[move.level]
        return total, weighted

    def repeated_work(self, members: Sequence[int], split: Split, mesh: Mesh) -> float:
        """Return the cost of the work that more than one rank does, in bytes exchanged."""
        operator = self.graph.operators[members[0]]
        touched = len(members) * (operator.bytes_read + operator.bytes_written)
        return REPEATED_WORK * touched * (share(split, mesh.sizes) - 1 / mesh.num_ranks)


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


def _form_of(use: Use) -> Use:
    return dataclasses.replace(use, storage=0, offset=0)


def _find_table(
    use: Use,
    splits: tuple[Split, ...],
    placements: tuple[Placement, ...],
    mesh: Mesh,
    extents: tuple[int, ...],
    *,
    is_output: bool,
) -> tuple[np.ndarray, np.ndarray]:
    costs = np.zeros((len(splits), len(placements)))
    extra = np.zeros_like(costs)
    for i, split in enumerate(splits):
        for j, placement in enumerate(placements):
            found = _find_traffic(use, split, placement, mesh, extents, is_output=is_output)
            if found is None:
                costs[i, j] = FORBIDDEN
            else:
                costs[i, j] = sum(m.num_bytes * mesh.weights[m.level] for m in found.moves)
                extra[i, j] = found.extra_bytes
    return costs, extra


def _find_traffic(
    use: Use,
    split: Split,
    placement: Placement,
    mesh: Mesh,
    extents: tuple[int, ...],
    *,
    is_output: bool,
) -> Traffic | None:
    own = made_placement(use, split) if is_output else needed_placement(use, split)
    held, need = (own, placement) if is_output else (placement, own)
    blocked = frozenset(range(len(extents))) & use.blocked
    moves = find_moves(use.num_bytes, held, need, mesh=mesh, extents=extents, blocked=blocked)
    if moves is None:
        return None
    extra = math.ceil(use.num_bytes * share(own, mesh.sizes)) if moves else 0
    return Traffic((*moves, *_halo(use, split, own, mesh)), extra)


def _halo(use: Use, split: Split, own: Placement, mesh: Mesh) -> tuple[Move, ...]:
    """Return the exchanges of rows beyond a rank's own."""
    moves = []
    for level, axis in enumerate(split):
        if axis >= 0 and use.halo and use.halo[axis]:
            others = tuple(each for index, each in enumerate(own) if index != level)
            sizes = tuple(each for index, each in enumerate(mesh.sizes) if index != level)
            moves.append(Move(level, "halo", use.num_bytes * use.halo[axis] * share(others, sizes)))
    return tuple(moves)


def _live_ranges(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
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
