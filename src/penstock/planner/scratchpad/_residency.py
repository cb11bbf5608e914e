"""For one order: which buffers leave between two uses, exactly; and what no order can avoid.

Between two uses that are not neighbours a buffer is either bridged (it stays) or spilled. At every
step, what is used there and what is bridged must fit each pool. That is an integer program of one
variable a gap (COSMA, arXiv 2311.18246, with the order fixed); its bound is nearly always tight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.planner.scratchpad._search import neighbours
from penstock.planner.scratchpad._types import ScratchpadGraph

_INTEGRAL = 1e-6
_MOST_OPERATORS = 4000  # of programs that get a bound for all orders
_MOST_CUTS = 48  # operators of which the cheapest cut is found


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise ImportError(
            "scratchpad() solves linear and integer programs by HiGHS: pip install highspy"
        ) from error
    return highspy


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
        highspy = _highspy()
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

    While an operator runs, its ancestors have run, its descendants have not, and of every other
    operator either is true: a cut. What was used before the cut and will be used after it is alive,
    and what of that exceeds a pool, beside the operator's own buffers, is outside. The linear
    relaxation over all cuts bounds what that costs at the operator. Each pool has its own worst
    operator, found among those where most is alive in any case; buffers of two pools are different
    buffers.
    """
    if len(graph.operators) > _MOST_OPERATORS:
        return 0
    reachable = _reachable(graph)
    return sum(
        _bound_of_pool(graph, pool, capacity, *reachable) for pool, capacity in pools.items()
    )


def _bound_of_pool(
    graph: ScratchpadGraph, pool: str, capacity: int, ancestors: list[int], descendants: list[int]
) -> int:
    users: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        for b in operator.buffers:
            if graph.buffers[b].pool == pool:
                users.setdefault(b, []).append(index)
    if sum(graph.buffers[b].size for b in users) <= capacity:
        return 0
    masks = {b: sum(1 << op for op in ops) for b, ops in users.items()}
    alive = [
        sum(
            graph.buffers[b].size
            for b, mask in masks.items()
            if mask >> op & 1 or (mask & ancestors[op] and mask & descendants[op])
        )
        for op in range(len(graph.operators))
    ]
    program = _CutProgram(graph, capacity, users, ancestors)
    worst = sorted(range(len(alive)), key=lambda op: (-alive[op], op))[:_MOST_CUTS]
    return max(program.bound(op, ancestors[op], descendants[op]) for op in worst)


class _CutProgram:
    """The cheapest cut of one pool, as a linear program whose variables' bounds fix the operator.

    Variables: for each operator whether it has run; for each buffer whether it is alive, and how
    much of it is outside.
    """

    def __init__(
        self,
        graph: ScratchpadGraph,
        capacity: int,
        users: dict[int, list[int]],
        ancestors: list[int],
    ) -> None:
        highspy = _highspy()
        self._users = users
        self._num_operators = len(graph.operators)
        self._solver = solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)
        for _ in graph.operators:
            solver.addVar(0, 1)
        for before, after in graph.edges:
            self._add([before, after], [1, -1], 0)
        sizes: list[float] = []
        for number, (b, ops) in enumerate(users.items()):
            is_alive = self._num_operators + 2 * number
            buffer = graph.buffers[b]
            solver.addVar(0, 1)
            solver.addVar(0, 1)
            solver.changeColCost(is_alive + 1, buffer.spill_cost)
            self._add([is_alive, is_alive + 1], [1, -1], 0)
            for one, other in _first_and_last(ops, ancestors):
                self._add([is_alive, one, other], [1, -1, 1], 0)
            sizes += [-buffer.size, buffer.size]
        own = range(self._num_operators, self._num_operators + len(sizes))
        self._add(list(own), sizes, -capacity)

    def _add(self, variables: Sequence[int], factors: Sequence[float], least: float) -> None:
        index = np.array(variables, dtype=np.int32)
        values = np.array(factors, dtype=np.float64)
        self._solver.addRow(least, np.inf, len(index), index, values)

    def bound(self, operator: int, ancestors: int, descendants: int) -> int:
        """What is outside while `operator` runs costs at least this."""
        for op in range(self._num_operators):
            has_run, has_not = ancestors >> op & 1, descendants >> op & 1
            self._solver.changeColBounds(op, float(has_run), 0.0 if has_not else 1.0)
        for number, ops in enumerate(self._users.values()):
            is_alive, is_own = self._num_operators + 2 * number, operator in ops
            self._solver.changeColBounds(is_alive, float(is_own), 1.0)
            self._solver.changeColBounds(is_alive + 1, 0.0, 0.0 if is_own else 1.0)
        self._solver.run()
        info = self._solver.getInfo()
        if info.dual_solution_status != 2:
            return 0
        return max(0, math.ceil(info.objective_function_value - _INTEGRAL))


def _first_and_last(ops: list[int], ancestors: list[int]) -> list[tuple[int, int]]:
    """Pairs of users of a buffer, such that it is alive only if some pair lies across the cut."""

    def precedes(one: int, other: int) -> bool:
        return bool(ancestors[other] >> one & 1)

    first = [op for op in ops if all(op == other or precedes(op, other) for other in ops)]
    last = [op for op in ops if all(op == other or precedes(other, op) for other in ops)]
    return [(one, other) for one in first or ops for other in last or ops if one != other]


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
