"""Plans without a search as finalists: paging on demand, by Belady, LRU and LRU with prefetch.

They take the program's own order and compute nothing twice, so they are allowed whatever is frozen.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Bound, Budget, Plan
from penstock.planner.baselines import ON_DEMAND, OnDemand, plan_on_demand, seconds_by_bytes
from penstock.planner.search import toll_of_byte

_logger = logging.getLogger(__name__)

# A plan on demand that takes this many times as long in bytes alone gets no addresses; of short
# steps all do.
_HOPELESS, _FEW_OPERATORS = 1.25, 500


@dataclass(frozen=True)
class ReferenceTask:
    """The arguments of `plan_auto` that paging on demand has as well."""

    graph: StepGraph
    operator_seconds: Sequence[float]
    budget: Budget
    machine: MachineProfile
    seed: int


def fastest_with_references(
    task: ReferenceTask, found: Plan | None, bound: Bound, *, deadline: float
) -> Plan | None:
    """Return a plan, or one on demand for the same budget and machine that is faster.

    Example:
        >>> fastest_with_references(  # doctest: +SKIP
        ...     task, plan, bound, deadline=time.monotonic() + 9
        ... )

    Args:
        task: The step and what it is planned for.
        found: The plan that a search found; None if it found none.
        bound: For the plan that is returned, if it is another one.
        deadline: Time by `time.monotonic` after which nothing more is tried, if there is a plan.

    Returns:
        `found`, or what is faster; `notes["finalist"]` then says which. None if there is none.
    """
    best = found
    for arm in ON_DEMAND:
        left = math.inf if best is None else deadline - time.monotonic()
        if left <= 0:
            break
        try:
            other = _plan_if_worth_it(task, arm, best, left)
        except InfeasibleError:
            continue
        if other is None or (best is not None and _total_seconds(other) >= _total_seconds(best)):
            continue
        _logger.info("paging on demand (%s) is faster than what the search found", arm)
        best = other
    if best is None or best is found:
        return found
    notes = {**(found.notes if found is not None else {}), "finalist": best.method}
    return dataclasses.replace(best, bound=bound, method="auto", notes=notes)


def _plan_if_worth_it(
    task: ReferenceTask, arm: OnDemand, best: Plan | None, seconds_left: float
) -> Plan | None:
    """An arm's plan; None if it cannot be the fastest."""
    began = time.monotonic()
    if best is not None and len(task.graph.operators) > _FEW_OPERATORS:
        seconds = seconds_by_bytes(
            task.graph,
            operator_seconds=task.operator_seconds,
            budget=task.budget,
            machine=task.machine,
            arm=arm,
        )
        if seconds > best.step_seconds * _HOPELESS:
            return None
    return plan_on_demand(
        task.graph,
        operator_seconds=task.operator_seconds,
        budget=task.budget,
        machine=task.machine,
        arm=arm,
        give_up_after=seconds_left - (time.monotonic() - began),
        seed=task.seed,
    )


def _total_seconds(plan: Plan) -> float:
    """Time of a step with what its copies cost computing, which is what the search minimises."""
    moved = plan.bytes_moved.items()
    return plan.step_seconds + sum(
        num_bytes * toll_of_byte(link, plan.machine) for link, num_bytes in moved
    )
