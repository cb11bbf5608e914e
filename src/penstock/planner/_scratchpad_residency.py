"""For one order: which buffers leave between two uses, exactly; and what no order can avoid.

Between two uses that are not neighbours a buffer is either bridged (it stays) or spilled. At every
step, what is used there and what is bridged must fit each pool. That is an integer program of one
variable a gap (COSMA, arXiv 2311.18246, with the order fixed); its bound is nearly always tight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.planner._scratchpad_search import neighbours
from penstock.planner._scratchpad_types import ScratchpadGraph

_INTEGRAL = 1e-6
_MOST_PAIRS = 4_000_000  # of operators and buffers that the bound for all orders looks at


@dataclasses.dataclass(frozen=True)
class Gap:
    """The steps `[start, end)` between two uses of a buffer."""

    buffer: int
    start: int
    end: int


def gaps_of(graph: ScratchpadGraph, order: Sequence[int]) -> list[Gap]:
    """The gaps along an order; uses at neighbouring steps have none."""
    last: dict[int, int] = {}
    gaps = []
    for step, operator in enumerate(order):
        for buffer in graph.operators[operator].buffers:
            if buffer in last and last[buffer] + 1 < step:
                gaps.append(Gap(buffer, last[buffer] + 1, step))
            last[buffer] = step
    return gaps


class ResidencyProgram:
    """The integer program of one order; cuts may be added between solutions."""

    def __init__(
        self, graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int]
    ) -> None:
        try:
            import highspy
        except ImportError as error:
            raise ImportError(
                "scratchpad() solves integer programs by HiGHS: pip install highspy"
            ) from error
        self.gaps = gaps_of(graph, order)
        self._infinity = highspy.kHighsInf
        self._solver = highspy.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        for gap in self.gaps:
            cost = graph.buffers[gap.buffer].spill_cost
            self._solver.addVariable(0, 1, cost, type=highspy.HighsVarType.kInteger)
        for row in _rows(graph, pools, order, self.gaps):
            self._add(*row)

    def _add(self, variables: Sequence[int], sizes: Sequence[int], least: int) -> None:
        index = np.array(variables, dtype=np.int32)
        values = np.array(sizes, dtype=np.float64)
        self._solver.addRow(least, self._infinity, len(index), index, values)

    def cut(self, variables: Sequence[int]) -> None:
        """Ask for at least one of these gaps to be spilled."""
        self._add(variables, [1] * len(variables), 1)

    def solve(self, time_limit: float) -> tuple[set[int], int] | None:
        """The gaps to spill, and a lower bound on what any choice costs; None if none is found."""
        if not self.gaps:
            return set(), 0
        self._solver.setOptionValue("time_limit", max(time_limit, 0.1))
        self._solver.run()
        values = self._solver.getSolution().col_value
        info = self._solver.getInfo()
        if len(values) != len(self.gaps) or info.primal_solution_status != 2:
            return None
        bound = max(0, math.ceil(info.mip_dual_bound - _INTEGRAL))
        return {index for index, value in enumerate(values) if value > 0.5}, bound


def _rows(
    graph: ScratchpadGraph, pools: Mapping[str, int], order: Sequence[int], gaps: Sequence[Gap]
) -> list[tuple[list[int], list[int], int]]:
    """For each step that is too full: the gaps over it, their sizes, and how much has to go."""
    rows: dict[tuple[int, ...], int] = {}
    for pool, capacity in pools.items():
        load = np.zeros(len(order), dtype=np.int64)
        for step, operator in enumerate(order):
            used = [graph.buffers[b] for b in graph.operators[operator].buffers]
            load[step] = sum(buffer.size for buffer in used if buffer.pool == pool)
        crossing: list[list[int]] = [[] for _ in order]
        for index, gap in enumerate(gaps):
            buffer = graph.buffers[gap.buffer]
            if buffer.pool != pool:
                continue
            load[gap.start : gap.end] += buffer.size
            for step in range(gap.start, gap.end):
                crossing[step].append(index)
        for step in np.nonzero(load > capacity)[0]:
            key = tuple(crossing[step])
            rows[key] = max(rows.get(key, 0), int(load[step]) - capacity)
    sizes = [graph.buffers[gap.buffer].size for gap in gaps]
    return [(list(key), [sizes[index] for index in key], least) for key, least in rows.items()]


def bound_for_all_orders(graph: ScratchpadGraph, pools: Mapping[str, int]) -> int:
    """What the spills cost at least, whatever the order.

    While an operator runs, everything that one of its ancestors used and one of its descendants
    will use is alive. What of that exceeds a pool, beside the operator's own buffers, is outside
    then. Each pool has its own worst operator; buffers of two pools are different buffers.
    """
    num_pairs = len(graph.operators) * max(len(graph.buffers), 1)
    stride = -(-num_pairs // _MOST_PAIRS)  # any subset of operators gives a bound
    ancestors, descendants = _reachable(graph)
    users = [0] * len(graph.buffers)
    for index, operator in enumerate(graph.operators):
        for buffer in operator.buffers:
            users[buffer] |= 1 << index
    worst = dict.fromkeys(pools, 0)
    for index in range(0, len(graph.operators), stride):
        own = set(graph.operators[index].buffers)
        room = dict(pools)
        for b in own:
            room[graph.buffers[b].pool] -= graph.buffers[b].size
        alive: dict[str, list[int]] = {pool: [] for pool in pools}
        for b, mask in enumerate(users):
            if b not in own and mask & ancestors[index] and mask & descendants[index]:
                alive[graph.buffers[b].pool].append(b)
        for pool, buffers in alive.items():
            excess = sum(graph.buffers[b].size for b in buffers) - room[pool]
            worst[pool] = max(worst[pool], _least_cost(graph, buffers, excess))
    return sum(worst.values())


def _least_cost(graph: ScratchpadGraph, buffers: list[int], excess: int) -> int:
    """What it costs at least to have `excess` outside: the cheapest first, the last one in part."""
    cost = 0.0
    by_price = sorted(buffers, key=lambda b: graph.buffers[b].spill_cost / graph.buffers[b].size)
    for b in by_price:
        if excess <= 0:
            break
        buffer = graph.buffers[b]
        cost += buffer.spill_cost * min(1.0, excess / buffer.size)
        excess -= buffer.size
    return math.ceil(cost - _INTEGRAL)


def _reachable(graph: ScratchpadGraph) -> tuple[list[int], list[int]]:
    """The ancestors and the descendants of each operator, as sets of bits."""
    predecessors, successors = neighbours(graph)
    order = graph.topological_order()
    ancestors, descendants = [0] * len(order), [0] * len(order)
    for op in order:
        for before in predecessors[op]:
            ancestors[op] |= ancestors[before] | 1 << before
    for op in reversed(order):
        for after in successors[op]:
            descendants[op] |= descendants[after] | 1 << after
    return ancestors, descendants
