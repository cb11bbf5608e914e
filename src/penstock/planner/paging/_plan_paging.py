"""Plans by paging: values are swapped when memory runs out, in the program's own order.

So work systems that do not plan. `"lru"` swaps only when an operator is about to run and its values
are missing. `"lru-prefetch"` (the ODSwap baseline of Huang et al., SwapAdvisor, ASPLOS 2020) writes
the same values after their last use and loads ahead. `"belady"` evicts the value that is used again
the latest (Belady 1966), and loads as early as bytes are free.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner._assemble import assemble
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Found
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.paging._accesses import OrderedStep, order_step
from penstock.planner.paging._eviction import PagedStep, page_step
from penstock.planner.paging._placements import assign_offsets, make_placements, make_transfers
from penstock.planner.paging._transfer_times import TransferTimes, time_transfers

PagingPolicy = Literal["lru", "lru-prefetch", "belady"]
PAGING_POLICIES: tuple[PagingPolicy, ...] = ("belady", "lru-prefetch", "lru")

_ATTEMPTS = 7  # to find a paged step that has addresses within the budget
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
    """Plan by paging.

    Example:
        >>> plan = plan_by_paging(request)  # doctest: +SKIP

    Args:
        request: The step and what it is planned for. After its deadline no other capacity is
            tried, and addresses are searched for no longer. Progress is reported for each step that
            has addresses.
        policy: Which values are evicted, and when they move.
        order: Operators by position, perhaps some of them repeatedly; the program's own if None.
        candidates: Values that may leave the device; any if None.
        notes: For `Plan.notes`.
        method: For `Plan.method`; the policy if None.

    Returns:
        A plan that `check` accepts.

    Raises:
        InfeasibleError: An operator does not fit, or no addresses were found.
    """
    began, paging = time.monotonic(), _Paging.of(request, policy, order, candidates)
    found, links = _find_addresses(paging, began), find_swap_links(request)
    seconds = time.monotonic() - began
    plan = assemble(
        request,
        paging.step.order,
        make_placements(paging.step, found.paged, found.times, found.offsets),
        make_transfers(paging.step, found.paged, found.times, links) if links else (),
        method=method or policy,
        notes={"is_steady": found.paged.is_steady, "planning_seconds": seconds, **(notes or {})},
    )
    require_tiers(plan)
    return plan


def estimate_paging_seconds(request: PlanRequest, *, policy: PagingPolicy) -> float:
    """Return the time of a policy's step if all that fits in bytes had addresses.

    Raises:
        InfeasibleError: An operator does not fit.
    """
    paging = _Paging.of(request, policy, None, None)
    return paging.try_capacity(paging.most_bytes).times.step_seconds


def find_swap_links(request: PlanRequest) -> tuple[Link, Link] | None:
    """Return the links out of the device and back, to the nearest tier below; None without one."""
    present = request.machine.links.keys()
    return next((pair for pair in request.links if set(pair) <= present), None)


def find_swap_rates(request: PlanRequest) -> LinkRates:
    """Return the rates of the links to the tier below; any where there is none."""
    links = find_swap_links(request)
    if links is None:
        return LinkRates(1.0, 1.0)
    out, back = (request.machine.links[link].bytes_per_second for link in links)
    return LinkRates(inward=back, outward=out)


def count_arena_bytes(request: PlanRequest) -> int:
    """Return the bytes for values: the budget without the largest workspace, or more than enough.

    Example:
        >>> count_arena_bytes(request)  # doctest: +SKIP
        1073741824
    """
    if request.arena_bytes is None:
        return sum(storage.num_bytes for storage in request.graph.storages) + (1 << 20)
    return request.arena_bytes


def require_tiers(plan: Plan) -> None:
    """Raise where a plan needs more of the tiers below the device than there is.

    Raises:
        InfeasibleError: The values that leave do not fit the tier below.
    """
    for name, limit, peak in (
        ("host_memory", plan.budget.host_bytes or 0, plan.peak_host_bytes),
        ("store", plan.budget.file_bytes or 0, plan.peak_file_bytes),
    ):
        if peak > limit:
            raise InfeasibleError(
                f"{name}={limit} bytes: the plan of method={plan.method!r} keeps {peak} bytes "
                "there; raise it, or device_memory=",
                proved=False,
            )


@dataclass(frozen=True)
class _Attempt:
    """A paged step with its transfers, and the addresses of its allocations."""

    paged: PagedStep
    times: TransferTimes
    offsets: Sequence[int] = ()


@dataclass(frozen=True)
class _Paging:
    """A step to be paged in as many bytes as there are, or fewer."""

    request: PlanRequest
    policy: PagingPolicy
    step: OrderedStep
    rates: LinkRates
    candidates: Collection[int] | None
    unused: tuple[int, ...]  # values that no operator uses and that have no other place

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        policy: PagingPolicy,
        order: Sequence[int] | None,
        candidates: Collection[int] | None,
    ) -> _Paging:
        step, rates = order_step(request.graph, order), find_swap_rates(request)
        if find_swap_links(request) is None:  # nothing moves
            return cls(request, policy, step, rates, (), step.unused)
        return cls(request, policy, step, rates, candidates, ())

    @property
    def most_bytes(self) -> int:
        """Bytes for values that operators use."""
        return count_arena_bytes(self.request) - sum(self.step.num_bytes[v] for v in self.unused)

    @property
    def least_bytes(self) -> int:
        """Bytes of the operator that needs most."""
        num_bytes = self.step.num_bytes
        return max(
            (sum(num_bytes[v] for v in {*a.needs, *a.creates}) for a in self.step.accesses),
            default=0,
        )

    def try_capacity(self, capacity: int) -> _Attempt:
        """Page the step in so many bytes.

        Raises:
            InfeasibleError: An operator does not fit.
        """
        eviction = "belady" if self.policy == "belady" else "lru"
        paged = page_step(self.step, capacity, eviction, candidates=self.candidates)
        paged = replace(paged, resident=(*paged.resident, *self.unused))
        times = time_transfers(
            self.step,
            paged,
            self.request.operator_seconds,
            self.rates,
            prefetch_bytes=None if self.policy == "lru" else capacity,
        )
        return _Attempt(paged, times)


def _find_addresses(paging: _Paging, began: float) -> _Attempt:
    """Return the fastest step that has addresses; it may have to use fewer bytes than there are.

    Raises:
        InfeasibleError: An operator does not fit, or no addresses were found.
    """
    request, capacity, whole = paging.request, count_arena_bytes(paging.request), paging.most_bytes
    limit = None if request.budget.device_bytes is None else capacity
    # Too few bytes for an operator; too many for addresses; the most that had addresses.
    starving, lacking, enough = paging.least_bytes - 1, whole + 1, -1
    num_bytes, best = whole, None
    for _ in range(_ATTEMPTS):
        try:
            attempt = paging.try_capacity(num_bytes)
        except InfeasibleError:
            if num_bytes == whole:
                raise
            starving = num_bytes
            num_bytes = (starving + lacking) // 2
            continue
        offsets, excess = assign_offsets(
            paging.step,
            attempt.paged,
            attempt.times,
            capacity=limit,
            deadline=request.deadline,
            seed=request.seed,
        )
        seconds = attempt.times.step_seconds
        if excess > 0:
            lacking = num_bytes
        else:
            enough = max(enough, num_bytes)
            if best is None or seconds < best.times.step_seconds:
                best = replace(attempt, offsets=offsets)
            if request.progress is not None:
                elapsed = time.monotonic() - began
                request.progress(Found(elapsed, seconds, request.compute_seconds))
        is_close = best is not None and lacking - enough <= capacity * _CLOSE
        if limit is None or is_close or time.monotonic() > request.deadline:
            break
        middle = (max(enough, starving) + lacking) // 2
        less = num_bytes - max(excess, int(capacity * _MORE))
        num_bytes = middle if best is not None else max(middle, less)
    if best is None:
        raise InfeasibleError(
            f"no addresses within device_memory={request.budget.device_bytes} were found for a "
            "step that fits in bytes: give more, or use method='auto'",
            proved=False,
        )
    return best
