"""From a request to a finished plan: search, offsets, times, bound.

The search counts bytes; offsets come afterwards. Where the packer needs more than the arena has,
evictions are chosen again for a little less, so fragmentation costs some transfers and never the
plan.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

from penstock.errors import InfeasibleError
from penstock.graph import alignment_bytes
from penstock.memory import Link
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Found
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import working_set
from penstock.planner.exact import Limit
from penstock.planner.search._auto import AutoSearch, frozen_decisions
from penstock.planner.search._descent import MAX_OPERATORS, MAX_SECONDS, descend, find_any_plan
from penstock.planner.search._finalists import offsets_of_fastest
from penstock.planner.search._grid import GridRequest
from penstock.planner.search._infeasible import explain_infeasible, explain_missing_engine
from penstock.planner.search._library import load_engine
from penstock.planner.search._offsets import sufficient_bytes
from penstock.planner.search._plan_residency import plan_residency

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
_SEARCH_SHARE = 0.65  # of the time; the rest is for offsets
# Time that offsets take, some ten times over all intervals, on a machine that others use as well.
_OFFSET_SECONDS_PER_OPERATOR = 1.5e-3
_SECONDS_AFTER_CTRL_C = 5.0  # for offsets, where the search was stopped by hand


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
    if load_engine() is None:
        found, failure = None, explain_missing_engine(request)
    else:
        found, failure = _search_on_grids(grid, report)
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


def _search_on_grids(
    grid: GridRequest, report: Callable[[float], None]
) -> tuple[Plan | None, InfeasibleError | None]:
    """Search on a grid, and on finer ones where it has no offsets."""
    try:
        return _search(grid, report), None
    except InfeasibleError as error:
        failure = error
    for finer in grid.finer_grids():
        try:
            return _search(finer, report), None
        except InfeasibleError:
            continue
    return None, failure


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
    best = found
    if best is None:
        best = find_any_plan(request)
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
