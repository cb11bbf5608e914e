"""From a graph and budgets to a finished plan: search, addresses, times, bound.

The search counts bytes; addresses come afterwards. Where the packer needs more than the arena has,
the residency is chosen again for a little less, so fragmentation costs some transfers and never
the plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import alignment_bytes, least_alignment_bytes
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._assemble import assemble
from penstock.planner._plan import Bound, Found, Plan
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import WorkingSet, working_set
from penstock.planner.exact import Limit
from penstock.planner.search._addresses import (
    FEW_POSITIONS,
    Addressed,
    improve_addresses,
    packed,
    stacked,
)
from penstock.planner.search._auto import AutoSearch, Candidate, frozen_decisions
from penstock.planner.search._emit import emit
from penstock.planner.search._engine import OperatorSequence, Problem, Rates, load_engine
from penstock.planner.search._finish import MAX_OPERATORS, MAX_SECONDS, any_plan, finish
from penstock.planner.search._residency import Below, Residency, ResidencySearch
from penstock.units import format_bytes

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
_SEARCH_SHARE = 0.65  # of the time; the rest is for addresses
# What addresses take, some ten times over all stays, on a machine that others use as well.
_ADDRESS_SECONDS_PER_OPERATOR = 1.5e-3
# What a byte that moves costs computing on two cores, in copies of it by one thread: that copy, and
# the core that waits for the one which copies. Measured on Llama, 512 wide, at 1/4 of its memory.
_TOLL_OF_COPIES, _TOLL_OF_FILES = 2.0, 1.0
_SECONDS_AFTER_CTRL_C = 5.0  # for addresses, where the search was stopped by hand
# Shares of the arena for which the residency is chosen, when it gets addresses.
_TARGETS = (0.99, 0.97, 0.95, 0.92, 0.85, 0.7, 0.4, 0.0)
_FINALIST_SHARE = 0.3  # of the time for addresses that is left, for the fastest of those left
_FIRST_SHARE = 0.35  # of the time for addresses, for the first of each; the rest improves the best
_AS_GOOD = 1.001  # with addresses that make no finalist slower nothing is to be improved
_STACKING_SHARE = 0.6  # of a finalist's time, as long as it has no addresses
_NUM_LATE_TRIES = 3  # choices that are stacked even if there is no time
_WORTH_IT = 0.998  # of the best time: nothing below it is looked for


def plan_auto(request: PlanRequest, *, bound: Bound) -> Plan:
    """Plan a step with the best that the search finds.

    Args:
        request: The step and what it is planned for.
        bound: What no plan under the same frozen decisions can beat.

    Returns:
        The plan.

    Raises:
        InfeasibleError: The device's budget is too small.
    """
    began, request = time.monotonic(), request.ending(_DEFAULT_SECONDS)
    task = _Task(request=request, bound=bound, alignment=alignment_bytes(request.graph))

    def report(seconds: float) -> None:
        if request.progress is not None:
            request.progress(Found(time.monotonic() - began, seconds, bound.seconds))

    least, device_bytes = working_set(request.graph), request.budget.device_bytes
    if device_bytes is not None and device_bytes < least.num_bytes:
        raise _infeasible(task, least)
    if load_engine() is None:
        found, failure = None, _without_engine(task)
    else:
        found, failure = _searched_on_grids(task, report)
    better = _finished(task, found)
    if better is not None:
        report(better.step_seconds)
        found = better
    if found is None:
        assert failure is not None
        failure.minimum_device_bytes = least.num_bytes
        raise failure
    notes = {**found.notes, "search_seconds": round(time.monotonic() - began, 3)}
    return dataclasses.replace(found, notes=notes)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A request on one grid of addresses."""

    request: PlanRequest
    bound: Bound
    alignment: int
    overhang: int = 0  # bytes that the search has beyond the arena: its objects take multiples

    @functools.cached_property
    def capacity(self) -> int:
        """Bytes of the arena."""
        if self.request.budget.device_bytes is not None:
            return max(0, self.request.budget.device_bytes - self.request.workspace_bytes)
        # Room for the packer: addresses rarely need more than this beyond the live bytes.
        return int(self.program().base.max(initial=0) * 1.02) + 1

    @functools.cached_property
    def below(self) -> Below | None:
        """The tiers below the device; None if nothing may leave, or has to."""
        links, machine, budget = self.request.links, self.request.machine, self.request.budget
        if not links or budget.device_bytes is None:
            return None
        rates = tuple(
            Rates(machine.links[out].bytes_per_second, machine.links[back].bytes_per_second)
            for out, back in links
        )
        is_host = links[0][0].destination == Tier.HOST
        first_bytes = budget.host_bytes if is_host else budget.file_bytes
        if first_bytes is not None and first_bytes >= sum(
            storage.num_bytes for storage in self.request.graph.storages
        ):
            first_bytes = None  # it holds everything
        tolls = tuple(toll_of_byte(out, machine) for out, _ in links)
        return Below(rates, first_bytes, tolls)

    def program(self) -> OperatorSequence:
        """The operators in the program's own order."""
        graph, seconds = self.request.graph, self.request.operator_seconds
        problem = Problem(graph, seconds, alignment=self.alignment)
        return OperatorSequence(problem, np.arange(len(graph.operators)))


