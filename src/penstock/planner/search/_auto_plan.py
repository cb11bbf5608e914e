"""From a request to a finished plan: search, offsets, times, bound.

The search counts bytes; offsets come afterwards. Where the packer needs more than the arena has,
evictions are chosen again for a little less, so fragmentation costs some transfers and never the
plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock._lazy import cached_property
from penstock.codegen import why_nothing_can_be_built
from penstock.errors import InfeasibleError
from penstock.graph import alignment_bytes, least_alignment_bytes
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Found
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.bounds import WorkingSet, working_set
from penstock.planner.exact import Limit
from penstock.planner.search._auto import AutoSearch, frozen_decisions
from penstock.planner.search._descent import MAX_OPERATORS, MAX_SECONDS, descend, find_any_plan
from penstock.planner.search._finalists import find_offsets, offsets_of_fastest
from penstock.planner.search._offsets import sufficient_bytes
from penstock.planner.search._plan_residency import plan_residency
from penstock.planner.search._problem import Problem, load_engine
from penstock.planner.search._residency import Arena, EvictionChoice, LowerTiers, ResidencySearch
from penstock.planner.search._sequence import OperatorSequence
from penstock.units import ceil_bytes, format_bytes

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
_SEARCH_SHARE = 0.65  # of the time; the rest is for offsets
# Time that offsets take, some ten times over all intervals, on a machine that others use as well.
_OFFSET_SECONDS_PER_OPERATOR = 1.5e-3
_SECONDS_AFTER_CTRL_C = 5.0  # for offsets, where the search was stopped by hand
# Time of operators on two cores that moving a byte costs, in copies of it by one thread: that copy,
# and the core that waits for the one which copies. Measured on Llama, 512 wide, at 1/4 of its
# memory.
_COPIES_TO_HOST, _COPIES_TO_FILE = 2.0, 1.0


def plan_auto(request: PlanRequest, *, bound: Bound) -> Plan:
    """Plan a step with the best that the search finds.

    Args:
        request: The step and what it is planned for.
        bound: Lower bound of every plan under the same frozen decisions.

    Returns:
        The plan.

    Raises:
        InfeasibleError: The device's budget is too small.
    """
    began, request = time.monotonic(), request.ending(_DEFAULT_SECONDS)
    grid = GridRequest(request=request, bound=bound, alignment=alignment_bytes(request.graph))

    def report(seconds: float) -> None:
        if request.progress is not None:
            request.progress(Found(time.monotonic() - began, seconds, bound.seconds))

    least, device_bytes = working_set(request.graph), request.budget.device_bytes
    if device_bytes is not None and device_bytes < least.num_bytes:
        raise explain_infeasible(grid, least)
    found = failure = None
    try:
        found = _search_on_grids(grid, report)
    except InfeasibleError as error:
        failure = error
    better = _descend_from(grid, found)
    if better is not None:
        report(better.step_seconds)
        found = better
    if found is None:
        assert failure is not None
        failure.minimum_device_bytes = least.num_bytes
        raise failure
    notes = {**found.notes, "search_seconds": round(time.monotonic() - began, 3)}
    return dataclasses.replace(found, notes=notes)


def _search_on_grids(grid: GridRequest, report: Callable[[float], None]) -> Plan:
    """Search on a grid, and on finer ones where it has no offsets."""
    if load_engine() is None:
        raise _explain_no_search(grid.request)
    try:
        return _search(grid, report)
    except InfeasibleError:
        for finer in grid.finer_grids():
            with contextlib.suppress(InfeasibleError):
                return _search(finer, report)
        raise


def _search(grid: GridRequest, report: Callable[[float], None]) -> Plan:
    """Search for a plan of a graph of any size."""
    request, arena, deadline = grid.request, grid.arena, grid.request.deadline
    search = AutoSearch(
        dataclasses.replace(request, deadline=_search_deadline(request)),
        dataclasses.replace(arena, capacity=arena.capacity + grid.overhang),
        on_better=lambda candidate: report(candidate.choice.replay.step_seconds),
        alignment=grid.alignment,
    )
    try:
        best = search.run()
    except KeyboardInterrupt:  # the best so far is a plan as well
        if search.best is None:
            raise
        best = search.best
        deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_CTRL_C)
    if best is None:
        raise explain_infeasible(grid)
    find_offsets = functools.partial(offsets_of_fastest, seed=request.seed)
    try:
        choice, offsets = find_offsets(
            search.finalists(), arena, tighter=search.tighter, deadline=deadline
        )
    except KeyboardInterrupt:  # the best alone, without taking time
        choice, offsets = find_offsets(search.finalists()[:1], arena, deadline=time.monotonic())
    except InfeasibleError as error:
        if request.budget.device_bytes is not None:
            raise
        # No limit was given: the arena becomes what the packer needs.
        larger = dataclasses.replace(arena, capacity=2 * sufficient_bytes(error))
        choice, offsets = find_offsets(search.finalists(), larger, deadline=deadline)
    notes = {"replayed_seconds": choice.replay.step_seconds}
    return plan_residency(request, choice, offsets, method="auto", bound=grid.bound, notes=notes)


def _search_deadline(request: PlanRequest) -> float:
    """Return when the search has to end, so that there is time for offsets."""
    began = time.monotonic()
    left = request.deadline - began
    for_offsets = len(request.graph.operators) * _OFFSET_SECONDS_PER_OPERATOR
    return began + min(left * _SEARCH_SHARE, max(left - for_offsets, left / 2))


def _descend_from(grid: GridRequest, found: Plan | None) -> Plan | None:
    """Find a better plan of a small graph by descent; None if there is none."""
    request = grid.request
    budget, links = request.budget, request.links
    is_small = len(request.graph.operators) <= MAX_OPERATORS and budget.device_bytes is not None
    if not is_small or links != ((Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE),):
        return None
    freedom = request.reorder, request.recompute
    best = found or find_any_plan(request)
    # A descent with decisions frozen may come further than one without: it goes first.
    for reorder, recompute in (*frozen_decisions(*freedom), freedom):
        # Time is the processor's, so that a busy machine finds the same plans.
        limit = Limit(request.deadline, time.thread_time() + MAX_SECONDS)
        frozen = dataclasses.replace(request, reorder=reorder, recompute=recompute)
        best = descend(frozen, best, limit=limit)
    if best is None or best is found:
        return None
    if budget.host_bytes is not None and best.peak_host_bytes > budget.host_bytes:
        return None
    return dataclasses.replace(best, bound=grid.bound, method="auto", seed=request.seed)


@dataclass(frozen=True, kw_only=True)
class GridRequest:
    """A request on one grid of addresses."""

    request: PlanRequest  # the step and what it is planned for
    bound: Bound  # lower bound of its time
    alignment: int  # bytes of which offsets are multiples
    overhang: int = 0  # bytes that the search has beyond the arena, as its objects take multiples

    @cached_property
    def arena(self) -> Arena:
        """The arena, as large as the budget says or as the program's order needs."""
        workspace_bytes, capacity = self.request.graph.workspace_bytes, self.request.arena_bytes
        if capacity is not None:
            return Arena(max(0, capacity), self._lower_tiers(), workspace_bytes)
        # The packer rarely needs more than this beyond the live bytes.
        capacity = int(self.program().base.max(initial=0) * 1.02) + 1
        return Arena(capacity, None, workspace_bytes)

    def _lower_tiers(self) -> LowerTiers | None:
        links, machine, budget = self.request.links, self.request.machine, self.request.budget
        if not links:
            return None
        rates = tuple(
            LinkRates(machine.links[out].bytes_per_second, machine.links[back].bytes_per_second)
            for out, back in links
        )
        is_host = links[0][0].destination == Tier.HOST
        first_bytes = budget.host_bytes if is_host else budget.file_bytes
        if first_bytes is not None and first_bytes >= sum(
            storage.num_bytes for storage in self.request.graph.storages
        ):
            first_bytes = None  # it holds everything
        interference = tuple(interference_per_byte(out, machine) for out, _ in links)
        return LowerTiers(rates, first_bytes, interference)

    def program(self) -> OperatorSequence:
        """Return the operators in the program's own order."""
        graph, seconds = self.request.graph, self.request.operator_seconds
        problem = Problem(graph, seconds, alignment=self.alignment)
        return OperatorSequence(problem, np.arange(len(graph.operators)))

    def finer_grids(self) -> Iterator[GridRequest]:
        """Yield grids of smaller alignment, and with an end of the arena between two multiples."""
        least = least_alignment_bytes(self.request.graph)
        for alignment in dict.fromkeys((self.alignment, least)):
            if alignment < self.alignment:
                yield dataclasses.replace(self, alignment=alignment)
            overhang = -self.arena.capacity % alignment
            if overhang and self.request.budget.device_bytes is not None:
                yield dataclasses.replace(self, alignment=alignment, overhang=overhang)


