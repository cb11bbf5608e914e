"""The checker of plans: it replays them, and shares nothing with the planners.

First rules that need no replay (`check`), then three steps of memory, boundary by boundary
(`_replay.py`), then the plan's statements about itself, its times, its lower bound and the proofs
of its method: those that follow from the graph, the machine's profile and the budgets are computed
again, the others are returned as claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.errors import InfeasibleError, PlanError
from penstock.graph import StepGraph, operator_seconds, split
from penstock.memory import Link, Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Copy, Placement, Transfer
from penstock.planner._replay import Replay
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate
from penstock.planner.bounds import lower_bound, quick_parts

_RELATIVE_TOLERANCE = 1e-6  # of times, which a planner may have added up in another order
# `cut` and `persistent` go over pairs of operators: a tenth of a second for so many.
_FEW_OPERATORS = 2500
_QUICK = ("compute", "cut", "persistent")
_SLOW = ("chain", "exclusion", "remaking", "residency_lp", "segments", "windows")
_SECONDS_FOR_BOUNDS = 600.0


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
        TypeError: One of the arguments is something else.
    """
    if not (isinstance(graph, StepGraph) and isinstance(plan, Plan)):
        given = f"a {type(graph).__name__} and a {type(plan).__name__}"
        raise TypeError(f"check takes a StepGraph and a Plan for it; got {given}")
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
    return _check_statements(graph, parts, plan, bounds=bounds)


def _planned_graph(graph: StepGraph, plan: Plan) -> StepGraph:
    """Return the graph with the plan's operators, if the plan is for this graph at all."""
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan is for the graph {plan.graph_digest[:12]} and not for {graph.digest[:12]}: "
            "plan this graph",
            rule="graph",
        )
    if plan.split_bytes is not None:
        graph = split(graph, plan.split_bytes, products=plan.splits_products)
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
    shortest = 0 if _is_reused_at_once(graph, plan, interval) else 1
    last = len(plan.order)
    _check_cycle(graph, what, interval, last, last=last, shortest=shortest, rule="interval")


def _check_cycle(
    graph: StepGraph,
    what: str,
    record: Placement | Copy | Transfer,
    num_positions: int,
    *,
    last: int,
    shortest: int,
    rule: str,
) -> None:
    """Check that a record lies in the cycle; only persistent final values go beyond `last`."""
    value, start, end = record.value, record.start, record.end
    _check_value(graph, what, value, record.num_bytes)
    is_inside = 0 <= start < num_positions
    if not (is_inside and start + shortest <= end <= start + num_positions):
        raise PlanError(
            f"{what} (value {value}) goes from boundary {start} to {end}: it begins within the "
            f"step, from 0 to {num_positions - 1}, and lasts from {shortest} to {num_positions} "
            "boundaries",
            rule=rule,
        )
    storage = graph.storages[graph.storage_of_value[value]]
    if end > last and not (storage.persistent and storage.final == value):
        raise PlanError(
            f"{what} (value {value}) goes on in the next step, which begins without this value",
            rule=rule,
        )


def _is_reused_at_once(graph: StepGraph, plan: Plan, interval: Placement | Copy) -> bool:
    """Return whether a value comes in for an operator that overwrites it, at no own position."""
    if not isinstance(interval, Placement) or not 0 <= interval.start < len(plan.order):
        return False
    operator = graph.operators[plan.order[interval.start]]
    return interval.value in (old for old, _ in operator.mutates + operator.may_overwrite)


def _check_transfer(graph: StepGraph, plan: Plan, what: str, transfer: Transfer) -> None:
    num_positions = len(plan.order)
    shortest = int(Tier.DEVICE not in (transfer.link.source, transfer.link.destination))
    last = num_positions - 1
    _check_cycle(graph, what, transfer, num_positions, last=last, shortest=shortest, rule="window")
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


def _check_statements(
    graph: StepGraph, parts: StepGraph, plan: Plan, *, bounds: bool
) -> tuple[str, ...]:
    """Compare what a plan states with its graph, machine and budgets; return its claims."""
    simulated = simulate(graph, plan).step_seconds
    for name, stated, true in (
        ("step_seconds", plan.step_seconds, simulated),
        ("ideal_seconds", plan.ideal_seconds, sum(plan.operator_seconds)),
    ):
        if not _is_same(stated, true):
            raise PlanError(f"the plan states {name} {stated}; it is {true}", rule=name)
    claims = [*_claimed_times(parts, plan)]
    _check_bound(plan)
    claims += _claimed_bounds(parts, plan, bounds=bounds)
    claims += _claimed_notes(plan)
    return tuple(claims)


def _is_same(stated: float, true: float) -> bool:
    return math.isclose(stated, true, rel_tol=_RELATIVE_TOLERANCE)


