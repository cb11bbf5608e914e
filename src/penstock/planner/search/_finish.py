"""Small graphs are finished exactly: near the plan that was found, everything is tried.

On a graph of a few operators a byte more or less of fragmentation, or a value that leaves a
boundary later, can cost more than any order; the search counts in larger steps. There all choices
of what leaves when are affordable for one order (`penstock.planner.optima`), so the plan descends
from order to order: one operator elsewhere, one second run more or less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Budget, Plan
from penstock.planner.optima import Limit, fastest_of_order, orders_of, with_more_runs

MAX_OPERATORS = 12
MAX_SECONDS = 2.0  # of the processor


def any_plan(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    reorder: bool,
    recompute: bool,
    deadline: float,
) -> Plan | None:
    """Find a plan of a small graph, whatever its time, among all orders.

    Args:
        graph: The step, of at most `MAX_OPERATORS` operators.
        operator_seconds: Time of each operator.
        budget: Of the device and the host.
        machine: Rates of the links.
        reorder: Whether the order may change.
        recompute: Whether operators may run again; at most two do.
        deadline: Time by `time.monotonic` at which to stop, once the processor had two seconds.

    Returns:
        The first plan found; None if there was none.
    """
    limit = Limit(deadline, least_processor_seconds=time.thread_time() + MAX_SECONDS)
    for order in orders_of(graph, reorder=reorder, max_again=2 if recompute else 0):
        found = fastest_of_order(
            graph, order, operator_seconds, budget, machine, None, limit, is_first_enough=True
        )
        if found is not None or limit.is_over():
            return found
    return None


def finish(
    graph: StepGraph,
    plan: Plan | None,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    reorder: bool,
    recompute: bool,
    limit: Limit,
) -> Plan | None:
    """Improve a plan of a small graph.

    Example:
        >>> finish(graph, plan, operator_seconds=seconds, budget=budget, machine=machine,
        ...        reorder=True, recompute=True, limit=Limit(deadline))  # doctest: +SKIP

    Args:
        graph: The step, of at most `MAX_OPERATORS` operators.
        plan: Where to begin; None: with the program's order.
        operator_seconds: Time of each operator.
        budget: Of the device and the host.
        machine: Rates of the links.
        reorder: Whether the order may change.
        recompute: Whether operators may run again.
        limit: When to stop.

    Returns:
        The best plan found; None if there was none and none was found.
    """
    best = plan
    program = tuple(range(len(graph.operators)))
    starts = [program] if plan is None else [plan.order, program]
    tried: set[tuple[int, ...]] = set()
    while starts:
        before = best
        for start in starts:
            for order in _near(graph, start, reorder=reorder, recompute=recompute):
                if order in tried:
                    continue
                tried.add(order)
                if limit.is_over():
                    return best
                best = fastest_of_order(
                    graph, order, operator_seconds, budget, machine, best, limit
                )
        starts = [] if best is None or best is before else [best.order]
    return best


def _near(
    graph: StepGraph, order: tuple[int, ...], *, reorder: bool, recompute: bool
) -> Iterator[tuple[int, ...]]:
    """The order itself, and what differs from it in one run."""
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
    """Whether first runs are in order and second ones find what they read."""
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
