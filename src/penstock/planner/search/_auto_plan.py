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

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._plan import Bound, Budget, Found, Plan
from penstock.planner._simulate import simulate
from penstock.planner.search._addresses import FEW_POSITIONS, Addressed, packed, stacked
from penstock.planner.search._auto import AutoSearch, Candidate
from penstock.planner.search._emit import emit
from penstock.planner.search._engine import OperatorSequence, Problem, Rates
from penstock.planner.search._finish import MAX_OPERATORS, MAX_SECONDS, finish
from penstock.planner.search._residency import Below, Residency, ResidencySearch
from penstock.units import format_bytes

_SEARCH_SHARE = 0.65  # of the time; the rest is for addresses
_SECONDS_AFTER_CTRL_C = 5.0  # for addresses, where the search was stopped by hand
# Shares of the arena for which the residency is chosen, when it gets addresses.
_TARGETS = (0.99, 0.97, 0.95, 0.92, 0.85, 0.7, 0.4, 0.0)
_WORTH_IT = 0.998  # of the best time: nothing below it is looked for


def plan_auto(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    links: Sequence[tuple[Link, Link]],
    bound: Bound,
    reorder: bool = True,
    recompute: bool = True,
    time_limit: float = 60,
    seed: int = 0,
    progress: Callable[[Found], None] | None = None,
) -> Plan:
    """Plan a step with the best that the search finds.

    Args:
        graph: The step.
        operator_seconds: Time of each operator.
        budget: Of the tiers.
        machine: Its links give the times of transfers.
        links: Out of the device and back, for each tier below that may be used, the fastest first;
            none: nothing may leave.
        bound: What no plan under the same frozen decisions can beat.
        reorder: Whether the order may change.
        recompute: Whether operators may run again.
        time_limit: Seconds.
        seed: Of what is random.
        progress: Called with each improvement.

    Returns:
        The plan.

    Raises:
        InfeasibleError: The device's budget is too small.
    """
    begin = time.monotonic()
    deadline = begin + time_limit

    def report(seconds: float) -> None:
        if progress is not None:
            progress(Found(time.monotonic() - begin, seconds, bound.seconds))

    failure: InfeasibleError | None = None
    found = None
    try:
        found = _searched(
            graph,
            operator_seconds=operator_seconds,
            budget=budget,
            machine=machine,
            links=links,
            bound=bound,
            reorder=reorder,
            recompute=recompute,
            deadline=deadline,
            seed=seed,
            report=report,
        )
    except InfeasibleError as error:
        failure = error
    below = [(Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)]
    is_small = len(graph.operators) <= MAX_OPERATORS and budget.device_bytes is not None
    if is_small and list(links) == below and (failure is None or not failure.proved):
        best = finish(
            graph,
            found,
            operator_seconds=operator_seconds,
            budget=budget,
            machine=machine,
            reorder=reorder,
            recompute=recompute,
            deadline=min(deadline, time.monotonic() + MAX_SECONDS),
        )
        room = (
            budget.host_bytes is None or best is None or best.peak_host_bytes <= budget.host_bytes
        )
        if best is not None and best is not found and room:
            report(best.step_seconds)
            found = dataclasses.replace(best, bound=bound, method="auto", seed=seed)
    if found is None:
        assert failure is not None
        raise failure
    notes = {**found.notes, "search_seconds": round(time.monotonic() - begin, 3)}
    return dataclasses.replace(found, notes=notes)


def _searched(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    links: Sequence[tuple[Link, Link]],
    bound: Bound,
    reorder: bool,
    recompute: bool,
    deadline: float,
    seed: int,
    report: Callable[[float], None],
) -> Plan:
    """The search for plans of any size."""
    begin = time.monotonic()
    workspace = max((operator.workspace_bytes for operator in graph.operators), default=0)
    capacity = _arena_capacity(graph, operator_seconds, budget, workspace)

    below = _below(graph, budget, machine, links)
    search = AutoSearch(
        graph,
        np.asarray(operator_seconds, np.float64),
        capacity=capacity,
        below=below,
        reorder=reorder,
        recompute=recompute,
        deadline=begin + (deadline - begin) * _SEARCH_SHARE,
        seed=seed,
        on_better=lambda candidate: report(candidate.seconds),
    )
    try:
        best = search.run()
    except KeyboardInterrupt:  # the best so far is a plan as well
        if search.best is None:
            raise
        best = search.best
        deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_CTRL_C)
    if best is None:
        tier = links[0][0].destination if links else Tier.HOST
        raise _infeasible(graph, operator_seconds, capacity, workspace, below, tier)
    addressed = functools.partial(
        _best_with_addresses, capacity=capacity, below=below, workspace=workspace, seed=seed
    )
    try:
        residency, offsets = addressed(search.finalists(), deadline=deadline)
    except KeyboardInterrupt:  # the best alone, without taking time
        residency, offsets = addressed(search.finalists()[:1], deadline=time.monotonic())
    movement = emit(residency, offsets, links)
    plan = Plan(
        graph_digest=graph.digest,
        order=tuple(residency.sequence.order.tolist()),
        placements=movement.placements,
        transfers=movement.transfers,
        copies=movement.copies,
        budget=budget,
        machine=machine,
        operator_seconds=tuple(map(float, operator_seconds)),
        step_seconds=0.0,
        ideal_seconds=float(sum(operator_seconds)),
        bound=bound,
        workspace_bytes=workspace,
        method="auto",
        seed=seed,
        notes={
            "replayed_seconds": residency.seconds,
        },
    )
    return dataclasses.replace(plan, step_seconds=simulate(graph, plan).step_seconds)


