"""The residency of buffers for one order, as an integer program: which holes are spilled.

A hole lies between two uses of a buffer that are not at neighbouring steps: in it the buffer either
stays or is spilled.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.planner.scratchpad._types import ScratchpadGraph
from penstock.solvers import LinearProgram

INTEGRAL = 1e-6  # of the solver's bounds, which are rounded up to whole costs
_RELATIVE_GAP = 1e-4  # so near the bound a choice counts as the best


@dataclasses.dataclass(frozen=True)
class BufferHole:
    """The steps `[start, end)` between two uses of a buffer."""

    buffer: int
    start: int
    end: int


def find_holes(graph: ScratchpadGraph, order: Sequence[int]) -> list[BufferHole]:
    """Return the holes along an order; uses at neighbouring steps have none."""
    last: dict[int, int] = {}
    holes = []
    for step, operator in enumerate(order):
        for buffer in graph.operators[operator].buffers:
            if buffer in last and last[buffer] + 1 < step:
                holes.append(BufferHole(buffer, last[buffer] + 1, step))
            last[buffer] = step
    return holes


def used_bytes(graph: ScratchpadGraph, order: Sequence[int], pool: str) -> np.ndarray:
    """Return what the operator at each step uses of a pool."""
    sizes = [buffer.size if buffer.pool == pool else 0 for buffer in graph.buffers]
    operators = [graph.operators[operator] for operator in order]
    return np.array([sum(sizes[b] for b in operator.buffers) for operator in operators], np.int64)


class ResidencyProgram:
    """The integer program of one order; cuts may be added between solutions.

    COSMA (arXiv 2311.18246) with the order fixed: with S = 1 a hole h is spilled, with P = 1 - S
    its buffer is preserved, and what step t uses is there. For a pool's buffers A and capacity MB:

        min  sum_h  cost[h] S[h]                                                  (COSMA, eq. 12)
        sum_{h over t} size[h] (1 - S[h])  <=  MB - sum_{a in A used at t} size[a]     for each t

    Its linear relaxation is nearly always tight.
    """

    def __init__(
        self, graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int]
    ) -> None:
        self.holes = find_holes(graph, order)
        self._program = LinearProgram()
        for hole in self.holes:
            cost = graph.buffers[hole.buffer].spill_cost
            self._program.column(cost=cost, upper=1.0, integer=True)
        sizes = [graph.buffers[hole.buffer].size for hole in self.holes]
        for columns, least in _rows(graph, pools, order, self.holes).items():
            self._program.row(columns, [sizes[index] for index in columns], lower=least)

    def cut(self, holes: Sequence[int]) -> None:
        """Require at least one of these holes to be spilled."""
        self._program.row(holes, [1.0] * len(holes), lower=1.0)

    def solve(self, time_limit: float) -> tuple[set[int], int] | None:
        """Return the holes to spill and a lower bound on the cost of any choice, or None."""
        if not self.holes:
            return set(), 0
        program = self._program
        program.solve(time_limit=max(time_limit, 0.1), relative_gap=_RELATIVE_GAP)
        if not program.has_solution:
            return None
        bound = max(0, math.ceil(program.bound - INTEGRAL))
        return set(np.flatnonzero(program.values > 0.5).tolist()), bound


def _rows(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    order: Sequence[int],
    holes: Sequence[BufferHole],
) -> dict[tuple[int, ...], int]:
    """Return, by the holes over a step that is too full, how much of them has to be spilled."""
    rows: dict[tuple[int, ...], int] = {}
    for pool, capacity in pools.items():
        load = used_bytes(graph, order, pool)
        crossing: list[list[int]] = [[] for _ in order]
        for index, hole in enumerate(holes):
            buffer = graph.buffers[hole.buffer]
            if buffer.pool != pool:
                continue
            load[hole.start : hole.end] += buffer.size
            for step in range(hole.start, hole.end):
                crossing[step].append(index)
        for step in np.nonzero(load > capacity)[0]:
            key = tuple(crossing[step])
            rows[key] = max(rows.get(key, 0), int(load[step]) - capacity)
    return rows


def spill_greedily(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    order: Sequence[int],
    holes: Sequence[BufferHole],
) -> set[int]:
    """Return the holes of an order to spill so that every step fits; its own buffers do."""
    spilled: set[int] = set()
    for pool, capacity in pools.items():
        load = used_bytes(graph, order, pool)
        inside = [i for i, hole in enumerate(holes) if graph.buffers[hole.buffer].pool == pool]
        for index in inside:
            load[holes[index].start : holes[index].end] += graph.buffers[holes[index].buffer].size
        chosen = _spill_overfull(graph, holes, inside, load, capacity)
        spilled |= _take_back(graph, holes, chosen, load, capacity)
    return spilled


def _spill_overfull(
    graph: ScratchpadGraph,
    holes: Sequence[BufferHole],
    inside: Sequence[int],
    load: np.ndarray,
    capacity: int,
) -> list[int]:
    starting: dict[int, list[int]] = {}
    for index in inside:
        starting.setdefault(holes[index].start, []).append(index)
    kept: list[tuple[int, int, int]] = []  # minus the end, the cost, the hole
    chosen = []
    for step in range(len(load)):
        for index in starting.get(step, ()):
            hole = holes[index]
            heapq.heappush(kept, (-hole.end, graph.buffers[hole.buffer].spill_cost, index))
        while load[step] > capacity and kept and -kept[0][0] > step:
            index = heapq.heappop(kept)[2]
            hole = holes[index]
            load[hole.start : hole.end] -= graph.buffers[hole.buffer].size
            chosen.append(index)
    return chosen


def _take_back(
    graph: ScratchpadGraph,
    holes: Sequence[BufferHole],
    chosen: Sequence[int],
    load: np.ndarray,
    capacity: int,
) -> set[int]:
    spilled = set(chosen)
    for index in sorted(chosen, key=lambda index: -graph.buffers[holes[index].buffer].spill_cost):
        hole, size = holes[index], graph.buffers[holes[index].buffer].size
        if load[hole.start : hole.end].max() + size <= capacity:
            load[hole.start : hole.end] += size
            spilled.discard(index)
    return spilled