def toll_of_byte(link: Link, machine: MachineProfile) -> float:
    """Seconds of computing that a byte on a link costs: where the device is RAM, the copy's cores.

    The same holds for the way out and the way back.
    """
    if machine.device != "cpu":
        return 0.0
    of_copy = 1 / machine.memcpy.bytes_per_second * min(1.0, 2 / machine.num_cores)
    to_file = Tier.FILE in (link.source, link.destination)
    return of_copy * (_TOLL_OF_FILES if to_file else _TOLL_OF_COPIES)


def _searched_on_grids(
    task: _Task, report: Callable[[float], None]
) -> tuple[Plan | None, InfeasibleError | None]:
    """The plan of the search, with addresses on a finer grid where the first one has no room."""
    failure: InfeasibleError | None = None
    for grid in _grids(task):
        try:
            return _searched(grid, report), None
        except InfeasibleError as error:
            failure = failure or error
    return None, failure


def _grids(task: _Task) -> Iterator[_Task]:
    """Alignments to try, and whether the last object may end between two multiples."""
    yield task
    least = least_alignment_bytes(task.request.graph)
    for alignment in dict.fromkeys((task.alignment, least)):
        if alignment < task.alignment:
            yield dataclasses.replace(task, alignment=alignment)
        overhang = -task.capacity % alignment
        if overhang and task.request.budget.device_bytes is not None:
            yield dataclasses.replace(task, alignment=alignment, overhang=overhang)


def _finished(task: _Task, found: Plan | None) -> Plan | None:
    """A better plan than the one that was found, for small graphs; None if there is none."""
    request = task.request
    budget, links = request.budget, request.links
    is_small = len(request.graph.operators) <= MAX_OPERATORS and budget.device_bytes is not None
    if not is_small or links != ((Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE),):
        return None
    freedom = request.reorder, request.recompute
    best = found
    if best is None:
        best = any_plan(request)
    # A descent with decisions frozen may come further than one without: it goes first.
    for reorder, recompute in (*frozen_decisions(*freedom), freedom):
        # A busy machine finishes the same plans: that is why the time is the processor's.
        limit = Limit(request.deadline, time.thread_time() + MAX_SECONDS)
        frozen = dataclasses.replace(request, reorder=reorder, recompute=recompute)
        best = finish(frozen, best, limit=limit)
    if best is None or best is found:
        return None
    if budget.host_bytes is not None and best.peak_host_bytes > budget.host_bytes:
        return None
    return dataclasses.replace(best, bound=task.bound, method="auto", seed=request.seed)


def _searched(task: _Task, report: Callable[[float], None]) -> Plan:
    """The search for plans of any size."""
    request, deadline = task.request, task.request.deadline
    search = AutoSearch(
        dataclasses.replace(request, deadline=_search_deadline(request)),
        capacity=task.capacity + task.overhang,
        below=task.below,
        on_better=lambda candidate: report(candidate.residency.replay.step_seconds),
        alignment=task.alignment,
    )
    try:
        best = search.run()
    except KeyboardInterrupt:  # the best so far is a plan as well
        if search.best is None:
            raise
        best = search.best
        deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_CTRL_C)
    if best is None:
        raise _infeasible(task)
    addressed = functools.partial(
        _best_with_addresses,
        capacity=task.capacity,
        below=task.below,
        workspace=request.workspace_bytes,
        seed=request.seed,
    )
    try:
        residency, offsets = addressed(
            search.finalists(), tighter=search.tighter, deadline=deadline
        )
    except KeyboardInterrupt:  # the best alone, without taking time
        residency, offsets = addressed(search.finalists()[:1], deadline=time.monotonic())
    except InfeasibleError as error:
        if request.budget.device_bytes is not None:
            raise
        # No limit was given: the arena becomes what the packer needs.
        residency, offsets = addressed(
            search.finalists(), capacity=2 * _enough(error), deadline=deadline
        )
    return _plan(task, residency, offsets)