def _arena_capacity(
    graph: StepGraph, operator_seconds: Sequence[float], budget: Budget, workspace: int
) -> int:
    if budget.device_bytes is not None:
        return max(0, budget.device_bytes - workspace)
    problem = Problem(graph, operator_seconds)
    program = OperatorSequence(problem, np.arange(len(graph.operators)))
    # Room for the packer: addresses rarely need more than this beyond the live bytes.
    return int(program.base.max(initial=0) * 1.02) + 1


def _below(
    graph: StepGraph, budget: Budget, machine: MachineProfile, links: Sequence[tuple[Link, Link]]
) -> Below | None:
    if not links:
        return None
    rates = tuple(
        Rates(machine.links[out].bytes_per_second, machine.links[back].bytes_per_second)
        for out, back in links
    )
    is_host = links[0][0].destination == Tier.HOST
    first_bytes = budget.host_bytes if is_host else budget.file_bytes
    if first_bytes is not None and first_bytes >= sum(s.num_bytes for s in graph.storages):
        first_bytes = None  # it holds everything
    return Below(rates, first_bytes)


def _best_with_addresses(
    finalists: Sequence[Candidate],
    capacity: int,
    below: Below | None,
    *,
    workspace: int,
    deadline: float,
    seed: int,
) -> Addressed:
    """The finalist that is the fastest once it has addresses."""
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    for candidate in finalists:
        if best is not None and (
            candidate.seconds >= best[0].seconds or time.monotonic() > deadline
        ):
            continue
        try:
            found = _with_addresses(
                candidate.residency,
                capacity,
                below,
                workspace=workspace,
                deadline=deadline,
                seed=seed,
            )
        except InfeasibleError as error:
            if failure is None or _minimum(error) < _minimum(failure):
                failure = error
            continue
        if best is None or found[0].seconds < best[0].seconds:
            best = found
    if best is None:
        assert failure is not None
        raise failure
    return best


def _with_addresses(
    residency: Residency,
    capacity: int,
    below: Below | None,
    *,
    workspace: int,
    deadline: float,
    seed: int,
) -> Addressed:
    """Addresses for a choice, or for one that leaves more room where these cost less time."""
    best: Addressed | None = None
    for choice in _ever_smaller(residency, capacity, below):
        if time.monotonic() > deadline:
            break
        worth = best[0].seconds * _WORTH_IT if best is not None else np.inf
        best = stacked(choice, capacity, below, worth=worth, deadline=deadline) or best
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
    for choice in _ever_smaller(residency, capacity, below):
        try:
            return packed(
                choice, capacity, below, pack_seconds=pack_seconds, deadline=deadline, seed=seed
            )
        except InfeasibleError as error:
            if failure is None or _minimum(error) < _minimum(failure):
                failure = error
    assert failure is not None
    minimum = _minimum(failure) + workspace
    raise InfeasibleError(
        f"device_memory={capacity + workspace} bytes: what the operators need fits, but no "
        f"addresses were found that do; {minimum} bytes suffice for a plan that was found: raise "
        "device_memory= or time_limit=",
        minimum_device_bytes=minimum,
        proved=False,
    )


def _minimum(error: InfeasibleError) -> int:
    assert error.minimum_device_bytes is not None
    return error.minimum_device_bytes


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


def _infeasible(
    graph: StepGraph,
    operator_seconds: Sequence[float],
    capacity: int,
    workspace: int,
    below: Below | None,
    tier: Tier,
) -> InfeasibleError:
    problem = Problem(graph, operator_seconds)
    sequence = OperatorSequence(problem, np.arange(len(graph.operators)))
    if below is not None and below.first_bytes is not None:
        anything_goes = dataclasses.replace(below, first_bytes=None)
        residency = ResidencySearch(sequence, capacity, anything_goes).quick()
        if residency is not None:
            return _too_little_below(residency, below.first_bytes, workspace, tier)
    needed = sequence.base if below is None else sequence.working_set
    position = int(np.argmax(needed))
    name = graph.operators[int(sequence.order[position])].name
    arena = int(needed[position])
    minimum = _with_room_for_addresses(sequence, arena, below) + workspace
    reason = (
        "there is no tier to which anything could leave: pass store= (or host_memory=), or raise it"
        if below is None
        else "nothing but its own operands and results is there then: raise it, or split it"
    )
    return InfeasibleError(
        f"device_memory={format_bytes(capacity + workspace)} is too little: operator {name!r} "
        f"needs {format_bytes(minimum)} with its workspace; {reason}",
        minimum_device_bytes=minimum,
        operator=name,
        proved=arena > capacity and below is not None,
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
        minimum_device_bytes=int(sequence.base[position] * 1.02) + 1 + workspace,
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
        return _minimum(error)
    return arena
