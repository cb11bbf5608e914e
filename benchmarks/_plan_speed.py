"""How fast the planner is: simulations a second, and what a time limit buys on a large graph.

Expected: 500 simulations a second at 4,000 operators, on one core; 14,000 operators planned within
60 s, with progress on the way; with 300 s a plan that is at least as good.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from _plan_models import CASES, Case
from _rows import BenchmarkRow, Limit, write_rows
from penstock.graph import StepGraph, operator_seconds
from penstock.memory import Link, MachineProfile
from penstock.planner import Found, check, plan
from penstock.planner._request import LinkRates
from penstock.planner.paging import peak_of_program_order
from penstock.planner.search._problem import Problem
from penstock.planner.search._sequence import OperatorSequence

SIMULATED = "gpt2-20"
PLANNED = "gpt2-72"
SIMULATIONS_PER_SECOND = 500
SHARE = 4  # of the peak of the program's own order, what the device has
TIME_LIMITS = (60.0, 300.0)
_NUM_BATCHES = 9


def simulation_row(
    case: Case, graph: StepGraph, machine: MachineProfile, where: Any
) -> BenchmarkRow:
    """Replays of a residency by the engine of the search; a repetition is the mean of a batch."""
    problem = Problem(graph, operator_seconds(graph, machine))
    sequence = OperatorSequence(problem, np.arange(len(graph.operators)))
    capacity = peak_of_program_order(graph) // SHARE
    target = np.maximum(int(capacity * 0.8), sequence.working_set)
    out, back = machine.links[Link.DEVICE_TO_HOST], machine.links[Link.HOST_TO_DEVICE]
    rates = (LinkRates(out.bytes_per_second, back.bytes_per_second),)
    evicted = sequence.evict(target)
    seconds, choosing = [], []
    for _ in range(_NUM_BATCHES):
        began = time.perf_counter()
        for _ in range(100):
            sequence.replay(evicted, capacity, rates)
        seconds.append((time.perf_counter() - began) / 100)
        began = time.perf_counter()
        for _ in range(20):
            sequence.evict(target)
        choosing.append((time.perf_counter() - began) / 20)
    return BenchmarkRow.of(
        seconds,
        topic="plan",
        case=f"simulation of a step, {len(graph.operators):,} operators ({case.title})",
        arm="penstock",
        limit=Limit(name="500 a second", value=1 / SIMULATIONS_PER_SECOND, unit="s"),
        extra={
            "simulations_per_second": 1 / statistics.median(seconds),
            "choose_seconds": statistics.median(choosing),
            "num_evicted": int(evicted.sum()),
        },
        **where,
    )


def planning_row(
    case: Case, graph: StepGraph, machine: MachineProfile, time_limit: float, where: Any
) -> BenchmarkRow:
    """The time that a plan of a large graph takes; the step's own time is in `extra`."""
    progress: list[Found] = []
    began = time.perf_counter()
    found = plan(
        graph,
        device_memory=peak_of_program_order(graph) // SHARE,
        machine=machine,
        host_memory=1 << 40,
        time_limit=time_limit,
        progress=progress.append,
    )
    seconds = time.perf_counter() - began
    check(graph, found)
    return BenchmarkRow.of(
        [seconds],
        topic="plan",
        case=f"planning {len(graph.operators):,} operators ({case.title}; 1/{SHARE} of its peak)",
        arm=f"penstock, {time_limit:.0f} s",
        limit=Limit(name="the time limit", value=time_limit, unit="s"),
        extra={
            "step_seconds": found.step_seconds,
            "ideal_seconds": found.ideal_seconds,
            "gap": found.gap,
            "num_progress": len(progress),
            "first_progress_seconds": progress[0].elapsed_seconds if progress else None,
        },
        **where,
    )


def measure(captured: Any, machine: MachineProfile, where: Any, directory: Path) -> None:
    """All rows of this part.

    Args:
        captured: From a case's name to its graph.
        machine: What is planned for.
        where: `environment()`.
        directory: For the rows.
    """
    rows = [simulation_row(CASES[SIMULATED], captured(SIMULATED), machine, where)]
    print(rows[-1], file=sys.stderr, flush=True)
    write_rows(rows, directory)
    for time_limit in TIME_LIMITS:
        row = planning_row(CASES[PLANNED], captured(PLANNED), machine, time_limit, where)
        print(f"{row}; step {row.extra['step_seconds']:.4g} s", file=sys.stderr, flush=True)
        write_rows([row], directory)
