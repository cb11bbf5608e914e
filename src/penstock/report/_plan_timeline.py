"""A plan as a timeline: what its simulation says would happen, in the words of what did happen.

With that a plan is drawn and traced by the same code as a training step that ran. The step is one
of many equal ones: a transfer that goes over its end is shown at its beginning, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.graph import StepGraph
from penstock.memory import Span, Tier, Timeline
from penstock.planner import Copy, Plan, Simulation, simulate


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
        simulation: Of the plan, where it is at hand.
        name_operators: Whether computations have the names of operators; else, of their phases,
            and those of one phase that follow each other are one.

    Returns:
        Computations, transfers and stalls, and the bytes that the plan has on each tier.
    """
    simulation = simulate(graph, plan) if simulation is None else simulation
    spans = [
        *_computations(plan.planned_graph(graph), plan, simulation, name_operators=name_operators)
    ]
    spans += _stalls(simulation)
    spans += _transfers(plan, simulation)
    return Timeline(
        start_ns=0,
        end_ns=_ns(simulation.step_seconds),
        samples=_samples(plan, simulation),
        spans=sorted(spans, key=lambda span: span.start_ns),
    )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _computations(
    graph: StepGraph, plan: Plan, simulation: Simulation, *, name_operators: bool
) -> Iterator[Span]:
    again = set(plan.recomputed)
    open_name, begin, end = "", 0.0, 0.0
    for position, (start, stop) in enumerate(simulation.positions):
        operator = graph.operators[plan.order[position]]
        if name_operators:
            name = f"{operator.name} (again)" if position in again else operator.name
            yield Span("compute", name, _ns(start), _ns(stop))
            continue
        name = "recomputation" if position in again else operator.phase.value
        if name != open_name or start - end > 1e-9:
            if open_name:
                yield Span("compute", open_name, _ns(begin), _ns(end))
            open_name, begin = name, start
        end = stop
    if open_name:
        yield Span("compute", open_name, _ns(begin), _ns(end))


def _stalls(simulation: Simulation) -> Iterator[Span]:
    for stall in simulation.stalls:
        if stall.position < len(simulation.positions):
            until = simulation.positions[stall.position][0]
        else:
            until = simulation.step_seconds
        yield Span("stall", "waits for a transfer", _ns(until - stall.seconds), _ns(until))


def _transfers(plan: Plan, simulation: Simulation) -> Iterator[Span]:
    step = simulation.step_seconds
    for transfer, (start, end) in zip(plan.transfers, simulation.transfers, strict=True):
        shift = start // step * step if step else 0.0
        pieces = [(start - shift, end - shift)]
        while pieces[-1][1] > step > 0:  # it goes on in the next step
            begin, stop = pieces.pop()
            pieces += [(begin, step), (0.0, stop - step)]
        for begin, stop in pieces:
            yield Span(transfer.link.value, "", _ns(begin), _ns(stop), transfer.num_bytes)


def _samples(plan: Plan, simulation: Simulation) -> dict[Tier, list[tuple[int, int]]]:
    starts = [_ns(start) for start, _ in simulation.positions]
    totals = [sum(column) for column in zip(*simulation.memory_bytes.values(), strict=True)]
    samples = {Tier.DEVICE: [(0, totals[0] if totals else 0)]}
    samples[Tier.DEVICE] += _changes(starts, totals)
    for tier in (Tier.HOST, Tier.FILE):
        copies = [copy for copy in plan.copies if copy.tier == tier]
        if copies:
            held = _held(copies, len(plan.order))
            samples[tier] = [(0, held[0]), *_changes(starts, held)]
    return samples


def _changes(starts: list[int], totals: list[int]) -> list[tuple[int, int]]:
    return [
        (starts[position], total)
        for position, total in enumerate(totals)
        if position > 0 and total != totals[position - 1]
    ]


def _held(copies: list[Copy], num_positions: int) -> list[int]:
    """Bytes of copies at each boundary of the step."""
    change = [0] * (num_positions + 1)
    for copy in copies:
        whole = copy.end - copy.start >= num_positions
        start, end = (0, num_positions) if whole else (copy.start, copy.end)
        change[start] += copy.num_bytes
        change[min(end, num_positions)] -= copy.num_bytes
        if end > num_positions:
            change[0] += copy.num_bytes
            change[end - num_positions] -= copy.num_bytes
    held, total = [], 0
    for delta in change[:-1]:
        total += delta
        held.append(total)
    return held
