"""Plan a program over fixed scratchpads: its order, its addresses, and what is spilled when.

This is COSMA's problem (arXiv 2311.18246) with several pools and a price for each buffer. The order
is searched with a quick estimate; for the best orders the residency is solved exactly, and the
packer finds the addresses. A packing that fails comes back to the solver as a cut.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from penstock.errors import InfeasibleError
from penstock.planner.packing import Buffer, pack
from penstock.planner.scratchpad._greedy import spill_greedily
from penstock.planner.scratchpad._residency import (
    Gap,
    ResidencyProgram,
    bound_for_all_orders,
    gaps_of,
)
from penstock.planner.scratchpad._search import search_orders
from penstock.planner.scratchpad._types import (
    Residency,
    ScratchpadGraph,
    ScratchpadOperator,
    ScratchpadPlan,
)

_SEARCH_SHARE = 0.6  # of the time limit; the rest is for residency and addresses
_MOST_CUTS = 200
_PACK_SECONDS = 2.0
_LESS_ROOM = 0.95  # of a pool in which greedy residencies had no addresses


def scratchpad(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    *,
    reorder: bool = True,
    time_limit: float = 60,
    seed: int = 0,
) -> ScratchpadPlan:
    """Find the order, the addresses and the spills of a program that cost the least extra traffic.

    The setting is that of COSMA (arXiv 2311.18246, section IV), with several pools. The rules of a
    plan are those of `check_scratchpad`.

    Example:
        >>> graph = ScratchpadGraph(
        ...     operators=(ScratchpadOperator("load", (0,)), ScratchpadOperator("use", (0,))),
        ...     buffers=(ScratchpadBuffer("L1", 16, 16),),
        ...     edges=((0, 1),),
        ... )
        >>> scratchpad(graph, {"L1": 4096}).spill_cost
        0

    Args:
        graph: The program; `ScratchpadGraph.from_npu_json` reads one.
        pools: The capacity of each pool, in the unit of the buffers' sizes.
        reorder: Whether to search for an order; otherwise it is that of the operators' numbers, as
            far as the edges allow (`ScratchpadGraph.topological_order`).
        time_limit: Seconds, about: a step that has begun is finished.
        seed: The plan depends on it and on nothing else, unless the time limit ends the search.

    Returns:
        The plan, with a bound for its order (the integer program's) and one for all orders (what is
        alive at the worst operator in any order).

    Raises:
        InfeasibleError: The buffers of one operator exceed a pool (`operator` is its name); or no
            addresses were found (`proved` is False).
        ValueError: A buffer's pool is not in `pools`, or an argument is not what it must be.
        ImportError: highspy is not installed.
    """
    if not time_limit >= 0:
        raise ValueError(f"time_limit={time_limit}: must be a number of seconds, zero or more")
    _check_pools(graph, pools)
    start = time.perf_counter()
    lower_bound = bound_for_all_orders(graph, pools)
    orders = [graph.topological_order()]
    if reorder:
        # The last one is that of the operators' numbers, which is known to be good for many.
        orders = search_orders(graph, pools, time_limit=_SEARCH_SHARE * time_limit, seed=seed)
    best: ScratchpadPlan | None = None
    for done, order in enumerate(orders):
        left = time_limit - (time.perf_counter() - start)
        if best is not None and (left <= 0 or best.spill_cost == lower_bound):
            break
        most = None if best is None else best.spill_cost
        share = max(0.0, left) / (len(orders) - done)
        planned = _plan_order(graph, pools, order, most=most, time_limit=share)
        if planned is None and most is None:
            planned = _plan_greedily(graph, pools, order)
        if planned is None:
            continue
        residencies, spill_cost, num_spills, order_bound = planned
        best = ScratchpadPlan(
            order=order,
            residencies=tuple(residencies),
            spill_cost=spill_cost,
            num_spills=num_spills,
            order_lower_bound=max(order_bound, lower_bound),
            lower_bound=lower_bound,
            optimal_for_order=spill_cost == max(order_bound, lower_bound),
            plan_seconds=time.perf_counter() - start,
        )
    if best is None:
        raise InfeasibleError(
            f"for none of {len(orders)} orders a residency with addresses was found within "
            f"time_limit={time_limit} s, neither exactly nor greedily, which does not mean that "
            "there is none; allow more time, or larger pools",
            proved=False,
        )
    return best


def _check_pools(graph: ScratchpadGraph, pools: Mapping[str, int]) -> None:
    missing = sorted({buffer.pool for buffer in graph.buffers} - set(pools))
    if missing:
        raise ValueError(f"pools={dict(pools)} lacks the pools {missing} of the graph's buffers")
    for operator in graph.operators:
        needed = dict.fromkeys(pools, 0)
        for b in operator.buffers:
            needed[graph.buffers[b].pool] += graph.buffers[b].size
        for pool, size in needed.items():
            if size > pools[pool]:
                raise InfeasibleError(
                    f"operator {operator.name!r} uses {size} of pool {pool!r} at once, whose "
                    f"capacity is {pools[pool]}",
                    minimum_device_bytes=size,
                    operator=operator.name,
                    proved=True,
                )


def _plan_order(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    order: Sequence[int],
    *,
    most: int | None,
    time_limit: float,
) -> tuple[list[Residency], int, int, int] | None:
    """Residencies, their cost, the spills' number, a bound; None if not below `most`."""
    deadline = time.perf_counter() + time_limit
    program, bound = ResidencyProgram(graph, pools, order), None
    for _ in range(_MOST_CUTS):
        solution = program.solve(deadline - time.perf_counter())
        if solution is None:
            return None
        spilled, least = solution
        bound = least if bound is None else bound  # later ones hold for the cuts only
        cost = sum(graph.buffers[program.gaps[index].buffer].spill_cost for index in spilled)
        if most is not None and cost >= most:
            return None
        residencies = _residencies(graph, order, [program.gaps[index] for index in spilled])
        too_high = _place(graph, pools, residencies)
        if not too_high:
            return residencies, cost, len(spilled), bound
        if time.perf_counter() > deadline:
            return None
        cut = _bridged_beside(graph, program.gaps, spilled, too_high)
        if not cut:
            return None
        program.cut(cut)
    return None


