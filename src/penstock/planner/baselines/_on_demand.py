"""What systems without a planner do: swap when memory runs out, in the program's own order.

Three arms to compare with. `"lru"` swaps only when an operator is about to run and what it needs is
missing. `"lru-prefetch"` (the ODSwap baseline of Huang et al., SwapAdvisor, ASPLOS 2020, section 6)
writes the same victims out after their last use and loads ahead. `"belady"` knows the future: it
puts out whoever is needed again the latest (Belady 1966), and loads as early as there is room.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any, Literal

from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Budget, Plan
from penstock.planner.baselines._decisions import (
    Below,
    Found,
    Progress,
    address_rooms,
    assemble,
    device_capacity,
    require_times,
    speeds_of,
)
from penstock.planner.baselines._order import ordered_step
from penstock.planner.baselines._timing import arrange, room_by_bytes
from penstock.planner.baselines._walk import Policy, Pools, walk

OnDemand = Literal["lru", "lru-prefetch", "belady"]

_ATTEMPTS = 7  # to make a residency that has addresses within the budget
_MORE = 0.002  # of the capacity that is given up beyond what the last packing lacked
_CLOSE = 0.02  # of the capacity: what lacks addresses and what has them need not be closer


def plan_on_demand(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    arm: OnDemand = "belady",
    order: Sequence[int] | None = None,
    candidates: Collection[int] | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
    notes: dict[str, Any] | None = None,
    method: str | None = None,
) -> Plan:
    """Plan as a system would behave that swaps on demand.

    Example:
        >>> plan = plan_on_demand(  # doctest: +SKIP
        ...     graph, operator_seconds=seconds, budget=Budget(device_bytes=2**30), machine=machine
        ... )

    Args:
        graph: A captured step.
        operator_seconds: Time of each operator.
        budget: Bytes of the tiers.
        machine: The links' bandwidths.
        arm: Which system.
        order: Operators by position, perhaps some of them repeatedly; the program's own if None.
        candidates: Values that may leave the device; any if None.
        time_limit: Not used: this takes seconds.
        seed: Of the packer.
        progress: Called with what is found before it has addresses.
        notes: For `Plan.notes`.
        method: For `Plan.method`; the arm if None.

    Returns:
        A plan that `check` accepts.

    Raises:
        InfeasibleError: An operator does not fit, or no addresses were found.
    """
    del time_limit
    began = time.monotonic()
    require_times(graph, operator_seconds)
    step = ordered_step(graph, order)
    below = Below.of(machine, budget)
    speeds = speeds_of(below, machine, operator_seconds)
    capacity = budgeted = device_capacity(step, budget)
    idle = () if below is not None else step.idle  # there is nowhere else for them
    candidates = candidates if below is not None else ()
    capacity -= sum(step.num_bytes[value] for value in idle)
    policy: Policy = "belady" if arm == "belady" else "lru"
    lacking, fitting = capacity + 1, None
    for _ in range(_ATTEMPTS):
        residency = walk(step, Pools((capacity,)), policy, candidates=candidates)
        residency = dataclasses.replace(residency, resident=(*residency.resident, *idle))
        arrangement = arrange(
            step,
            residency,
            speeds,
            prefetch=None if arm == "lru" else room_by_bytes(step, residency, capacity),
            early_writes=arm != "lru",
        )
        limit = None if budget.device_bytes is None else budgeted
        offsets, excess = address_rooms(step, residency, arrangement, capacity=limit, seed=seed)
        if excess > 0:
            lacking = capacity
            if fitting is None:
                capacity -= max(excess, int(budgeted * _MORE))
                continue
        else:
            if fitting is None or arrangement.step_seconds < fitting[2].step_seconds:
                fitting = (capacity, residency, arrangement, offsets)
            if progress is not None:
                elapsed = time.monotonic() - began
                progress(Found(elapsed, arrangement.step_seconds, sum(operator_seconds)))
        if limit is None:
            break
        low = max(fitting[0], capacity) if excess <= 0 else fitting[0]
        if lacking - low <= budgeted * _CLOSE:
            break
        capacity = (low + lacking) // 2
    if fitting is None:
        raise _no_addresses(budget)
    _, residency, arrangement, offsets = fitting
    return assemble(
        step,
        residency,
        arrangement,
        offsets,
        operator_seconds=operator_seconds,
        budget=budget,
        machine=machine,
        method=method or arm,
        seed=seed,
        notes={"planning_seconds": time.monotonic() - began, **(notes or {})},
    )


def _no_addresses(budget: Budget) -> Exception:
    from penstock.errors import InfeasibleError

    return InfeasibleError(
        f"no addresses within device_memory={budget.device_bytes} were found for a residency that "
        "fits in bytes: give more, or use method='auto'",
        proved=False,
    )
