"""Training as with a checkpoint around every layer: only what layers exchange is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Budget, Plan
from penstock.planner.baselines._on_demand import plan_on_demand
from penstock.planner.baselines._recompute import Recomputation


def plan_checkpointing(
    graph: StepGraph, *, operator_seconds: Sequence[float], machine: MachineProfile
) -> Plan:
    """Plan a step in which nothing moves and every layer runs again for its backward pass.

    Example:
        >>> plan_checkpointing(graph, operator_seconds=seconds,
        ...                    machine=machine).peak_device_bytes  # doctest: +SKIP
        4096

    Args:
        graph: The step.
        operator_seconds: Time of each operator.
        machine: What times are based on.
    """
    recomputation = Recomputation(graph)
    dropped = {saved.value for saved in recomputation.saved() if saved.is_droppable}
    order, _ = recomputation.order_without(dropped)
    plan = plan_on_demand(
        graph, operator_seconds=operator_seconds, budget=Budget(), machine=machine, order=order
    )
    return dataclasses.replace(plan, method="checkpointing")
