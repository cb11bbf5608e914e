"""The planned arms of `penstock demo`: their plans, made once, and the step that runs one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penstock.executor import PlannedStep

DIVISORS = (2, 4, 8)
"""Of the memory that a plan without limits needs, which is what the program itself does."""

_NUM_RUNS = 3  # of each operator, where their times are measured
_SLACK = 1.02  # where a share is less than anything that was found


def make_plans(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    directory: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str],
    plan_seconds: float,
) -> None:
    """Capture and measure the step, and plan it for less and less memory.

    Args:
        model: The model.
        optimizer: Its optimizer.
        batch: A batch.
        directory: Where the graph and the plans are written.
        store: Where the planned steps will keep what has no room.
        plan_seconds: For each plan.
    """
    from penstock.errors import InfeasibleError
    from penstock.graph import capture, measure
    from penstock.memory import probe
    from penstock.planner import plan

    graph = measure(capture(model, optimizer, batch), num_runs=_NUM_RUNS)
    graph.save(Path(directory) / "graph.json.gz")
    machine = probe(store)
    full = plan(graph, machine=machine, time_limit=plan_seconds)
    for divisor in DIVISORS:
        budget = full.peak_device_bytes // divisor
        found = None
        while found is None:
            try:
                found = plan(
                    graph,
                    device_memory=budget,
                    store=store,
                    machine=machine,
                    time_limit=plan_seconds,
                )
            except InfeasibleError as error:
                budget = int(max(error.sufficient_device_bytes or 0, budget) * _SLACK)
        found.save(_plan_file(directory, divisor))


class PlannedArm:
    """One of the plans; loaded before memory is watched, bound afterwards.

    Args:
        directory: What `make_plans` has filled.
        divisor: Which plan.
        store: Where it keeps what has no room.
    """

    def __init__(
        self, directory: str | os.PathLike[str], divisor: int, store: str | os.PathLike[str]
    ) -> None:
        from penstock.graph import StepGraph
        from penstock.planner import Plan

        self._graph = StepGraph.load(Path(directory) / "graph.json.gz")
        self._plan = Plan.load(_plan_file(directory, divisor))
        self._store = store

    def bind(self, model: Any, optimizer: torch.optim.Optimizer) -> PlannedStep:
        """Make the step of a model."""
        from penstock.executor import bind

        return bind(self._plan, model, optimizer, graph=self._graph, store=self._store)


def _plan_file(directory: str | os.PathLike[str], divisor: int) -> Path:
    return Path(directory) / f"plan-{divisor}.json"