def _claimed_times(parts: StepGraph, plan: Plan) -> Iterator[str]:
    """Compare times of operators with the graph's, or a roofline of the plan's machine."""
    if plan.times not in ("graph", "given"):
        raise PlanError(f"times={plan.times!r} is none of 'graph', 'given'", rule="times")
    if plan.times == "given":
        yield "operator_seconds"
        return
    try:
        expected = operator_seconds(parts, plan.machine)
    except ValueError as error:
        raise PlanError(f"the plan's times are no roofline: {error}", rule="times") from error
    for operator, (stated, true) in enumerate(zip(plan.operator_seconds, expected, strict=True)):
        if not _is_same(stated, true):
            raise PlanError(
                f"operator {parts.operators[operator].name!r} takes {stated} seconds in the plan; "
                f"by its graph and the machine {plan.machine.name!r} it takes {true}",
                rule="times",
            )


def _check_bound(plan: Plan) -> None:
    """Check that the bound is the largest of its parts, and below the time of the step."""
    bound = plan.bound
    unknown = [name for name in bound.seconds_of if name not in (*_QUICK, *_SLOW)]
    if unknown or "compute" not in bound.seconds_of:
        raise PlanError(
            f"the lower bound has the parts {list(bound.seconds_of)}: "
            + (f"{unknown[0]!r} is none" if unknown else "'compute' is missing"),
            rule="lower_bound",
        )
    largest = max(bound.seconds_of.values())
    if not _is_same(bound.seconds, largest):
        raise PlanError(
            f"the lower bound of {bound.seconds} seconds is not the largest of its parts "
            f"{dict(bound.seconds_of)}",
            rule="lower_bound",
        )
    if bound.seconds_of.get(bound.binding) != largest:
        raise PlanError(
            f"the lower bound is said to come from {bound.binding!r}, which is not the largest of "
            f"its parts {dict(bound.seconds_of)}",
            rule="lower_bound",
        )
    if not bound.seconds <= plan.step_seconds * (1 + _RELATIVE_TOLERANCE):
        raise PlanError(
            f"the lower bound of {bound.seconds} seconds is above the step's "
            f"{plan.step_seconds}: one of them is wrong",
            rule="lower_bound",
        )
    first_runs = list(dict.fromkeys(plan.order))
    for holds, what in (
        (bound.reorder or first_runs == sorted(first_runs), "for the program's own order only"),
        (bound.recompute or not plan.recomputed, "for plans that run nothing again only"),
    ):
        if not holds:
            raise PlanError(f"the lower bound holds {what}; this is another", rule="lower_bound")


def _claimed_bounds(parts: StepGraph, plan: Plan, *, bounds: bool) -> Iterator[str]:
    """Compute the parts of the bound again, the quick ones always."""
    bound, is_small = plan.bound, len(parts.operators) <= _FEW_OPERATORS
    request = PlanRequest(
        graph=parts,
        budget=plan.budget,
        machine=plan.machine,
        operator_seconds=plan.operator_seconds,
        reorder=bound.reorder,
        recompute=bound.recompute,
    )
    if bounds:
        try:
            true = lower_bound(request.within(_SECONDS_FOR_BOUNDS)).seconds_of
        except InfeasibleError as error:
            raise PlanError(f"no plan fits this budget: {error}", rule="lower_bound") from error
    elif is_small and bound.seconds_of.keys() & {"cut", "persistent"}:
        true = quick_parts(request)
    else:
        true = {"compute": sum(plan.operator_seconds)}
    for name, stated in bound.seconds_of.items():
        is_known = name in true or bounds or (name in _QUICK and is_small)
        if not is_known and plan.budget.device_bytes is not None:
            yield f"bound.{name}"
            continue
        found = true.get(name, 0.0)
        # More time may have given a linear program more slots, and so a higher bound.
        is_right = stated <= found * (1 + _RELATIVE_TOLERANCE)
        if name in _QUICK:
            is_right = _is_same(stated, found)
        if not is_right:
            raise PlanError(
                f"the lower bound {name!r} is stated as {stated} seconds; it is {found}",
                rule="lower_bound",
            )


def _claimed_notes(plan: Plan) -> Iterator[str]:
    """Check the exact planner's notes: bytes that move, and whether they are proved the least."""
    keys = ("non_compulsory_bytes", "lower_bound_bytes", "proved")
    stated = [plan.notes.get(key) for key in keys]
    if plan.method != "exact":
        if "proved" in plan.notes:
            raise PlanError(f"method={plan.method!r} proves nothing in its notes", rule="notes")
        return
    moved = sum(plan.bytes_moved.values())
    traffic, least, proved = stated
    if type(least) is not int or type(proved) is not bool or traffic != moved:
        raise PlanError(
            f"the notes of an exact plan state {dict(zip(keys, stated, strict=True))}; it moves "
            f"{moved} bytes",
            rule="notes",
        )
    if not 0 <= least <= moved or (proved and least != moved):
        raise PlanError(
            f"the notes state {moved} bytes moved, {least} at least and proved={proved}, which "
            "cannot all be so",
            rule="notes",
        )
    if least:
        yield "notes.lower_bound_bytes"