def _plan_greedily(
    graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int]
) -> tuple[list[Residency], int, int, int] | None:
    """The same without the solver: for pools that get smaller until there are addresses as well."""
    gaps = gaps_of(graph, order)
    least = {
        pool: max(_used(graph, operator, pool) for operator in graph.operators) for pool in pools
    }
    room = dict(pools)
    while True:
        spilled = sorted(spill_greedily(graph, room, order, gaps))
        residencies = _residencies(graph, order, [gaps[index] for index in spilled])
        too_high = _place(graph, pools, residencies)
        if not too_high:
            cost = sum(graph.buffers[gaps[index].buffer].spill_cost for index in spilled)
            return residencies, cost, len(spilled), 0
        lacking = {graph.buffers[stay.buffer].pool for stay in too_high}
        smaller = {
            pool: max(least[pool], int(size * _LESS_ROOM)) if pool in lacking else size
            for pool, size in room.items()
        }
        if smaller == room:
            return None
        room = smaller


def _used(graph: ScratchpadGraph, operator: ScratchpadOperator, pool: str) -> int:
    buffers = (graph.buffers[b] for b in operator.buffers)
    return sum(buffer.size for buffer in buffers if buffer.pool == pool)


def _residencies(
    graph: ScratchpadGraph, order: Sequence[int], spilled: Sequence[Gap]
) -> list[Residency]:
    """From first to last use, without the spilled gaps; no offsets yet."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, operator in enumerate(order):
        for b in graph.operators[operator].buffers:
            first.setdefault(b, step)
            last[b] = step + 1
    leaves: dict[int, list[Gap]] = {}
    for gap in sorted(spilled, key=lambda gap: gap.start):
        leaves.setdefault(gap.buffer, []).append(gap)
    residencies = []
    for b, start in first.items():
        for gap in leaves.get(b, ()):
            residencies.append(Residency(buffer=b, start=start, end=gap.start, offset=-1))
            start = gap.end
        residencies.append(Residency(buffer=b, start=start, end=last[b], offset=-1))
    return residencies


def _place(
    graph: ScratchpadGraph, pools: Mapping[str, int], residencies: list[Residency]
) -> list[Residency]:
    """Give the residencies their offsets, in place; return those that did not fit their pool."""
    too_high = []
    for pool, capacity in pools.items():
        inside = [i for i, r in enumerate(residencies) if graph.buffers[r.buffer].pool == pool]
        stays = [residencies[i] for i in inside]
        buffers = [Buffer(r.start, r.end, graph.buffers[r.buffer].size) for r in stays]
        try:
            packing = pack(buffers, capacity, time_limit=_PACK_SECONDS)
        except InfeasibleError:
            packing = pack(buffers, time_limit=0.0)
        for i, stay, offset in zip(inside, stays, packing.offsets, strict=True):
            residencies[i] = Residency(
                buffer=stay.buffer, start=stay.start, end=stay.end, offset=offset
            )
            if offset + graph.buffers[stay.buffer].size > capacity:
                too_high.append(residencies[i])
    return too_high


def _bridged_beside(
    graph: ScratchpadGraph,
    gaps: Sequence[Gap],
    spilled: set[int],
    too_high: Sequence[Residency],
) -> list[int]:
    """The bridged gaps that share a pool and a step with what did not fit."""
    return [
        index
        for index, gap in enumerate(gaps)
        if index not in spilled
        and any(
            gap.start < stay.end
            and stay.start < gap.end
            and graph.buffers[gap.buffer].pool == graph.buffers[stay.buffer].pool
            for stay in too_high
        )
    ]
