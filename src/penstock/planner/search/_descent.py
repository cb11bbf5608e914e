"""A descent near the plan of a small graph: all residencies of all orders around it.

On a graph of a few operators a byte more or less of fragmentation, or an eviction a boundary later,
can cost more than any order; the search counts in larger steps. All residencies of one order are
affordable there (`penstock.planner.exact`), so the plan descends from order to order: one operator
elsewhere, one second run more or less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock.graph import StepGraph
from penstock.planner._plan import Plan
from penstock.planner._request import PlanRequest
from penstock.planner.exact import Limit, fastest_of_order, orders_of, with_more_runs

MAX_OPERATORS = 12
MAX_SECONDS = 2.0  # of the processor


def find_any_plan(request: PlanRequest) -> Plan | None:
    """Return the first plan of a small graph that fits, among all orders with two second runs.

    The processor has two seconds beyond the deadline.
    """
    limit = Limit(request.deadline, least_processor_seconds=time.thread_time() + MAX_SECONDS)
    max_again = 2 if request.recompute else 0
    for order in orders_of(request.graph, reorder=request.reorder, max_again=max_again):
        found = fastest_of_order(request, order, None, limit, is_first_enough=True)
        if found is not None or limit.is_over():
            return found
    return None


def descend(request: PlanRequest, plan: Plan | None, *, limit: Limit) -> Plan | None:
    """Improve a plan of a small graph; without one, begin near the program's order.

    `limit` ends the search, in place of the request's deadline.
    """
    graph, best = request.graph, plan
    program = tuple(range(len(graph.operators)))
    starts = [program] if plan is None else [plan.order, program]
    tried: set[tuple[int, ...]] = set()
    while starts:
        before = best
        for start in starts:
            for order in _neighbours(
                graph, start, reorder=request.reorder, recompute=request.recompute
            ):
                if order in tried:
                    continue
                tried.add(order)
                if limit.is_over():
                    return best
                best = fastest_of_order(request, order, best, limit)
        starts = [] if best is None or best is before else [best.order]
    return best


def _neighbours(
    graph: StepGraph, order: tuple[int, ...], *, reorder: bool, recompute: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the order itself, and orders that differ from it in one run."""
    yield order
    for position in range(len(order)):
        without = order[:position] + order[position + 1 :]
        if order[position] in without and _is_valid(graph, without):
            yield without
    if recompute:
        yield from with_more_runs(graph, order, 1)
    if not reorder:
        return
    for position, operator in enumerate(order):
        without = order[:position] + order[position + 1 :]
        for elsewhere in range(len(order)):
            moved = (*without[:elsewhere], operator, *without[elsewhere:])
            if moved != order and _is_valid(graph, moved):
                yield moved


def _is_valid(graph: StepGraph, order: tuple[int, ...]) -> bool:
    """Return whether first runs are in order and operands of second ones are not overwritten."""
    first: dict[int, int] = {}
    for position, operator in enumerate(order):
        first.setdefault(operator, position)
    for position, index in enumerate(order):
        if any(first.get(before, len(order)) >= position for before in graph.predecessors[index]):
            return False
        if first[index] == position:
            continue
        for value in graph.operators[index].reads:
            writers = [i for i in graph.consumers[value] if _overwrites(graph, i, value)]
            if any(first[writer] < position for writer in writers):
                return False
    return True


def _overwrites(graph: StepGraph, index: int, value: int) -> bool:
    return any(old == value for old, _ in graph.operators[index].mutates)
