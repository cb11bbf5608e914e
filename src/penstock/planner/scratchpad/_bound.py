"""A lower bound on the cost of a program's spills that holds for every order."""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.planner.scratchpad._residency import INTEGRAL
from penstock.planner.scratchpad._search import find_neighbours
from penstock.planner.scratchpad._types import ScratchpadGraph
from penstock.solvers import LinearProgram

_MOST_OPERATORS = 4000  # of programs that get a bound for all orders
_MOST_CUTS = 48  # operators of which the cheapest cut is found


def bound_all_orders(graph: ScratchpadGraph, pools: Mapping[str, int]) -> int:
    """Return a cost that the spills have at least, in any order.

    While an operator runs, its ancestors have run, its descendants have not, and of every other
    operator either is true: a cut. A buffer that was used before the cut and will be used after it
    is live, and what of that exceeds a pool, beside the operator's own buffers, is outside. The
    linear relaxation over all cuts bounds what that costs at the operator. Each pool has its own
    worst operator, found among those where most is live in any case; buffers of two pools are
    different buffers.
    """
    if len(graph.operators) > _MOST_OPERATORS:
        return 0
    relatives = _find_relatives(graph)
    return sum(_bound_pool(graph, pool, capacity, *relatives) for pool, capacity in pools.items())


def _bound_pool(
    graph: ScratchpadGraph, pool: str, capacity: int, ancestors: list[int], descendants: list[int]
) -> int:
    users: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for b in operator.buffers:
            if graph.buffers[b].pool == pool:
                users.setdefault(b, []).append(index)
    if sum(graph.buffers[b].size for b in users) <= capacity:
        return 0
    masks = {b: sum(1 << op for op in ops) for b, ops in users.items()}
    live = [
        sum(
            graph.buffers[b].size
            for b, mask in masks.items()
            if mask >> op & 1 or (mask & ancestors[op] and mask & descendants[op])
        )
        for op in range(len(graph.operators))
    ]
    program = _CutProgram(graph, capacity, users, ancestors)
    worst = sorted(range(len(live)), key=lambda op: (-live[op], op))[:_MOST_CUTS]
    return max(program.bound(op, ancestors[op], descendants[op]) for op in worst)


class _CutProgram:
    """The cheapest cut of one pool, as a linear program; bounds of its columns fix the operator.

    For each operator o whether it has run, r; for each buffer b whether it is live, l, and how much
    of it is outside, s; all in [0, 1]:

        min  sum_b  cost[b] s[b]
        r[o] >= r[p]                               for each edge from o to p
        l[b] >= s[b]                               for each b
        l[b] >= r[o] - r[p]                        for each first user o and last user p of b
        sum_b  size[b] (l[b] - s[b])  <=  capacity
    """

    def __init__(
        self,
        graph: ScratchpadGraph,
        capacity: int,
        users: dict[int, list[int]],
        ancestors: list[int],
    ) -> None:
        program = self._program = LinearProgram()
        self._users = users
        self._has_run = [program.column(upper=1.0) for _ in graph.operators]
        self._live: list[int] = []
        self._outside: list[int] = []
        for b in users:
            self._live.append(program.column(upper=1.0))
            cost = graph.buffers[b].spill_cost
            self._outside.append(program.column(upper=1.0, cost=cost))
        for before, after in graph.edges:
            program.row([before, after], [1, -1], lower=0)
        for live, outside, ops in zip(self._live, self._outside, users.values(), strict=True):
            program.row([live, outside], [1, -1], lower=0)
            for first, last in _first_and_last(ops, ancestors):
                program.row([live, first, last], [1, -1, 1], lower=0)
        sizes = [graph.buffers[b].size for b in users]
        program.row(
            [*self._live, *self._outside], [*(-size for size in sizes), *sizes], lower=-capacity
        )

    def bound(self, operator: int, ancestors: int, descendants: int) -> int:
        """Return a cost that what is outside while `operator` runs has at least."""
        program = self._program
        for op in self._has_run:
            upper = 0.0 if descendants >> op & 1 else 1.0
            program.set_bounds(op, float(ancestors >> op & 1), upper)
        for live, outside, ops in zip(self._live, self._outside, self._users.values(), strict=True):
            is_own = operator in ops
            program.set_bounds(live, float(is_own), 1.0)
            program.set_bounds(outside, 0.0, 0.0 if is_own else 1.0)
        program.solve(time_limit=math.inf)
        return max(0, math.ceil(program.bound - INTEGRAL)) if program.proved_optimal else 0


def _first_and_last(ops: list[int], ancestors: list[int]) -> list[tuple[int, int]]:
    """Return pairs of users of a buffer, of which some lies across any cut where it is live."""

    def precedes(one: int, other: int) -> bool:
        return bool(ancestors[other] >> one & 1)

    first = [op for op in ops if all(op == other or precedes(op, other) for other in ops)]
    last = [op for op in ops if all(op == other or precedes(other, op) for other in ops)]
    return [(one, other) for one in first or ops for other in last or ops if one != other]


def _find_relatives(graph: ScratchpadGraph) -> tuple[list[int], list[int]]:
    """Return the ancestors and the descendants of each operator, as sets of bits."""
    predecessors, successors = find_neighbours(graph)
    order = graph.topological_order()
    ancestors, descendants = [0] * len(order), [0] * len(order)
    for op in order:
        for before in predecessors[op]:
            ancestors[op] |= ancestors[before] | 1 << before
    for op in reversed(order):
        for after in successors[op]:
            descendants[op] |= descendants[after] | 1 << after
    return ancestors, descendants
