"""Plans of programs over fixed scratchpads: order, addresses and spills.

This is COSMA's problem (arXiv 2311.18246) with several pools and a price for each buffer. The order
is searched with a quick estimate; for the best orders the residency is solved exactly, and the
packer finds the addresses. A packing that fails comes back to the solver as a cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.errors import InfeasibleError
from penstock.planner.packing import Buffer, pack
from penstock.planner.scratchpad._bound import bound_all_orders
from penstock.planner.scratchpad._residency import (
    BufferHole,
    ResidencyProgram,
    find_holes,
    spill_greedily,
    used_bytes,
)
from penstock.planner.scratchpad._search import load_search, search_orders
from penstock.planner.scratchpad._types import Residency, ScratchpadGraph, ScratchpadPlan
from penstock.units import parse_count, parse_seconds

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
        ValueError, TypeError: A buffer's pool is not in `pools`, or an argument is not what it must
            be.
    """
    time_limit = parse_seconds(time_limit, name="time_limit", may_be_zero=True)
    seed = parse_count(seed, name="seed")
    pools = {name: parse_count(size, name=f"pools[{name!r}]") for name, size in pools.items()}
    _check_pools(graph, pools)
    start = time.perf_counter()
    lower_bound = bound_all_orders(graph, pools)
    orders = [graph.topological_order()]
    if reorder:
        # The last one is that of the operators' numbers, which is known to be good for many.
        orders = search_orders(graph, pools, time_limit=_SEARCH_SHARE * time_limit, seed=seed)
    best: ScratchpadPlan | None = None
    for done, order in enumerate(orders):
        left = time_limit - (time.perf_counter() - start)
        if best is not None and (left <= 0 or best.spill_cost == lower_bound):
            break
        share = max(0.0, left) / (len(orders) - done)
        found = _plan_exactly(graph, pools, order, best=best, time_limit=share)
        if found is None and best is None:
            found = _plan_greedily(graph, pools, order)
        if found is not None:
            best = found.to_plan(graph, order, lower_bound)
    if best is None:
        raise InfeasibleError(
            f"for none of {len(orders)} orders a residency with addresses was found within "
            f"time_limit={time_limit} s, neither exactly nor greedily, which does not mean that "
            "there is none; allow more time, or larger pools",
            proved=False,
        )
    searched = reorder and load_search() is not None
    return replace(best, searched=searched, plan_seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class _Spilled:
    """A residency of one order with addresses."""

    residencies: list[Residency]  # with their offsets
    holes: list[BufferHole]  # those that are spilled
    bound: int  # what any residency of the order costs at least

    def to_plan(
        self, graph: ScratchpadGraph, order: tuple[int, ...], lower_bound: int
    ) -> ScratchpadPlan:
        spill_cost = _cost(graph, self.holes)
        order_bound = max(self.bound, lower_bound)
        return ScratchpadPlan(
            order=order,
            residencies=tuple(self.residencies),
            spill_cost=spill_cost,
            num_spills=len(self.holes),
            order_lower_bound=order_bound,
            lower_bound=lower_bound,
            optimal_for_order=spill_cost == order_bound,
            searched=False,
            plan_seconds=0.0,
        )


def _cost(graph: ScratchpadGraph, holes: Iterable[BufferHole]) -> int:
    return sum(graph.buffers[hole.buffer].spill_cost for hole in holes)


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


def _plan_exactly(
    graph: ScratchpadGraph,
    pools: Mapping[str, int],
    order: Sequence[int],
    *,
    best: ScratchpadPlan | None,
    time_limit: float,
) -> _Spilled | None:
    """Return a residency of an order that is cheaper than `best`, or None."""
    deadline = time.perf_counter() + time_limit
    program, bound = ResidencyProgram(graph, pools, order), None
    for _ in range(_MOST_CUTS):
        solution = program.solve(deadline - time.perf_counter())
        if solution is None:
            return None
        spilled, least = solution
        bound = least if bound is None else bound  # later ones hold for the cuts only
        holes = [program.holes[index] for index in spilled]
        if best is not None and _cost(graph, holes) >= best.spill_cost:
            return None
        residencies = _residencies(graph, order, holes)
        too_high = _assign_offsets(graph, pools, residencies)
        if not too_high:
            return _Spilled(residencies, holes, bound)
        if time.perf_counter() > deadline:
            return None
        cut = _find_kept_beside(graph, program.holes, spilled, too_high)
        if not cut:
            return None
        program.cut(cut)
    return None


def _plan_greedily(
    graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int]
) -> _Spilled | None:
    """Spill greedily, for pools that get smaller until there are addresses as well."""
    holes = find_holes(graph, order)
    least = {pool: int(used_bytes(graph, order, pool).max()) for pool in pools}
    usable = dict(pools)
    while True:
        spilled = [holes[i] for i in sorted(spill_greedily(graph, usable, order, holes))]
        residencies = _residencies(graph, order, spilled)
        too_high = _assign_offsets(graph, pools, residencies)
        if not too_high:
            return _Spilled(residencies, spilled, bound=0)
        lacking = {graph.buffers[residency.buffer].pool for residency in too_high}
        smaller = {
            pool: max(least[pool], int(size * _LESS_ROOM)) if pool in lacking else size
            for pool, size in usable.items()
        }
        if smaller == usable:
            return None
        usable = smaller