def interference_per_byte(link: Link, machine: MachineProfile) -> float:
    """Return the seconds by which moving a byte slows the operators down, in either direction.

    Where the device is RAM, copies take its cores.
    """
    if machine.device != "cpu":
        return 0.0
    of_copy = 1 / machine.memcpy.bytes_per_second * min(1.0, 2 / machine.num_cores)
    to_file = Tier.FILE in (link.source, link.destination)
    return of_copy * (_COPIES_TO_FILE if to_file else _COPIES_TO_HOST)


def explain_infeasible(grid: GridRequest, least: WorkingSet | None = None) -> InfeasibleError:
    """Return the error of a search that found nothing, or of a budget below the working set."""
    request, arena = grid.request, grid.arena
    if least is not None and load_engine() is None:  # nothing can be searched
        return _explain_working_set(request, least, None)
    sequence = grid.program()
    if arena.lower is not None and arena.lower.first_bytes is not None:
        unlimited = dataclasses.replace(arena.lower, first_bytes=None)
        choice = ResidencySearch(sequence, Arena(arena.capacity, unlimited)).quick()
        if choice is not None:
            tier = request.links[0][0].destination
            return _explain_small_tier(choice, arena.lower.first_bytes, tier)
    needed = sequence.base if arena.lower is None else sequence.working_set
    position = int(np.argmax(needed))
    name = request.graph.operators[int(sequence.order[position])].name
    enough = _sufficient_capacity(sequence, Arena(int(needed[position]), arena.lower))
    enough += arena.workspace_bytes
    if least is not None:
        return _explain_working_set(request, least, enough)
    return InfeasibleError(
        f"device_memory={format_bytes(request.budget.device_bytes or 0)} is too little where the "
        f"program runs operator {name!r}, and no order was found that needs less. "
        f"{_name_remedies(request, enough)}",
        operator=name,
        sufficient_device_bytes=enough,
    )


