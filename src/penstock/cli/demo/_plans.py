"""The planned arms of `penstock demo`: their plans, made once, and the step that runs one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.executor import PlannedStep

DIVISORS = (2, 4, 8)
"""Divisors of the memory that a plan without limits, and so the program itself, needs."""

_NUM_RUNS = 3  # of each operator, to measure its time
_SLACK = 1.02  # the factor on the smallest known budget, if a share is infeasible


def make_plans(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str],
    plan_seconds: float,
) -> None:
    """Capture and measure the step, and plan it for less and less memory, into `directory`."""
    from penstock.errors import InfeasibleError
    from penstock.graph import capture, measure
    from penstock.memory import probe
    from penstock.planner import plan

    graph = measure(capture(model, optimizer, batch), num_runs=_NUM_RUNS)
    graph.save(Path(directory) / "graph.json.gz")
    machine = probe(store)
    full = plan(graph, machine=machine, time_limit=plan_seconds)
    limits = {"store": store, "machine": machine, "time_limit": plan_seconds}
    for divisor in DIVISORS:
        budget = full.peak_device_bytes // divisor
        found = None
        while found is None:
            try:
                found = plan(graph, device_memory=budget, **limits)
            except InfeasibleError as error:
                budget = int(max(error.sufficient_device_bytes or 0, budget) * _SLACK)
        found.save(_find_plan_file(directory, divisor))


class PlannedArm:
    """One of the plans of `make_plans`; loaded before memory is watched, bound afterwards."""

    def __init__(
        self, directory: str | os.PathLike[str], divisor: int, store: str | os.PathLike[str]
    ) -> None:
        from penstock.graph import StepGraph
        from penstock.planner import Plan

        self._graph = StepGraph.load(Path(directory) / "graph.json.gz")
        self._plan = Plan.load(_find_plan_file(directory, divisor))
        self._store = store

    def bind(self, model: Any, optimizer: torch.optim.Optimizer) -> PlannedStep:
        """Bind the plan to a model."""
        from penstock.executor import bind

        return bind(self._plan, model, optimizer, graph=self._graph, store=self._store)


def _find_plan_file(directory: str | os.PathLike[str], divisor: int) -> Path:
    return Path(directory) / f"plan-{divisor}.json"
