"""A plan as a timeline, its simulation in the form of a recorded step, and as a Chrome trace.

So a plan is drawn and traced by the same code as a step that ran. The step is one of many equal
ones: a transfer that goes over its end is shown at its beginning, too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.graph import StepGraph
from penstock.memory import Span, Tier, Timeline
from penstock.planner import Copy, Plan, Simulation, simulate
from penstock.report._trace import chrome_trace, make_counter, write_json


def plan_timeline(
    graph: StepGraph,
    plan: Plan,
    simulation: Simulation | None = None,
    *,
    name_operators: bool = True,
) -> Timeline:
    """Turn a plan into the timeline of one of its steps, from 0 nanoseconds on.

    Example:
        >>> write_chrome_trace(plan_timeline(graph, plan), "plan.json")  # doctest: +SKIP

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        simulation: The simulation of the plan, if it is at hand.
        name_operators: True names computations after operators; False after their phases, and
            joins consecutive ones of one phase.

    Returns:
        Computations, transfers and stalls, and the bytes that the plan has on each tier.
    """
    simulation = simulate(graph, plan) if simulation is None else simulation
    planned = plan.planned_graph(graph)
    spans = _list_computations(planned, plan, simulation, name_operators=name_operators)
    spans += _list_stalls(simulation)
    spans += _list_transfers(plan, simulation)
    return Timeline(
        start_ns=0,
        end_ns=_to_ns(simulation.step_seconds),
        samples=_sample_tiers(plan, simulation),
        spans=sorted(spans, key=lambda span: span.start_ns),
    )


def _to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _list_computations(
    graph: StepGraph, plan: Plan, simulation: Simulation, *, name_operators: bool
) -> list[Span]:
    again = set(plan.recomputed)
    spans: list[Span] = []
    for position, (start, stop) in enumerate(simulation.positions):
        operator = graph.operators[plan.order[position]]
        if name_operators:
            name = f"{operator.name} (again)" if position in again else operator.name
        else:
            name = "recomputation" if position in again else operator.phase.value
        begin = _to_ns(start)
        follows = spans and spans[-1].name == name and begin - spans[-1].end_ns <= 1
        if follows and not name_operators:
            begin = spans.pop().start_ns
        spans.append(Span("compute", name, begin, _to_ns(stop)))
    return spans


def _list_stalls(simulation: Simulation) -> Iterator[Span]:
    for stall in simulation.stalls:
        if stall.position < len(simulation.positions):
            until = simulation.positions[stall.position][0]
        else:
            until = simulation.step_seconds
        yield Span("stall", "waits for a transfer", _to_ns(until - stall.seconds), _to_ns(until))


def _list_transfers(plan: Plan, simulation: Simulation) -> Iterator[Span]:
    step = simulation.step_seconds
    for transfer, (start, end) in zip(plan.transfers, simulation.transfers, strict=True):
        shift = start // step * step if step else 0.0
        parts = [(start - shift, end - shift)]
        while parts[-1][1] > step > 0:  # it goes on in the next step
            begin, stop = parts.pop()
            parts += [(begin, step), (0.0, stop - step)]
        for begin, stop in parts:
            yield Span(transfer.link.value, "", _to_ns(begin), _to_ns(stop), transfer.num_bytes)


def _sample_tiers(plan: Plan, simulation: Simulation) -> dict[Tier, list[tuple[int, int]]]:
    """Return the bytes of each tier after every change, from the beginning of the step on."""
    totals = {Tier.DEVICE: [sum(c) for c in zip(*simulation.memory_bytes.values(), strict=True)]}
    for tier in (Tier.HOST, Tier.FILE):
        copies = [copy for copy in plan.copies if copy.tier == tier]
        if copies:
            totals[tier] = _sum_copies(copies, len(plan.order))
    starts = [0, *(_to_ns(start) for start, _ in simulation.positions[1:])]
    samples = {}
    for tier, column in totals.items():
        changes = zip(starts, column, [None, *column], strict=False)
        samples[tier] = [(start, total) for start, total, before in changes if total != before]
    return samples


def _sum_copies(copies: list[Copy], num_positions: int) -> list[int]:
    """Return the bytes of copies at each position of the step."""
    change = [0] * (2 * num_positions + 1)
    for copy in copies:
        change[copy.start] += copy.num_bytes
        change[min(copy.end, copy.start + num_positions)] -= copy.num_bytes
    held = list(itertools.accumulate(change[:-1]))
    # What is held beyond the end of the step is held at its beginning.
    halves = zip(held[:num_positions], held[num_positions:], strict=True)
    return [now + later for now, later in halves]


def plan_trace(graph: StepGraph, plan: Plan, *, title: str = "Penstock plan") -> dict[str, Any]:
    """Turn a plan into the JSON object that trace viewers open.

    Example:
        >>> plan_trace(graph, plan)["displayTimeUnit"]  # doctest: +SKIP
        'ms'

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        title: The name above the rows.

    Returns:
        A JSON-serialisable object with the key `"traceEvents"`; the counter "device memory" has a
        series for each kind of tensor.
    """
    simulation = simulate(graph, plan)
    trace = chrome_trace(plan_timeline(graph, plan, simulation), title=title)
    kinds = [kind for kind, taken in simulation.memory_bytes.items() if any(taken)]
    before: dict[str, int] | None = None
    for position, (start, _) in enumerate(simulation.positions):
        taken = {kind.value: simulation.memory_bytes[kind][position] for kind in kinds}
        if taken != before:
            event = make_counter("device memory by kind", start * 1e6, taken)
            trace["traceEvents"].append(event)
            before = taken
    trace["otherData"] |= {"method": plan.method, "graph": plan.graph_digest}
    return trace


def write_plan_trace(
    graph: StepGraph,
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    title: str = "Penstock plan",
) -> Path:
    """Write a plan as a Chrome trace; open the file with https://ui.perfetto.dev.

    Example:
        >>> write_plan_trace(graph, plan, "plan.trace.json")  # doctest: +SKIP
        PosixPath('plan.trace.json')

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        path: The file to write, replaced if it exists; missing directories are made.
        title: The name above the rows.

    Returns:
        The path of the file.

    Raises:
        OSError: The file cannot be written.
    """
    return write_json(plan_trace(graph, plan, title=title), path)
