"""Greedy residency for one order, where no exact answer is in time.

At each step that is too full the hole that ends last is spilled (Belady), the cheapest of equals.
Then spills that turn out not to be needed are taken back, the most expensive first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.planner.scratchpad._residency import BufferHole, used_bytes
from penstock.planner.scratchpad._types import ScratchpadGraph


def spill_greedily(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    order: Sequence[int],
    holes: Sequence[BufferHole],
) -> set[int]:
    """Return the holes to spill so that every step of an order fits its pools.

    Args:
        graph: The program; each operator's own buffers fit.
        pools: The capacity of each pool.
        order: Operators by step.
        holes: Those of the order (`find_holes`).
    """
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