def _explain_no_search(request: PlanRequest) -> InfeasibleError:
    """Return the error of a budget for which there is no plan by paging, without the search."""
    given = f"device_memory={format_bytes(request.budget.device_bytes or 0)} is too little"
    if not request.links:
        return InfeasibleError(f"{given} without a tier below. {_name_remedies(request, None)}")
    problem = why_nothing_can_be_built() or "its library does not load"
    return InfeasibleError(
        f"{given} for plans without the search, whose C++ cannot be built: {problem}. "
        f"{_name_remedies(request, None)}"
    )


def _name_remedies(request: PlanRequest, enough: int | None) -> str:
    """Return a sentence of what helps where no plan fits; of bytes rounded up, which do fit."""
    more = f"{ceil_bytes(enough)} (a plan exists there)" if enough else "more memory"
    tier = [] if request.links else ["a tier for what does not fit (store= or host_memory=)"]
    slices = [] if request.split_products else ["split_products=True"]
    ways = [more, *tier, "a smaller batch", *slices]
    return f"Give {', '.join(ways[:-1])}, or {ways[-1]}"


def _explain_working_set(
    request: PlanRequest, least: WorkingSet, enough: int | None
) -> InfeasibleError:
    """Return the error of a budget below the working set."""
    return InfeasibleError(
        f"device_memory={format_bytes(request.budget.device_bytes or 0)} is too little: operator "
        f"{least.operator!r} alone needs {format_bytes(least.num_bytes)} with its workspace. "
        f"{_name_remedies(request, enough)}",
        minimum_device_bytes=least.num_bytes,
        operator=least.operator,
        proved=True,
        sufficient_device_bytes=enough,
    )


def _explain_small_tier(choice: EvictionChoice, given: int, tier: Tier) -> InfeasibleError:
    """Return the error of a lower tier that is too small for the evictions."""
    sequence, is_evicted = choice.sequence, choice.evicted != 0
    low, high = given, given + int(sequence.hole_bytes[is_evicted].sum())
    while low < high:
        middle = (low + high) // 2
        does_not_fit = sequence.tiers(choice.evicted, middle)[is_evicted].any()
        low, high = (middle + 1, high) if does_not_fit else (low, middle)
    position = int(np.argmax(sequence.base))
    name = "host_memory" if tier == Tier.HOST else "store"
    return InfeasibleError(
        f"{name}={format_bytes(given)} is too little: in the time that there was, no plan was "
        f"found that needs less than {ceil_bytes(low)} there. Give that, raise time_limit=, or "
        "raise device_memory=",
        operator=sequence.problem.graph.operators[int(sequence.order[position])].name,
        proved=False,
    )


def _sufficient_capacity(sequence: OperatorSequence, arena: Arena) -> int:
    """Return the least capacity for which a plan was found, from that of the arena on."""
    choice = ResidencySearch(sequence, arena).quick()
    if choice is None:  # what leaves has no room below: everything stays
        arena = Arena(int(sequence.base.max(initial=0)), None)
        choice = ResidencySearch(sequence, arena).quick()
        assert choice is not None, "all that is live fits"
    try:
        find_offsets(choice, arena, deadline=time.monotonic(), seed=0)
    except InfeasibleError as error:
        return sufficient_bytes(error)
    return arena.capacity
