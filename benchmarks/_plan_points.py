"""How a model is trained without a plan: as it is, or with a checkpoint around every layer.

Each needs the memory that it needs; these rows are points of the picture of throughput against
memory, not arms of the table.
"""

from __future__ import annotations

from typing import Any

from _plan_arms import CHECKPOINTING, STOCK
from _plan_models import CASES
from _rows import BenchmarkRow
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner import Budget, PlanRequest, check
from penstock.planner.paging import peak_of_program_order, plan_checkpointing


def point_rows(
    name: str, graph: StepGraph, machine: MachineProfile, where: Any
) -> list[BenchmarkRow]:
    """Rows of stock training and of checkpointing, at what each needs of the device."""
    request = PlanRequest(graph=graph, budget=Budget(), machine=machine)
    checkpointed, ideal = plan_checkpointing(request), request.compute_seconds
    check(graph, checkpointed)
    stock = (STOCK, peak_of_program_order(graph), ideal)
    found = (CHECKPOINTING, checkpointed.peak_device_bytes, checkpointed.step_seconds)
    return [
        BenchmarkRow.of(
            [step_seconds],
            topic="plan",
            case=f"{CASES[name].title}; all that it needs, {machine.name}",
            arm=arm,
            peak_bytes={"device": num_bytes},
            extra={
                "model": name,
                "device_bytes": num_bytes,
                "ideal_seconds": ideal,
                "share_of_ideal": ideal / step_seconds,
            },
            **where,
        )
        for arm, num_bytes, step_seconds in (stock, found)
    ]
