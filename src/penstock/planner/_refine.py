"""Refinement: the same step and budgets, planned again with the times of a run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

from penstock.errors import GraphFileError
from penstock.graph import StepGraph
from penstock.memory import Link, LinkProfile, MachineProfile
from penstock.planner._api import plan_request
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Found, Measured
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate
from penstock.units import parse_seconds


def refine(
    plan: Plan,
    report: Measured,
    graph: StepGraph,
    *,
    time_limit: float = 60,
    progress: Callable[[Found], None] | None = None,
) -> Plan:
    """Plan again for the same budgets and free decisions, with the times that were measured.

    Operators take as long as they did beside the transfers, and links are as fast as they were
    beside the operators, so the new plan's predictions are nearer to the real times.

    Example:
        >>> better = refine(plan, step.report(), graph)  # doctest: +SKIP
        >>> step.close()  # doctest: +SKIP
        >>> step = penstock.bind(better, model, optimizer, graph=graph)  # doctest: +SKIP

    Args:
        plan: The plan that has run.
        report: What `PlannedStep.report` returned after at least two steps.
        graph: The graph that was planned.
        time_limit: Seconds.
        progress: Called with each improvement.

    Returns:
        A plan for the same graph; faster or not, its times are those of this machine.

    Raises:
        GraphFileError: The plan is for another graph.
        ValueError: The report has no times of operators, or is of another plan; or `time_limit` is
            not above 0.
        InfeasibleError: The search found no plan; the old one is still valid.
    """
    time_limit = parse_seconds(time_limit, name="time_limit")
    if graph.digest != plan.graph_digest:
        raise GraphFileError(
            f"this plan is for the graph {plan.graph_digest[:12]} and not for {graph.digest[:12]}"
        )
    parts = plan.planned_graph(graph)
    seconds = _measured_seconds(parts, report)
    request = PlanRequest(
        graph=_with_seconds(graph, parts, seconds),
        budget=plan.budget,
        machine=_with_links(plan.machine, report),
        reorder=plan.bound.reorder,
        recompute=plan.bound.recompute,
        split_products=plan.splits_products,
        seed=plan.seed,
        progress=progress,
    )
    found = plan_request(request.within(time_limit))
    return dataclasses.replace(found, graph_digest=graph.digest)


def as_measured(plan: Plan, report: Measured, graph: StepGraph) -> Plan:
    """Return a plan with the times that were measured, and nothing else changed.

    Its step time is to be compared with that of `refine` for the same times. Its bound is that of
    the old times.

    Args:
        plan: The plan that has run.
        report: What `PlannedStep.report` returned after at least two steps.
        graph: The graph that was planned.

    Raises:
        GraphFileError: The plan is for another graph.
        ValueError: The report has no times of operators, or is of another plan.
    """
    seconds = tuple(each or 0.0 for each in _measured_seconds(plan.planned_graph(graph), report))
    timed = dataclasses.replace(
        plan,
        operator_seconds=seconds,
        ideal_seconds=sum(seconds),
        machine=_with_links(plan.machine, report),
        times="given",
    )
    return dataclasses.replace(timed, step_seconds=simulate(graph, timed).step_seconds)


def _measured_seconds(parts: StepGraph, report: Measured) -> Sequence[float | None]:
    seconds = report.operator_seconds
    if len(seconds) != len(parts.operators) or not any(seconds):
        raise ValueError(
            f"report: it has the times of {len(seconds)} operators and the plan is for "
            f"{len(parts.operators)}; pass the report of a step that this plan has run at least "
            "twice"
        )
    wrong = next((each for each in seconds if each and not 0 < each < math.inf), None)
    if wrong is not None:
        raise ValueError(f"report: an operator takes {wrong} seconds; a time is finite and above 0")
    return seconds


def _with_seconds(graph: StepGraph, parts: StepGraph, seconds: Sequence[float | None]) -> StepGraph:
    """Return the graph with measured times; those of a split operator are summed over its parts."""
    names = {operator.name: index for index, operator in enumerate(graph.operators)}
    total = [0.0] * len(graph.operators)
    for operator, measured in zip(parts.operators, seconds, strict=True):
        name = operator.name
        while name not in names and name:
            name = re.sub(r"(\[[^\[]*|\.[^.]*|.)$", "", name)  # the last suffix of a part
        if name:
            total[names[name]] += measured or 0.0
    operators = tuple(
        dataclasses.replace(operator, seconds=measured)
        for operator, measured in zip(graph.operators, total, strict=True)
    )
    return dataclasses.replace(graph, operators=operators)


def _with_links(machine: MachineProfile, report: Measured) -> MachineProfile:
    links = dict(machine.links)
    for name, rate in report.bytes_per_second.items():
        if rate:
            links[Link(name)] = LinkProfile(rate, (rate, rate), 1)
    return dataclasses.replace(machine, links=links)
