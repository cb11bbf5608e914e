"""The checker of plans: it replays them, and shares nothing with the planners.

First rules that need no replay (`check`), then three steps of memory, boundary by boundary
(`_replay.py`), then the plan's statements about itself (`_statements.py`).
"""

from __future__ import annotations

import math

from penstock.errors import PlanError
from penstock.graph import StepGraph, split
from penstock.memory import Link, Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Copy, Placement, Transfer
from penstock.planner._replay import Replay
from penstock.planner._statements import check_statements


def check(graph: StepGraph, plan: Plan, *, bounds: bool = False) -> tuple[str, ...]:
    """Replay a plan and find the first rule that it breaks.

    Example:
        >>> check(graph, plan)  # doctest: +SKIP
        ('bound.chain', 'bound.remaking')

    Args:
        graph: The step that the plan is for.
        plan: The plan.
        bounds: Whether to compute those parts of the lower bound again that take seconds to
            minutes, the linear programs; else they stay claims.

    Returns:
        Claims: names of statements that were not computed again (the documentation, "Proofs of
        plans", says what a checked plan certifies).

    Raises:
        PlanError: The plan is wrong; `rule` is the name of the rule that it breaks (the
            documentation, "Proofs of plans", lists them).
    """
    parts = _planned_graph(graph, plan)
    _check_order(parts, plan)
    for what, intervals in (("placement", plan.placements), ("copy", plan.copies)):
        for index, interval in enumerate(intervals):
            _check_interval(parts, plan, f"{what} {index}", interval)
    for index, transfer in enumerate(plan.transfers):
        _check_transfer(parts, plan, f"transfer {index}", transfer)
    _check_arena(parts, plan)
    _check_link_order(plan)
    Replay(parts, plan).run()
    return check_statements(graph, parts, plan, bounds=bounds)


def _planned_graph(graph: StepGraph, plan: Plan) -> StepGraph:
    """Return the graph with the plan's operators, if the plan is for this graph at all."""
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for the graph {plan.graph_digest[:12]} and not for {graph.digest[:12]}: "
            "plan this graph",
            rule="graph",
        )
    if plan.split_bytes is not None:
        graph = split(graph, plan.split_bytes)
    if len(plan.operator_seconds) != len(graph.operators):
        raise PlanError(
            f"the plan has times of {len(plan.operator_seconds)} operators; the graph has "
            f"{len(graph.operators)}",
            rule="operators",
        )
    for operator, seconds in enumerate(plan.operator_seconds):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise PlanError(
                f"operator {operator} takes {seconds} seconds in the plan; a time is finite and "
                "not negative",
                rule="operators",
            )
    return graph


def _check_order(graph: StepGraph, plan: Plan) -> None:
    """Check that all operators run, first runs in a valid order, and second runs are allowed."""
    first: dict[int, int] = {}
    for position, operator in enumerate(plan.order):
        if not 0 <= operator < len(graph.operators):
            raise PlanError(
                f"position {position} runs operator {operator}; the graph has "
                f"{len(graph.operators)}",
                rule="operators",
            )
        again = first.setdefault(operator, position) != position
        if again and not graph.operators[operator].recomputable:
            raise PlanError(
                f"position {position} runs {graph.operators[operator].name!r} again, which may "
                "run only once a step",
                rule="recompute",
            )
    for operator in range(len(graph.operators)):
        if operator not in first:
            raise PlanError(
                f"operator {graph.operators[operator].name!r} never runs", rule="operators"
            )
    for operator, earlier in enumerate(graph.predecessors):
        for before in earlier:
            if first[before] > first[operator]:
                raise PlanError(
                    f"{graph.operators[operator].name!r} runs at position {first[operator]}, "
                    f"before {graph.operators[before].name!r} at {first[before]}, which it "
                    "follows",
                    rule="order",
                )


def _check_value(graph: StepGraph, what: str, value: int, num_bytes: int) -> None:
    if not 0 <= value < len(graph.storage_of_value):
        raise PlanError(
            f"{what} is of value {value}; the graph has {len(graph.storage_of_value)}",
            rule="value",
        )
    if num_bytes != graph.num_bytes(value):
        raise PlanError(
            f"{what} has {num_bytes} bytes; value {value} has {graph.num_bytes(value)}",
            rule="bytes",
        )


