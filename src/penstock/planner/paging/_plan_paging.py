"""Plans by paging: values are swapped when memory runs out, in the program's own order.

So work systems that do not plan. `"lru"` swaps only when an operator is about to run and its values
are missing. `"lru-prefetch"` (the ODSwap baseline of Huang et al., SwapAdvisor, ASPLOS 2020) writes
the same values after their last use and loads ahead. `"belady"` evicts the value that is used again
the latest (Belady 1966), and loads as early as bytes are free.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner._assemble import assemble
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Found, Placement, Transfer
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.packing import Buffer, pack
from penstock.planner.paging._accesses import OrderedStep, order_step
from penstock.planner.paging._eviction import PagedStep, page_step
from penstock.planner.paging._transfer_times import TransferTimes, time_transfers
from penstock.units import ceil_bytes, format_bytes

PagingPolicy = Literal["lru", "lru-prefetch", "belady"]
PAGING_POLICIES: tuple[PagingPolicy, ...] = ("belady", "lru-prefetch", "lru")

_ATTEMPTS = 7  # to find a paged step that has addresses within the budget
_MORE = 0.002  # of the capacity that is given up beyond what the last packing lacked
_CLOSE = 0.02  # of the capacity: what lacks addresses and what has them need not be closer
PACK_SECONDS = 2.0  # for the addresses of one paged step
_SECONDS_OF_BUFFER = 5e-3  # those that fit were found in a tenth of it; the others take all of it


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
    """Return the bytes for values; more than enough where there is no limit."""
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
                f"{name}={format_bytes(limit)} is too little: the plan of method={plan.method!r} "
                f"keeps {ceil_bytes(peak)} there. Give that, or raise device_memory=",
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


def assign_offsets(
    step: OrderedStep,
    paged: PagedStep,
    times: TransferTimes,
    *,
    capacity: int | None,
    deadline: float,
    seed: int,
) -> tuple[list[int], int]:
    """Pack the allocations of a step, then those that never end; each keeps one address.

    The search for addresses ends at a deadline, by `time.monotonic`, if it takes that long.

    Returns:
        Offsets of `paged.allocations`, `paged.permanent` and `paged.resident`, one after the other,
        and by how many bytes they exceed the capacity: at most 0 if they fit.
    """
    num_positions, unit = step.num_positions, step.alignment
    buffers = [
        _buffer(start, end, allocation.num_bytes, num_positions, unit)
        for allocation, start, end in zip(paged.allocations, times.starts, times.ends, strict=True)
    ]
    lasting = [allocation.num_bytes for allocation in paged.permanent]
    lasting += [step.num_bytes[value] for value in paged.resident]
    buffers += [Buffer(0, num_positions, size, alignment=unit) for size in lasting]
    most = min(PACK_SECONDS, _SECONDS_OF_BUFFER * len(buffers))
    left = min(most, max(deadline - time.monotonic(), 0.0))
    try:
        packing = pack(buffers, capacity=capacity, time_limit=left, seed=seed)
    except InfeasibleError as error:
        return [], max(1, (error.minimum_device_bytes or 0) - (capacity or 0))
    return list(packing.offsets), 0 if capacity is None else packing.height - capacity


def _buffer(start: int, end: int, num_bytes: int, num_positions: int, unit: int) -> Buffer:
    """Return the buffer of an allocation; one across the end of the step has a gap within."""
    shift = start // num_positions * num_positions
    start, end = start - shift, end - shift
    if end - start >= num_positions:
        return Buffer(0, num_positions, num_bytes, alignment=unit)
    if end <= num_positions:
        return Buffer(start, end, num_bytes, alignment=unit)
    gap = (end - num_positions, start)
    return Buffer(0, num_positions, num_bytes, alignment=unit, gaps=(gap,))


def _name(step: OrderedStep, value: int, shift: int) -> int:
    """Return a value by the name that it has a step later (1), or had in the step before (-1)."""
    if shift == 0:
        return value
    table = step.renamed if shift > 0 else {i: f for f, i in step.renamed.items()}
    return table.get(value, value)


def make_placements(
    step: OrderedStep, paged: PagedStep, times: TransferTimes, offsets: Sequence[int]
) -> Iterator[Placement]:
    """Return where the values of a paged step are on the device, and when."""
    num_positions, graph = step.num_positions, step.graph
    num_own, num_permanent = len(paged.allocations), len(paged.permanent)
    spans = [
        *zip(paged.allocations, times.starts, times.ends, strict=True),
        *((a, a.parts[0][1], a.parts[0][1] + num_positions) for a in paged.permanent),
    ]
    for offset, (allocation, first, last) in zip(offsets, spans, strict=False):
        boundaries = [first, *(at for _, at in allocation.parts[1:]), last]
        for index, (value, since) in enumerate(allocation.parts):
            start, end = boundaries[index : index + 2]
            shift = start // num_positions
            yield Placement(
                _name(step, value, shift - since // num_positions),
                offset,
                graph.num_bytes(value),
                start - shift * num_positions,
                end - shift * num_positions,
            )
    for value, offset in zip(paged.resident, offsets[num_own + num_permanent :], strict=True):
        yield Placement(value, offset, graph.num_bytes(value), 0, num_positions)


def make_transfers(
    step: OrderedStep, paged: PagedStep, times: TransferTimes, links: tuple[Link, Link]
) -> list[Transfer]:
    """Return the transfers of a paged step over the links out of the device and back."""
    num_positions = step.num_positions
    transfers = []
    for link, part, timed in ((links[0], -1, times.writes), (links[1], 0, times.loads)):
        of_link = []
        for transfer in timed:
            value, since = paged.allocations[transfer.allocation].parts[part]
            shift = transfer.start // num_positions
            start = transfer.start - shift * num_positions
            end = transfer.end - shift * num_positions
            name = _name(step, value, shift - since // num_positions)
            of_link.append(Transfer(name, link, step.graph.num_bytes(value), start, end))
        transfers += sorted(of_link, key=lambda transfer: transfer.start)
    return transfers
