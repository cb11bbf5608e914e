"""Statements of a plan about itself: its times, its lower bound, the proofs of its method.

Statements that follow from the graph, the machine's profile and the budgets are computed again; the
others are returned as claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.errors import InfeasibleError, PlanError
from penstock.graph import StepGraph, operator_seconds
from penstock.planner._plan import Plan
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate
from penstock.planner.bounds import lower_bound, quick_parts

_RELATIVE_TOLERANCE = 1e-6  # of times, which a planner may have added up in another order
# `cut` and `persistent` go over pairs of operators: a tenth of a second for so many.
_FEW_OPERATORS = 2500
_QUICK = ("compute", "cut", "persistent")
_SLOW = ("chain", "remaking", "residency_lp", "segments", "windows")
_SECONDS_FOR_BOUNDS = 600.0


def check_statements(
    graph: StepGraph, parts: StepGraph, plan: Plan, *, bounds: bool
) -> tuple[str, ...]:
    """Compare the statements of a plan with its graph, machine and budgets.

    Args:
        graph: The captured graph.
        parts: The graph of the plan's operators.
        plan: The plan.
        bounds: Whether to solve the linear programs of the bound again.

    Returns:
        Names of statements that were not compared.

    Raises:
        PlanError: A statement is not so.
    """
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
