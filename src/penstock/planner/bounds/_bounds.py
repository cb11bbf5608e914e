"""Lower bounds of the time of a step, each with its proof.

C is the time to compute, every operator once; M the arena, that is the budget without the
workspace; `in` and `out` the rates of all links into and out of the device together. In a plan
whose steps repeat, transfers on a link take at most the step's time T in a step, and when an
operator starts at most M bytes have a place on the device. A value without a place has left
completely before that, or lies below because no step changes it, and returns completely after it
(or is recomputed), before its next use.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner._plan_records import Bound
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.bounds._cuts import NUM_CUTS, chain_bound, window_bound
from penstock.planner.bounds._exclusion import exclusion_bound, find_exclusion
from penstock.planner.bounds._fixed_order import (
    FixedOrder,
    LiveRangeTable,
    operator_bytes,
    tabulate_live_ranges,
)
from penstock.planner.bounds._forced import MAX_OPERATORS, Forced, find_forced, forced_bounds
from penstock.planner.bounds._recomputation import recomputation_bound
from penstock.planner.bounds._residency import residency_bound
from penstock.planner.bounds._segments import segment_bound

_log = logging.getLogger(__name__)

# Solvers stop within a tolerance of the optimum; bounds stay below it.
_SAFETY = 1 - 1e-6
_DEFAULT_SECONDS = 15.0  # where the request has no deadline

_Solver = Callable[..., float | None]  # of time_limit=, in seconds


def lower_bound(request: PlanRequest, *, order: Sequence[int] | None = None) -> Bound:
    """Bound the time of a step from below, for every plan under the same frozen decisions.

    Example:
        >>> bound = lower_bound(request)  # doctest: +SKIP
        >>> bound.binding, bound.seconds  # doctest: +SKIP
        ('cut', 0.81)

    The parts, where M is what the device holds beside the workspace:

    - `compute`: every operator runs at least once, one after the other.
    - `persistent` and `cut`: hold for any order (see `forced_bounds`).
    - `chain`: for any order; along operators that run one after the other in all of them (see
      `chain_bound`).
    - `remaking`: for any order, if operators may run again; recomputed values need their operands,
      and these theirs (see `recomputation_bound`).
    - `exclusion`: for any order; of two operands that cannot be made beside each other one leaves
      and returns between them, and little else fits beside both (see `exclusion_bound`).
    - `residency_lp`: for a frozen order, with shares of the values that are absent in each hole
      between two uses (or recomputed, if recomputation is free). Every plan of this order is a
      solution with shares 0 and 1, so the optimum with shares in between is not above it (see
      `residency_bound`).
    - `windows`: for a frozen order; bytes that leave before a position and return after it need
      time before and after it (see `window_bound`).
    - `segments`: for a frozen order; large values are resident or absent, and nothing in between,
      and a value that comes in has its place before (see `segment_bound`).

    Args:
        request: The step, its memory, and what plans may decide. After its deadline no other part
            is begun; parts that are missing then are logged, and not in the result. Without one
            the solvers have 15 seconds.
        order: Where it is frozen: the order of the first runs of the operators; None: that of the
            program.

    Returns:
        The bound, its parts, and which of them binds.

    Raises:
        InfeasibleError: One operator alone, with all that has to be resident while it runs, does
            not fit.

    Cuts and the residency of a fixed order count bytes as OLLA (Steiner et al. 2022) and Checkmate
    (Jain et al. 2020, section 4) do; the bounds in time are our own.
    """
    graph, operator_seconds, recompute = request.graph, request.operator_seconds, request.recompute
    deadline = request.ending(_DEFAULT_SECONDS).deadline
    parts = {"compute": request.compute_seconds}
    frozen = None
    if not request.reorder:
        frozen = list(range(len(graph.operators)) if order is None else order)
    capacity = request.arena_bytes
    if capacity is None or not graph.operators:
        return _bound(parts, request)
    program_order = range(len(graph.operators))
    first_runs = program_order if frozen is None else frozen
    table = tabulate_live_ranges(graph, first_runs, may_grow=recompute)
    _require_capacity(graph, frozen, table, capacity)
    rates = _rates(request)
    if rates.inward <= 0 or rates.outward <= 0:
        return _bound(parts, request)
    solvers: dict[str, _Solver] = {}
    if len(graph.operators) <= MAX_OPERATORS:
        forced = find_forced(graph, operator_seconds, recompute=recompute)
        parts |= _bounds_of_any_order(forced, operator_seconds, capacity, rates)
        step = (graph, forced, operator_seconds, capacity, rates)
        if recompute:
            solvers["remaking"] = functools.partial(recomputation_bound, *step)
        if frozen is None:
            solvers["chain"] = functools.partial(chain_bound, *step, recompute=recompute)
        pair = find_exclusion(graph, capacity) if recompute and frozen is None else None
        if pair is not None:
            solvers["exclusion"] = functools.partial(exclusion_bound, *step, pair)
    if frozen is not None:
        seconds = np.asarray(operator_seconds, dtype=np.float64)
        again = seconds if recompute else None
        fixed = FixedOrder(graph, table, seconds[frozen], capacity, rates, again)
        solvers["windows"] = functools.partial(window_bound, fixed)
        solvers["residency_lp"] = functools.partial(residency_bound, fixed)
        solvers["windows, finer"] = functools.partial(window_bound, fixed, num_cuts=2 * NUM_CUTS)
        solvers["segments"] = functools.partial(segment_bound, fixed)  # takes all the time left
    _solve(solvers, deadline, parts)
    return _bound(parts, request)


def quick_parts(request: PlanRequest) -> dict[str, float]:
    """Return the parts of `lower_bound` that take no solver: `compute`, `cut`, `persistent`."""
    parts = {"compute": request.compute_seconds}
    capacity, rates = request.arena_bytes, _rates(request)
    has_links = rates.inward > 0 and rates.outward > 0
    is_small = 0 < len(request.graph.operators) <= MAX_OPERATORS
    if capacity is None or not has_links or not is_small:
        return parts
    seconds = request.operator_seconds
    forced = find_forced(request.graph, seconds, recompute=request.recompute)
    return parts | _bounds_of_any_order(forced, seconds, capacity, rates)


def _bounds_of_any_order(
    forced: Forced, operator_seconds: Sequence[float], capacity: int, rates: LinkRates
) -> dict[str, float]:
    bounds = forced_bounds(forced, operator_seconds, capacity, rates)
    return {name: seconds * _SAFETY for name, seconds in bounds.items()}


def _solve(solvers: Mapping[str, _Solver], deadline: float, parts: dict[str, float]) -> None:
    """Add the bounds of solvers until the deadline; each may take half of the time left."""
    for done, (name, solve) in enumerate(solvers.items()):
        left = (deadline - time.monotonic()) / (1 if done + 1 == len(solvers) else 2)
        bound = solve(time_limit=left) if left > 0 else None
        if bound is None:
            _log.info("the lower bound %r is left out: it takes longer than allowed", name)
        else:
            name = name.partition(",")[0]  # other numbers of slots give different bounds
            parts[name] = max(bound * _SAFETY, parts.get(name, 0.0))


def _bound(parts: dict[str, float], request: PlanRequest) -> Bound:
    binding = max(parts, key=lambda name: parts[name])
    return Bound(
        seconds=parts[binding],
        binding=binding,
        seconds_of=parts,
        reorder=request.reorder,
        recompute=request.recompute,
    )


def _rates(request: PlanRequest) -> LinkRates:
    tiers = {Tier.HOST: request.budget.host_bytes, Tier.FILE: request.budget.file_bytes}
    inward = outward = 0.0
    for link, profile in request.machine.links.items():
        if link.destination == Tier.DEVICE and tiers[link.source] is not None:
            inward += profile.bytes_per_second
        if link.source == Tier.DEVICE and tiers[link.destination] is not None:
            outward += profile.bytes_per_second
    return LinkRates(outward=outward, inward=inward)


def _require_capacity(
    graph: StepGraph, frozen: Sequence[int] | None, table: LiveRangeTable, capacity: int
) -> None:
    """Refuse budgets that an operator's bytes exceed, with those that cannot be absent."""
    needed = table.used_bytes if frozen is None else table.live_bytes - table.evictable_bytes()
    position = int(np.argmax(needed))
    if needed[position] <= capacity:
        return
    operator = graph.operators[position if frozen is None else frozen[position]]
    workspace_bytes = graph.workspace_bytes
    raise InfeasibleError(
        f"{operator.name!r} alone needs {needed[position]} bytes for what it reads and makes; the "
        f"budget leaves {capacity} beside {workspace_bytes} of workspace",
        minimum_device_bytes=int(needed[position]) + workspace_bytes,
        operator=operator.name,
        proved=True,
    )


class WorkingSet(NamedTuple):
    """Bytes that some operator alone needs in any order: no plan takes less."""

    num_bytes: int  # of the device, workspace included; bytes as they are, without alignment
    operator: str  # name of the operator that needs the most


def working_set(graph: StepGraph) -> WorkingSet:
    """Return the least bytes with which every operator alone can run."""
    if not graph.operators:
        return WorkingSet(0, "")
    needed = operator_bytes(graph)
    worst = int(needed.argmax())
    return WorkingSet(int(needed[worst]) + graph.workspace_bytes, graph.operators[worst].name)
