"""Orders that suit a training step: early updates, late gradients of weights, greedy ones.

The first two take the program's own order for everything else: they move all operators of one
weight together, over any distance, where a greedy order weighs operators that are ready one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from penstock.graph import Phase, StepGraph
from penstock.planner.search._problem import GreedyWeights


def move_updates_early(graph: StepGraph) -> np.ndarray:
    """Return the program's order, but with each update as soon as its operands are made.

    The optimizer's state of a parameter then comes and goes while others are computed.
    """
    is_update = [operator.phase is Phase.OPTIMIZER for operator in graph.operators]
    groups = [index if update else None for index, update in enumerate(is_update)]
    return _order_groups(graph, groups)


def move_gradients_late(graph: StepGraph) -> np.ndarray:
    """Return the program's order, but with operators that only one update needs right before it.

    Where a weight is used many times, as in recurrent networks, its gradient is a sum. Its terms
    are put off until all their operands are made, so that the sum, and the weight's state, are on
    the device once and not once for each use.
    """
    groups: list[int | None] = [None] * len(graph.operators)
    followers = _find_followers(graph)
    for index in reversed(range(len(groups))):
        operator = graph.operators[index]
        readers = {reader for value in operator.makes for reader in graph.consumers[value]}
        if not followers[index]:
            groups[index] = index if operator.phase is Phase.OPTIMIZER else None
        elif readers:
            # An update follows all that read the old weight; that alone joins them to no group.
            first = groups[min(readers)]
            if all(groups[other] == first for other in followers[index]):
                groups[index] = first
    return _order_groups(graph, groups)


def _find_followers(graph: StepGraph) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in graph.operators]
    for index, before in enumerate(graph.predecessors):
        for other in set(before):
            followers[other].append(index)
    return followers


def _order_groups(graph: StepGraph, groups: Sequence[int | None]) -> np.ndarray:
    """Run each group in one piece, as soon as it can; it has no followers but its own operators."""
    followers = _find_followers(graph)
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if group is not None:
            members.setdefault(group, []).append(index)
    waiting = [
        sum(group is None or groups[other] != group for other in set(graph.predecessors[index]))
        for index, group in enumerate(groups)
    ]
    # For each group the number of operators of others that it still waits for.
    missing = {group: sum(waiting[index] for index in own) for group, own in members.items()}
    ready = [(False, group) for group, count in missing.items() if not count]
    ready += [(True, i) for i, group in enumerate(groups) if group is None and not waiting[i]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        is_single, index = heapq.heappop(ready)
        ran = [index] if is_single else members[index]
        order += ran
        for done in ran:
            for other in followers[done]:
                group = groups[other]
                if group is None:
                    waiting[other] -= 1
                    if not waiting[other]:
                        heapq.heappush(ready, (True, other))
                elif is_single or group != index:
                    missing[group] -= 1
                    if not missing[group]:
                        heapq.heappush(ready, (False, group))
    return np.array(order, np.int32)


def greedy_weights(capacity: int) -> list[GreedyWeights]:
    """Return weights of greedy orders for an arena; program order decides between equals."""
    late = max(1.0, capacity / 1e5)
    return [
        GreedyWeights(0, 1, 1, late, capacity),
        GreedyWeights(1, 1, 1, late, capacity),
        GreedyWeights(1, 1, 1, late * 100, capacity),
        GreedyWeights(1, 0.5, 1, late, capacity // 2),
        GreedyWeights(1, 0, 1, late * 10, capacity // 2),
        GreedyWeights(1, 0, 0, late * 10, capacity // 4),
        GreedyWeights(4, 1, 1, late, capacity // 2),
        GreedyWeights(0, 1, 1, 0, capacity, 1024),
        GreedyWeights(1, 1, 1, 0, capacity // 2, 1024),
        GreedyWeights(0, 0, 1, late * 1000, capacity),
    ]
