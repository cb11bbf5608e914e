"""What systems without a planner do: swap when memory runs out, in the program's own order.

Three arms to compare with. `"lru"` swaps only when an operator is about to run and what it needs is
missing. `"lru-prefetch"` (the ODSwap baseline of Huang et al., SwapAdvisor, ASPLOS 2020, section 6)
writes the same victims out after their last use and loads ahead. `"belady"` knows the future: it
puts out whoever is needed again the latest (Belady 1966), and loads as early as there is room.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from penstock.errors import InfeasibleError
from penstock.planner._plan import Budget, Found, Plan
from penstock.planner._request import PlanRequest
from penstock.planner.paging._accesses import OrderedStep, ordered_step
from penstock.planner.paging._decisions import (
    Below,
    address_rooms,
    assemble,
    device_capacity,
    speeds_of,
)
from penstock.planner.paging._timing import Arrangement, Speeds, arrange, room_by_bytes
from penstock.planner.paging._walk import Policy, Pools, Residency, walk

PagingPolicy = Literal["lru", "lru-prefetch", "belady"]
PAGING_POLICIES: tuple[PagingPolicy, ...] = ("belady", "lru-prefetch", "lru")

_ATTEMPTS = 7  # to make a residency that has addresses within the budget
_MORE = 0.002  # of the capacity that is given up beyond what the last packing lacked
_CLOSE = 0.02  # of the capacity: what lacks addresses and what has them need not be closer


def plan_by_paging(
    request: PlanRequest,
    *,
    policy: PagingPolicy = "belady",
    order: Sequence[int] | None = None,
    candidates: Collection[int] | None = None,
    notes: dict[str, Any] | None = None,
    method: str | None = None,
) -> Plan:
    """Plan as a system would behave that swaps on demand.

    Example:
        >>> plan = plan_by_paging(request)  # doctest: +SKIP

    Args:
        request: The step and what it is planned for. After its deadline no other residency is
            tried, and addresses are searched for no longer. Called with progress is what is found
            before it has addresses.
        policy: Which system.
        order: Operators by position, perhaps some of them repeatedly; the program's own if None.
        candidates: Values that may leave the device; any if None.
        notes: For `Plan.notes`.
        method: For `Plan.method`; the policy if None.

    Returns:
        A plan that `check` accepts.

    Raises:
        InfeasibleError: An operator does not fit, or no addresses were found.
    """
    began = time.monotonic()
    step = ordered_step(request.graph, order)
    below = Below.of(request)
    speeds = speeds_of(request)
    idle = () if below is not None else step.idle  # there is nowhere else for them
    decide = functools.partial(
        _decide,
        step,
        speeds,
        policy=policy,
        candidates=candidates if below is not None else (),
        idle=idle,
    )

    def report(arrangement: Arrangement) -> None:
        if request.progress is not None:
            elapsed = time.monotonic() - began
            request.progress(Found(elapsed, arrangement.step_seconds, request.compute_seconds))

    residency, arrangement, offsets = _with_addresses(
        step,
        decide,
        capacity=device_capacity(step, request.budget),
        idle_bytes=sum(step.num_bytes[value] for value in idle),
        budget=request.budget,
        seed=request.seed,
        deadline=request.deadline,
        report=report,
    )
    return assemble(
        request,
        step,
        residency,
        arrangement,
        offsets,
        method=method or policy,
        notes={"planning_seconds": time.monotonic() - began, **(notes or {})},
    )


def estimate_paging_seconds(request: PlanRequest, *, policy: PagingPolicy) -> float:
    """Return the time of an policy's step if all that fits in bytes had addresses; see its plan.

    Raises:
        InfeasibleError: An operator does not fit.
    """
    step, below, speeds = ordered_step(request.graph), Below.of(request), speeds_of(request)
    idle = () if below is not None else step.idle
    room = device_capacity(step, request.budget) - sum(step.num_bytes[value] for value in idle)
    candidates = None if below is not None else ()
    return _decide(step, speeds, room, policy=policy, candidates=candidates, idle=idle)[
        1
    ].step_seconds


def _decide(
    step: OrderedStep,
    speeds: Speeds,
    capacity: int,
    *,
    policy: PagingPolicy,
    candidates: Collection[int] | None,
    idle: Collection[int],
) -> tuple[Residency, Arrangement]:
    """Who is where when, and when transfers begin and end, in so many bytes."""
    eviction: Policy = "belady" if policy == "belady" else "lru"
    residency = walk(step, Pools((capacity,)), eviction, candidates=candidates)
    residency = dataclasses.replace(residency, resident=(*residency.resident, *idle))
    prefetch = None if policy == "lru" else room_by_bytes(step, residency, capacity)
    arrangement = arrange(step, residency, speeds, prefetch=prefetch, early_writes=policy != "lru")
    return residency, arrangement


def _least_bytes(step: OrderedStep) -> int:
    """Of the operator that needs most."""
    return max(
        (sum(step.num_bytes[v] for v in {*visit.needs, *visit.creates}) for visit in step.visits),
        default=0,
    )


def _with_addresses(
    step: OrderedStep,
    decide: Callable[[int], tuple[Residency, Arrangement]],
    *,
    capacity: int,
    idle_bytes: int,
    budget: Budget,
    seed: int,
    deadline: float,
    report: Callable[[Arrangement], None],
) -> tuple[Residency, Arrangement, list[int]]:
    """The fastest residency that has addresses; it may have to do with fewer bytes than there are.

    Raises:
        InfeasibleError: An operator does not fit, or no addresses were found.
    """
    limit = None if budget.device_bytes is None else capacity
    whole = attempt = capacity - idle_bytes
    # Too few bytes for an operator; too many for addresses.
    starving, lacking = _least_bytes(step) - 1, whole + 1
    enough = -1  # most bytes that had addresses
    fitting: tuple[Residency, Arrangement, list[int]] | None = None
    for _ in range(_ATTEMPTS):
        try:
            residency, arrangement = decide(attempt)
        except InfeasibleError:
            if attempt == whole:
                raise
            starving = attempt
            attempt = (starving + lacking) // 2
            continue
        offsets, excess = address_rooms(
            step, residency, arrangement, capacity=limit, deadline=deadline, seed=seed
        )
        if excess > 0:
            lacking = attempt
        else:
            enough = max(enough, attempt)
            if fitting is None or arrangement.step_seconds < fitting[1].step_seconds:
                fitting = (residency, arrangement, offsets)
            report(arrangement)
        is_close = fitting is not None and lacking - enough <= capacity * _CLOSE
        if limit is None or is_close or time.monotonic() > deadline:
            break
        middle = (max(enough, starving) + lacking) // 2
        less = attempt - max(excess, int(capacity * _MORE))
        attempt = middle if fitting is not None else max(middle, less)
    if fitting is None:
        raise InfeasibleError(
            f"no addresses within device_memory={budget.device_bytes} were found for a residency "
            "that fits in bytes: give more, or use method='auto'",
            proved=False,
        )
    return fitting
