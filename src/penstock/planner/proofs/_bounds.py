"""What no plan can beat: lower bounds of the time of a step, each with its proof.

Words: C is the time to compute, every operator once; M the arena, that is the budget without the
workspace; `in` and `out` the rates of all links into and out of the device together. In a plan
whose steps repeat, what moves on a link in a step takes at most the step's time T, and when an
operator starts at most M bytes have a place on the device. A value that has none has left
completely before that, or lies below because no step changes it, and comes back completely after
it (or is made again), before it is next used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile, Tier
from penstock.planner._plan import Bound, Budget
from penstock.planner._rates import Rates
from penstock.planner.proofs._chain import chain_bound
from penstock.planner.proofs._forced import MAX_OPERATORS, forced_bounds, forced_of
from penstock.planner.proofs._linear import LinearProgram
from penstock.planner.proofs._lives import Lives, lives_of
from penstock.planner.proofs._remaking import remaking_bound
from penstock.planner.proofs._windows import NUM_CUTS, window_bound

_log = logging.getLogger(__name__)

# Solvers stop within a tolerance of the optimum; bounds stay below it.
_SAFETY = 1 - 1e-6


def lower_bound(
    graph: StepGraph,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    *,
    order: Sequence[int] | None = None,
    reorder: bool = True,
    recompute: bool = True,
    time_limit: float = 15.0,
) -> Bound:
    """Bound the time of a step from below, for every plan under the same frozen decisions.

    Example:
        >>> bound = lower_bound(graph, seconds, budget, machine)  # doctest: +SKIP
        >>> bound.binding, bound.seconds  # doctest: +SKIP
        ('cut', 0.81)

    The parts, where M is what the device holds beside the workspace:

    - `compute`: every operator runs at least once, one after the other.
    - `persistent` and `cut`: hold for any order (see `forced_bounds`).
    - `chain`: for any order; along operators that run one after the other in all of them (see
      `chain_bound`).
    - `remaking`: for any order, if operators may run again; what is made again needs its operands,
      and they theirs (see `remaking_bound`).
    - `residency_lp`: for a frozen order. Variables say which share of a value leaves in each gap
      between two uses (or is made again, if recomputation is free); at every position what is left
      fits into M; what leaves comes back; what leaves for the first time and changes in the step
      goes out. T is at least the time to compute, with what is made again, and the time of the
      bytes on each direction. Every plan of this order is a solution with shares 0 and 1, so the
      optimum with shares in between is not above it.
    - `windows`: for a frozen order; bytes that leave before a position and return after it need
      time before and after it (see `window_bound`).

    Args:
        graph: The step.
        operator_seconds: Time of each operator.
        budget: Bytes of each tier; a tier of None does not exist, except the device, which then
            is as large as needed.
        machine: Rates of the links.
        order: With `reorder=False`: the order of the first runs of the operators; None: that of
            the program.
        reorder: Whether other orders are allowed.
        recompute: Whether operators may run again.
        time_limit: Seconds of work after which no other part is begun; parts that are missing
            then are logged, and not in the result.

    Returns:
        The bound, its parts, and which of them binds.

    Raises:
        InfeasibleError: One operator alone, with what cannot be elsewhere while it runs, does not
            fit.

    Forced-live cuts and the residency of a fixed order follow OLLA (Steiner et al. 2022) and
    Checkmate (Jain et al. 2020, section 4) in what they count; the bounds in time are our own.
    """
    deadline = time.monotonic() + time_limit
    compute = float(sum(operator_seconds))
    parts = {"compute": compute}
    frozen = None if reorder else list(range(len(graph.operators)) if order is None else order)
    capacity = _arena_bytes(graph, budget)
    if capacity is None or not graph.operators:
        return _bound(parts)
    program_order = range(len(graph.operators))
    lives = lives_of(graph, program_order if frozen is None else frozen, again=recompute)
    _require_room(graph, frozen, lives, capacity)
    rates = _rates(budget, machine)
    if rates.inward <= 0 or rates.outward <= 0:
        return _bound(parts)
    solvers: dict[str, Callable[[float], float | None]] = {}
    seconds = np.asarray(operator_seconds, dtype=np.float64)
    if len(graph.operators) <= MAX_OPERATORS:
        forced = forced_of(graph, operator_seconds, recompute=recompute)
        free = forced_bounds(forced, operator_seconds, capacity, rates)
        parts |= {name: bound * _SAFETY for name, bound in free.items()}
        if recompute:
            solvers["remaking"] = lambda time_limit: remaking_bound(
                graph, forced, operator_seconds, capacity, rates, time_limit=time_limit
            )
        if frozen is None:
            solvers["chain"] = lambda time_limit: chain_bound(
                graph,
                forced,
                operator_seconds,
                capacity,
                rates,
                recompute=recompute,
                time_limit=time_limit,
            )
    if frozen is not None:
        fixed = graph, lives, seconds[frozen], capacity, rates, seconds if recompute else None
        solvers["windows"] = lambda time_limit: window_bound(*fixed, time_limit=time_limit)
        solvers["residency_lp"] = lambda time_limit: residency_bound(*fixed, time_limit=time_limit)
        solvers["windows, finer"] = lambda time_limit: window_bound(
            *fixed, time_limit=time_limit, num_cuts=2 * NUM_CUTS
        )
    for done, (name, solve) in enumerate(solvers.items()):
        left = (deadline - time.monotonic()) / (1 if done + 1 == len(solvers) else 2)
        bound = solve(left) if left > 0 else None
        if bound is None:
            _log.info("the lower bound %r is left out: it takes longer than allowed", name)
        else:
            name = name.partition(",")[0]  # other numbers of slots give different bounds
            parts[name] = max(bound * _SAFETY, parts.get(name, 0.0))
    return _bound(parts)


def _bound(parts: dict[str, float]) -> Bound:
    binding = max(parts, key=lambda name: parts[name])
    return Bound(seconds=parts[binding], binding=binding, seconds_of=parts)


def _arena_bytes(graph: StepGraph, budget: Budget) -> int | None:
    """What the device holds beside the workspace; None: as much as needed."""
    if budget.device_bytes is None:
        return None
    return budget.device_bytes - max((o.workspace_bytes for o in graph.operators), default=0)


def _rates(budget: Budget, machine: MachineProfile) -> Rates:
    tiers = {Tier.HOST: budget.host_bytes, Tier.FILE: budget.file_bytes}
    inward = outward = 0.0
    for link, profile in machine.links.items():
        if link.destination == Tier.DEVICE and tiers[link.source] is not None:
            inward += profile.bytes_per_second
        if link.source == Tier.DEVICE and tiers[link.destination] is not None:
            outward += profile.bytes_per_second
    return Rates(inward, outward)


def _require_room(
    graph: StepGraph, frozen: Sequence[int] | None, lives: Lives, capacity: int
) -> None:
    """Refuse what no plan can do: what has to be there while an operator runs does not fit."""
    needed = lives.used_bytes if frozen is None else lives.live_bytes - lives.evictable_bytes()
    position = int(np.argmax(needed))
    if needed[position] <= capacity:
        return
    operator = graph.operators[position if frozen is None else frozen[position]]
    workspace_bytes = max(o.workspace_bytes for o in graph.operators)
    raise InfeasibleError(
        f"{operator.name!r} alone needs {needed[position]} bytes for what it reads and makes; the "
        f"budget leaves {capacity} beside {workspace_bytes} of workspace",
        minimum_device_bytes=int(needed[position]) + workspace_bytes,
        operator=operator.name,
    )


def residency_bound(
    graph: StepGraph,
    lives: Lives,
    seconds: np.ndarray,
    capacity: int,
    rates: Rates,
    again: np.ndarray | None,
    *,
    time_limit: float,
) -> float | None:
    """Solve the linear program of what is where in a fixed order.

    Columns: for each gap the share x that leaves and comes back, and z that is made again; for each
    life that has to be written the share y; for each operator how often r it runs again; for each
    position the bytes that are missing; T. Rows: missing bytes change by s(x + z) where a gap
    begins and ends, and are at least what is too much; y >= x; r >= the sum of z over the gaps of
    a value, since what is made again for one gap is not there in the next one that it leaves in;
    T >= C + sum of c r, T >= sum of s x / in, T >= sum of s y / out.

    Args:
        graph: The step.
        lives: Lives and gaps of the order.
        seconds: Time of the operator at each position.
        capacity: Bytes of the arena.
        rates: Of the links.
        again: Time of each operator (by index) if it may run again; None if none may.
        time_limit: Seconds.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    num_positions, unit = len(seconds), float(max(capacity, 1))
    program = LinearProgram()
    total = program.column(cost=1.0)
    excess = lives.live_bytes - capacity
    if excess.max(initial=0) <= 0:
        return float(seconds.sum())
    missing = _missing_columns(program, excess, unit)
    change: list[tuple[list[int], list[float]]] = [([], []) for _ in range(num_positions)]
    moved_in: tuple[list[int], list[float]] = ([], [])
    across: tuple[list[int], list[float]] = ([], [])  # missing at position 0
    written: dict[int, int] = {}
    runs: dict[int, int] = {}
    remade: dict[int, list[int]] = {}
    for gap in range(len(lives.gap_life)):
        life = int(lives.gap_life[gap])
        size = float(lives.num_bytes[life]) / unit
        shares = [program.column(upper=1.0)]
        moved_in[0].append(shares[0])
        moved_in[1].append(size)
        if not lives.clean[life]:
            if life not in written:
                written[life] = program.column(upper=1.0)
            program.row([written[life], shares[0]], [1.0, -1.0], lower=0.0)
        made_by = int(lives.made_by[life])
        if again is not None and made_by >= 0 and graph.operators[made_by].recomputable:
            shares.append(program.column(upper=1.0))
            program.row(shares, [1.0, 1.0], upper=1.0)
            remade.setdefault(life, []).append(shares[1])
        begin, end = int(lives.gap_begin[gap]) + 1, int(lives.gap_end[gap])
        for position, sign in ((begin, 1.0), (end, -1.0)):
            columns, factors = change[position % num_positions]
            columns += shares
            factors += [sign * size] * len(shares)
        if begin == 0 or begin <= num_positions < end:
            across[0].extend(shares)
            across[1].extend([size] * len(shares))
    for life, columns in remade.items():
        made_by = int(lives.made_by[life])
        if made_by not in runs:
            runs[made_by] = program.column()
        program.row([runs[made_by], *columns], [1.0, *[-1.0] * len(columns)], lower=0.0)
    _missing_rows(program, missing, change, across)
    compute = float(seconds.sum())
    scale = max(compute, 1e-30)  # times in units of the time to compute
    inward, outward = unit / rates.inward / scale, unit / rates.outward / scale
    program.row([total, *moved_in[0]], [1.0, *(-inward * size for size in moved_in[1])], lower=0.0)
    sizes = [float(lives.num_bytes[life]) / unit for life in written]
    program.row([total, *written.values()], [1.0, *(-outward * size for size in sizes)], lower=0.0)
    cost = [] if again is None else [-float(again[operator]) / scale for operator in runs]
    program.row([total, *runs.values()], [1.0, *cost], lower=compute / scale)
    bound = program.solve(time_limit=time_limit)
    return None if bound is None else bound * scale


def _missing_columns(program: LinearProgram, excess: np.ndarray, unit: float) -> list[int]:
    return [program.column(lower=max(float(bytes_) / unit, 0.0)) for bytes_ in excess]


def _missing_rows(
    program: LinearProgram,
    missing: list[int],
    change: list[tuple[list[int], list[float]]],
    across: tuple[list[int], list[float]],
) -> None:
    """Missing bytes at a position are those at the one before and what changes between."""
    program.row([missing[0], *across[0]], [1.0, *(-f for f in across[1])], lower=0.0, upper=0.0)
    for position, (columns, factors) in list(enumerate(change))[1:]:
        program.row(
            [missing[position], missing[position - 1], *columns],
            [1.0, -1.0, *(-factor for factor in factors)],
            lower=0.0,
            upper=0.0,
        )


def working_set_bytes(graph: StepGraph) -> int:
    """Return the least bytes with which every operator alone can run, workspace included."""
    lives = lives_of(graph, range(len(graph.operators)))
    workspace_bytes = max((o.workspace_bytes for o in graph.operators), default=0)
    return int(lives.used_bytes.max(initial=0)) + workspace_bytes