def _search_deadline(request: PlanRequest) -> float:
    """When the search has to end, so that there is time for addresses."""
    began = time.monotonic()
    left = request.deadline - began
    for_addresses = len(request.graph.operators) * _ADDRESS_SECONDS_PER_OPERATOR
    return began + min(left * _SEARCH_SHARE, max(left - for_addresses, left / 2))


def _plan(task: _Task, residency: Residency, offsets: Sequence[int]) -> Plan:
    request = task.request
    placements, transfers, unused = emit(residency, offsets, request.links)
    return assemble(
        request,
        residency.sequence.order.tolist(),
        placements,
        transfers,
        method="auto",
        bound=task.bound,
        notes={"replayed_seconds": residency.replay.step_seconds},
        unused=unused,
    )


def _best_with_addresses(
    finalists: Sequence[Candidate],
    capacity: int,
    below: Below | None,
    *,
    workspace: int,
    deadline: float,
    seed: int,
    tighter: Sequence[Candidate] = (),
) -> Addressed:
    """The finalist that is the fastest once it has addresses; each has its share of the time."""
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    began, last = time.monotonic(), deadline
    for index, candidate in enumerate(finalists):
        now = time.monotonic()
        # Without second runs a choice for less room is worth more than other orders of stays.
        deadline = last
        if best is not None and candidate.dropped:
            deadline = began + max(0.0, last - began) * _FIRST_SHARE
        if best is not None and (candidate.seconds >= best[0].seconds or now > deadline):
            continue
        share = max(_FINALIST_SHARE, 1 / (len(finalists) - index))
        try:
            best = _with_addresses(
                candidate.residency,
                capacity,
                below,
                best=best,
                workspace=workspace,
                deadline=now + max(0.0, deadline - now) * share,
                seed=seed,
            )
        except InfeasibleError as error:
            if failure is None or _enough(error) < _enough(failure):
                failure = error
    if best is None:
        assert failure is not None
        raise failure
    if below is None or best[0].seconds <= finalists[0].seconds * _AS_GOOD:
        return best
    near = [c.residency for c in (*tighter, *finalists[:1]) if c.seconds < best[0].seconds]
    return improve_addresses(best, near, capacity, below, deadline=last, seed=seed)


def _with_addresses(
    residency: Residency,
    capacity: int,
    below: Below | None,
    *,
    best: Addressed | None = None,
    workspace: int,
    deadline: float,
    seed: int,
) -> Addressed:
    """Addresses for a choice, or for one that leaves more room where these cost less time.

    `best` is what has addresses already: it stays where this is not faster.
    """
    # Where the engine's ways find nothing, the packer needs its part of the time.
    now = time.monotonic()
    halfway = now + max(0.0, deadline - now) * _STACKING_SHARE
    for number, choice in enumerate(_ever_smaller(residency, capacity, below)):
        until = halfway if best is None else deadline
        # What is late has a cheap try nevertheless: a choice that leaves much more room costs more.
        if time.monotonic() > until and (best is not None or number >= _NUM_LATE_TRIES):
            break
        worth = best[0].seconds * _WORTH_IT if best is not None else np.inf
        best = stacked(choice, capacity, below, worth=worth, deadline=until) or best
    pack_seconds = min(max(0.5, (deadline - time.monotonic()) / 16), 2.0)
    if best is not None:
        if len(residency.sequence.order) > FEW_POSITIONS:
            return best
        with contextlib.suppress(InfeasibleError):
            other = packed(
                residency, capacity, below, pack_seconds=pack_seconds, deadline=deadline, seed=seed
            )
            return min(best, other, key=lambda found: found[0].seconds)
        return best
    failure: InfeasibleError | None = None
    choices = list(_ever_smaller(residency, capacity, below))
    while choices:
        # Late, the choice that leaves the most room first: it is the most likely to fit.
        is_late = time.monotonic() > deadline
        try:
            return packed(
                choices.pop(-1 if is_late else 0),
                capacity,
                below,
                pack_seconds=pack_seconds,
                deadline=deadline,
                seed=seed,
            )
        except InfeasibleError as error:
            if failure is None or _enough(error) < _enough(failure):
                failure = error
    assert failure is not None
    enough = _enough(failure) + workspace
    raise InfeasibleError(
        f"device_memory={capacity + workspace} bytes: what the operators need fits, but no "
        f"addresses were found that do; {enough} bytes suffice for a plan that was found: raise "
        "device_memory= or time_limit=",
        sufficient_device_bytes=enough,
    )


def _enough(error: InfeasibleError) -> int:
    assert error.sufficient_device_bytes is not None
    return error.sufficient_device_bytes


