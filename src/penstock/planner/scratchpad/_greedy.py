"""For one order: which buffers leave between two uses, greedily, where no exact answer is in time.

At each step that is too full the bridged gap with the latest end is spilled (Belady), of gaps that
end alike the cheapest; then those spills that turn out not to be needed are taken back, the dearest
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.planner.scratchpad._residency import Gap
from penstock.planner.scratchpad._types import ScratchpadGraph


def spill_greedily(
    graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int], gaps: Sequence[Gap]
) -> set[int]:
    """Return the gaps to spill so that what is there fits its pool at every step of an order.

    Args:
        graph: The program; each operator's own buffers fit.
        pools: The capacity of each pool.
        order: Operators by step.
        gaps: Those of the order (`gaps_of`).
    """
    spilled: set[int] = set()
    for pool, capacity in pools.items():
        load = np.zeros(len(order), dtype=np.int64)
        for step, operator in enumerate(order):
            used = (graph.buffers[b] for b in graph.operators[operator].buffers)
            load[step] = sum(buffer.size for buffer in used if buffer.pool == pool)
        inside = [i for i, gap in enumerate(gaps) if graph.buffers[gap.buffer].pool == pool]
        for index in inside:
            load[gaps[index].start : gaps[index].end] += graph.buffers[gaps[index].buffer].size
        chosen = _until_it_fits(graph, gaps, inside, load, capacity)
        spilled |= _without_needless(graph, gaps, chosen, load, capacity)
    return spilled


def _until_it_fits(
    graph: ScratchpadGraph,
    gaps: Sequence[Gap],
    inside: Sequence[int],
    load: np.ndarray,
    capacity: int,
) -> list[int]:
    starting: dict[int, list[int]] = {}
    for index in inside:
        starting.setdefault(gaps[index].start, []).append(index)
    bridged: list[tuple[int, int, int]] = []  # minus the end, the cost, the gap
    chosen = []
    for step in range(len(load)):
        for index in starting.get(step, ()):
            gap = gaps[index]
            heapq.heappush(bridged, (-gap.end, graph.buffers[gap.buffer].spill_cost, index))
        while load[step] > capacity and bridged and -bridged[0][0] > step:
            index = heapq.heappop(bridged)[2]
            gap = gaps[index]
            load[gap.start : gap.end] -= graph.buffers[gap.buffer].size
            chosen.append(index)
    return chosen


def _without_needless(
    graph: ScratchpadGraph,
    gaps: Sequence[Gap],
    chosen: Sequence[int],
    load: np.ndarray,
    capacity: int,
) -> set[int]:
    spilled = set(chosen)
    for index in sorted(chosen, key=lambda index: -graph.buffers[gaps[index].buffer].spill_cost):
        gap, size = gaps[index], graph.buffers[gaps[index].buffer].size
        if load[gap.start : gap.end].max() + size <= capacity:
            load[gap.start : gap.end] += size
            spilled.discard(index)
    return spilled
