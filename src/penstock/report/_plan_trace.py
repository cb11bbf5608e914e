"""A plan as a Chrome trace: every operator, every transfer, and memory by kind of tensor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.graph import StepGraph
from penstock.planner import Plan, simulate
from penstock.report._plan_timeline import plan_timeline
from penstock.report._trace import chrome_trace, write_json


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
    process = trace["traceEvents"][0]["pid"]
    kinds = [kind for kind, taken in simulation.memory_bytes.items() if any(taken)]
    before: dict[str, int] | None = None
    for position, (start, _) in enumerate(simulation.positions):
        taken = {kind.value: simulation.memory_bytes[kind][position] for kind in kinds}
        if taken != before:
            trace["traceEvents"].append(
                {
                    "ph": "C",
                    "name": "device memory by kind",
                    "pid": process,
                    "ts": start * 1e6,
                    "args": taken,
                }
            )
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
