"""The checker of scratchpad plans: a replay, step by step, independent of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from penstock.errors import PlanError
from penstock.planner.packing import check_overlap
from penstock.planner.scratchpad._types import Residency, ScratchpadGraph, ScratchpadPlan


def check_scratchpad(
    graph: ScratchpadGraph, pools: Mapping[str, int], plan: ScratchpadPlan
) -> None:
    """Raise where a scratchpad plan breaks a rule; return None where it keeps them all.

    The rules, in the order in which they are checked:

    1. `order`: every operator runs exactly once.
    2. `precedence`: the first operator of every edge runs before the second.
    3. `residency`: a residency is of a known buffer, within the plan's steps, and not empty; those
       of one buffer do not overlap in time.
    4. `first use`, `last use`: a buffer's first residency begins with its first use and its last
       one ends with its last use; a buffer that nothing uses has none.
    5. `use`: every buffer that an operator uses is resident while it runs.
    6. `reload`: every residency but the first begins where the buffer is used, and every residency
       but the last ends after a use: nothing moves for nothing.
    7. `capacity`: `0 <= offset` and `offset + size` at most the capacity of the buffer's pool.
    8. `overlap`: two buffers of a pool that are resident at the same step share no address. A
       buffer may come back to another offset than it left; before a step, everything that leaves
       has left before anything comes.
    9. `cost`: each residency of a buffer but its first costs the buffer's `spill_cost`; the plan
       states the sum, and the number.
    10. `bound`: no bound lies above the cost.

    Example:
        >>> check_scratchpad(graph, {"L1": 4096}, scratchpad(graph, {"L1": 4096}))  # doctest: +SKIP

    Args:
        graph: What was planned.
        pools: The capacity of each pool.
        plan: The result of `scratchpad`.

    Raises:
        PlanError: A rule is broken; `rule` is its name and the message says where.
    """
    if sorted(plan.order) != list(range(len(graph.operators))):
        raise PlanError("the order does not run every operator exactly once", rule="order")
    position = {operator: step for step, operator in enumerate(plan.order)}
    residencies = _group_residencies(graph, plan)
    uses: list[list[int]] = [[] for _ in graph.buffers]
    for step, operator in enumerate(plan.order):
        for buffer in graph.operators[operator].buffers:
            uses[buffer].append(step)
    for before, after in graph.edges:
        if position[before] >= position[after]:
            raise PlanError(f"operator {after} runs before operator {before}", rule="precedence")
    for buffer, steps in enumerate(uses):
        _check_residencies(buffer, residencies[buffer], steps)
    _check_addresses(graph, pools, plan)
    _check_cost(graph, plan, residencies)


def _check_cost(
    graph: ScratchpadGraph, plan: ScratchpadPlan, residencies: list[list[Residency]]
) -> None:
    num_spills = sum(max(len(each) - 1, 0) for each in residencies)
    cost = sum(
        max(len(each) - 1, 0) * buffer.spill_cost
        for each, buffer in zip(residencies, graph.buffers, strict=True)
    )
    if (cost, num_spills) != (plan.spill_cost, plan.num_spills):
        raise PlanError(
            f"{num_spills} spills cost {cost}; stated are {plan.num_spills} and {plan.spill_cost}",
            rule="cost",
        )
    if not plan.lower_bound <= plan.order_lower_bound <= cost:
        raise PlanError(
            f"cost {cost}, bound for the order {plan.order_lower_bound}, bound {plan.lower_bound}",
            rule="bound",
        )


def _group_residencies(graph: ScratchpadGraph, plan: ScratchpadPlan) -> list[list[Residency]]:
    """Return the residencies of each buffer, in their order."""
    residencies: list[list[Residency]] = [[] for _ in graph.buffers]
    for residency in plan.residencies:
        if not 0 <= residency.buffer < len(graph.buffers):
            raise PlanError(f"{residency}: no such buffer", rule="residency")
        if not 0 <= residency.start < residency.end <= len(plan.order):
            raise PlanError(f"{residency}: no range of steps", rule="residency")
        residencies[residency.buffer].append(residency)
    for each in residencies:
        each.sort(key=lambda residency: residency.start)
        for earlier, later in itertools.pairwise(each):
            if later.start < earlier.end:
                raise PlanError(f"{earlier} and {later} overlap in time", rule="residency")
    return residencies


def _check_residencies(buffer: int, residencies: list[Residency], steps: list[int]) -> None:
    if (residencies[0].start if residencies else None) != (steps[0] if steps else None):
        raise PlanError(f"buffer {buffer} does not arrive with its first use", rule="first use")
    if residencies and residencies[-1].end != steps[-1] + 1:
        raise PlanError(f"buffer {buffer} does not leave with its last use", rule="last use")
    for step in steps:
        if not any(residency.start <= step < residency.end for residency in residencies):
            raise PlanError(f"buffer {buffer} is used at step {step}, not resident", rule="use")
    used = set(steps)
    for residency in residencies:
        if residency.start not in used or residency.end - 1 not in used:
            raise PlanError(f"{residency}: begins or ends where it is not used", rule="reload")


def _check_addresses(
    graph: ScratchpadGraph, pools: Mapping[str, int], plan: ScratchpadPlan
) -> None:
    for residency in plan.residencies:
        buffer = graph.buffers[residency.buffer]
        if residency.offset < 0 or residency.offset + buffer.size > pools[buffer.pool]:
            raise PlanError(
                f"{residency}: {buffer.size} at {residency.offset} exceeds pool {buffer.pool} of "
                f"{pools[buffer.pool]}",
                rule="capacity",
            )
    for pool in pools:
        inside = [r for r in plan.residencies if graph.buffers[r.buffer].pool == pool]
        check_overlap(
            [
                ((r.start, r.end), r.offset, r.offset + graph.buffers[r.buffer].size, r.buffer)
                for r in inside
            ]
        )