def _residencies(
    graph: ScratchpadGraph, order: Sequence[int], spilled: Iterable[BufferHole]
) -> list[Residency]:
    """Return the residencies from first to last use without the spilled holes; no offsets yet."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, operator in enumerate(order):
        for b in graph.operators[operator].buffers:
            first.setdefault(b, step)
            last[b] = step + 1
    holes_of: dict[int, list[BufferHole]] = {}
    for hole in sorted(spilled, key=lambda hole: hole.start):
        holes_of.setdefault(hole.buffer, []).append(hole)
    residencies = []
    for b, start in first.items():
        for hole in holes_of.get(b, ()):
            residencies.append(Residency(buffer=b, start=start, end=hole.start, offset=-1))
            start = hole.end
        residencies.append(Residency(buffer=b, start=start, end=last[b], offset=-1))
    return residencies


def _assign_offsets(
    graph: ScratchpadGraph, pools: Mapping[str, int], residencies: list[Residency]
) -> list[Residency]:
    """Give the residencies their offsets, in place; return those that did not fit their pool."""
    too_high = []
    for pool, capacity in pools.items():
        inside = [i for i, r in enumerate(residencies) if graph.buffers[r.buffer].pool == pool]
        sizes = [graph.buffers[residencies[i].buffer].size for i in inside]
        buffers = [
            Buffer(residencies[i].start, residencies[i].end, size)
            for i, size in zip(inside, sizes, strict=True)
        ]
        try:
            packing = pack(buffers, capacity, time_limit=_PACK_SECONDS)
        except InfeasibleError:
            packing = pack(buffers, time_limit=0.0)
        for i, size, offset in zip(inside, sizes, packing.offsets, strict=True):
            residencies[i] = replace(residencies[i], offset=offset)
            if offset + size > capacity:
                too_high.append(residencies[i])
    return too_high


def _find_kept_beside(
    graph: ScratchpadGraph,
    holes: Sequence[BufferHole],
    spilled: set[int],
    too_high: Sequence[Residency],
) -> list[int]:
    """Return the holes that are not spilled and share a pool and a step with what did not fit."""
    return [
        index
        for index, hole in enumerate(holes)
        if index not in spilled
        and any(
            hole.start < residency.end
            and residency.start < hole.end
            and graph.buffers[hole.buffer].pool == graph.buffers[residency.buffer].pool
            for residency in too_high
        )
    ]