def _ever_smaller(residency: Residency, capacity: int, below: Below | None) -> Iterator[Residency]:
    """The choice itself, then choices for less and less, down to what the operators need."""
    yield residency
    if below is None:
        return
    sequence = residency.sequence
    least = int(sequence.working_set.max(initial=0))
    seen = {residency.replay.in_start.tobytes()}
    # First as it is but for less room; then with nothing kept that an operator does not use.
    for shares in (residency.shares, np.zeros_like(residency.shares)):
        for fraction in _TARGETS:
            target = max(least, int(capacity * fraction))
            found = ResidencySearch(sequence, target, below).at(shares)
            if found is not None and (key := found.replay.in_start.tobytes()) not in seen:
                seen.add(key)
                yield found
    yield from filter(None, [ResidencySearch(sequence, least, below, horizon=0).at(shares * 0)])


def _without_engine(task: _Task) -> InfeasibleError:
    return InfeasibleError(
        f"device_memory={task.request.budget.device_bytes} bytes: plans are searched for by C++, "
        "and without it nothing was found that fits; install a compiler, or give more",
        proved=False,
    )


def _infeasible(task: _Task, least: WorkingSet | None = None) -> InfeasibleError:
    """What would do, where the search found nothing, or where no plan fits (`least` is above)."""
    if least is not None and load_engine() is None:
        return InfeasibleError(
            f"device_memory={task.request.budget.device_bytes} bytes is too little: operator "
            f"{least.operator!r} alone needs {least.num_bytes} bytes with its workspace: raise it, "
            "or split it",
            minimum_device_bytes=least.num_bytes,
            operator=least.operator,
            proved=True,
        )
    sequence, below, capacity = task.program(), task.below, task.capacity
    request, workspace = task.request, task.request.workspace_bytes
    if below is not None and below.first_bytes is not None:
        anything_goes = dataclasses.replace(below, first_bytes=None)
        residency = ResidencySearch(sequence, capacity, anything_goes).quick()
        if residency is not None:
            tier = request.links[0][0].destination
            return _too_little_below(residency, below.first_bytes, workspace, tier)
    needed = sequence.base if below is None else sequence.working_set
    position = int(np.argmax(needed))
    name = request.graph.operators[int(sequence.order[position])].name
    arena = int(needed[position])
    enough = _with_room_for_addresses(sequence, arena, below) + workspace
    reason = (
        "there is no tier to which anything could leave: pass store= (or host_memory=), or raise it"
        if below is None
        else "nothing but its own operands and results is there then: raise it, or split it"
    )
    given = (
        f"device_memory={format_bytes(request.budget.device_bytes or 0)} is too little: operator "
    )
    if least is not None:
        return InfeasibleError(
            f"{given}{least.operator!r} alone needs {format_bytes(least.num_bytes)} with its "
            f"workspace, and a plan was found for {format_bytes(enough)}; {reason}",
            minimum_device_bytes=least.num_bytes,
            operator=least.operator,
            proved=True,
            sufficient_device_bytes=enough,
        )
    return InfeasibleError(
        f"{given}{name!r} needs {format_bytes(enough)} with its workspace where the program runs "
        f"it, and no other order was found that needs less; {reason}",
        operator=name,
        sufficient_device_bytes=enough,
    )


def _too_little_below(
    residency: Residency, given: int, workspace: int, tier: Tier
) -> InfeasibleError:
    """The tier below is too small for what has to leave."""
    sequence = residency.sequence
    low, high = given, given + int(sequence.gap_bytes[residency.evicted != 0].sum())
    while low < high:
        middle = (low + high) // 2
        outside = sequence.tiers(residency.evicted, middle)[residency.evicted != 0].any()
        low, high = (middle + 1, high) if outside else (low, middle)
    position = int(np.argmax(sequence.base))
    name = "host_memory" if tier == Tier.HOST else "store"
    return InfeasibleError(
        f"{name}={given} bytes: what has to leave the device needs {low} bytes there; raise it, or "
        "device_memory=",
        operator=sequence.problem.graph.operators[int(sequence.order[position])].name,
        proved=False,
    )


def _with_room_for_addresses(sequence: OperatorSequence, arena: int, below: Below | None) -> int:
    """The least arena for which a plan was found, from the bytes that operators need on."""
    residency = ResidencySearch(sequence, arena, below).quick()
    if residency is None:
        return arena
    try:
        _with_addresses(residency, arena, below, workspace=0, deadline=time.monotonic(), seed=0)
    except InfeasibleError as error:
        return _enough(error)
    return arena