def _check_interval(graph: StepGraph, plan: Plan, what: str, interval: Placement | Copy) -> None:
    """Check that an interval lies in the cycle; only persistent final values go beyond it."""
    value, num_positions = interval.value, len(plan.order)
    _check_value(graph, what, value, interval.num_bytes)
    shortest = 0 if _is_reused_at_once(graph, plan, interval) else 1
    if not (
        0 <= interval.start < num_positions
        and interval.start + shortest <= interval.end <= interval.start + num_positions
    ):
        raise PlanError(
            f"{what} (value {value}) goes from boundary {interval.start} to {interval.end}: it "
            f"begins within the step, from 0 to {num_positions - 1}, and lasts from one boundary "
            "to a whole step",
            rule="interval",
        )
    storage = graph.storages[graph.storage_of_value[value]]
    if interval.end > num_positions and not (storage.persistent and storage.final == value):
        raise PlanError(
            f"{what} (value {value}) goes on in the next step, which begins without this value",
            rule="interval",
        )


def _is_reused_at_once(graph: StepGraph, plan: Plan, interval: Placement | Copy) -> bool:
    """Return whether a value comes in for an operator that overwrites it, at no own position."""
    if not isinstance(interval, Placement) or not 0 <= interval.start < len(plan.order):
        return False
    operator = graph.operators[plan.order[interval.start]]
    return interval.value in (old for old, _ in operator.mutates + operator.may_overwrite)


def _check_transfer(graph: StepGraph, plan: Plan, what: str, transfer: Transfer) -> None:
    _check_value(graph, what, transfer.value, transfer.num_bytes)
    num_positions = len(plan.order)
    shortest = int(Tier.DEVICE not in (transfer.link.source, transfer.link.destination))
    if not (
        0 <= transfer.start < num_positions
        and transfer.start + shortest <= transfer.end <= transfer.start + num_positions
    ):
        raise PlanError(
            f"{what} (value {transfer.value}, {transfer.link.value}) has from boundary "
            f"{transfer.start} to {transfer.end}: it begins within the step, from 0 to "
            f"{num_positions - 1}, and has at least {shortest} and at most {num_positions} "
            "boundaries",
            rule="window",
        )
    storage = graph.storages[graph.storage_of_value[transfer.value]]
    if transfer.end >= num_positions and not (
        storage.persistent and storage.final == transfer.value
    ):
        raise PlanError(
            f"{what} (value {transfer.value}) ends in the next step, which begins without this "
            "value",
            rule="window",
        )
    if transfer.link not in plan.machine.links:
        raise PlanError(
            f"{what} takes the link {transfer.link.value!r}, which the profile of machine "
            f"{plan.machine.name!r} does not have",
            rule="link",
        )


def _check_arena(graph: StepGraph, plan: Plan) -> None:
    """Check that workspace and placements fit into the budget."""
    workspace_bytes = graph.workspace_bytes
    if plan.workspace_bytes != workspace_bytes:
        raise PlanError(
            f"the plan has {plan.workspace_bytes} bytes of workspace; its operators need "
            f"{workspace_bytes}",
            rule="workspace",
        )
    for index, placement in enumerate(plan.placements):
        if placement.offset < 0:
            raise PlanError(
                f"placement {index} (value {placement.value}) begins at byte {placement.offset}",
                rule="budget",
            )
    budget = plan.budget.device_bytes
    if budget is not None and plan.arena_bytes + workspace_bytes > budget:
        highest = max(plan.placements, key=lambda p: p.offset + p.num_bytes, default=None)
        where = "" if highest is None else f" (value {highest.value} lies highest)"
        raise PlanError(
            f"the arena has {plan.arena_bytes} bytes{where} and the workspace {workspace_bytes}; "
            f"together they exceed the budget of {budget}",
            rule="budget",
        )


def _check_link_order(plan: Plan) -> None:
    """Check that no transfer has to end before an earlier one of its link may begin."""
    begins: dict[Link, tuple[int, int]] = {}
    for index, transfer in enumerate(plan.transfers):
        latest = max(begins.get(transfer.link, (0, index)), (transfer.start, index))
        begins[transfer.link] = latest
        begin, blocker = latest
        if begin > transfer.end:
            raise PlanError(
                f"transfer {index} (value {transfer.value}, {transfer.link.value}) has to be "
                f"finished by boundary {transfer.end} and comes after transfer {blocker}, which "
                f"begins at boundary {begin}",
                rule="link_order",
            )
