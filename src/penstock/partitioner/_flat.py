"""A split by one level of ranks, as one integer program: no recursion over factors of the ranks.

This is how Alpa (Zheng et al., OSDI 2022, section 4.2) and AutoParallel choose shardings, with the
memory of every operator in the place of that of parameters. For variables v (groups of storages and
of operators) with options i, costs c and bytes b,

    min sum c_v[i] x_vi + sum c_vw[i, j] y_vwij   over binary x,
    sum_i x_vi = 1,  sum_j y_vwij = x_vi,  sum_i y_vwij = x_wj,
    sum b_v[i] x_vi + sum b_vw[i, j] y_vwij <= budget   at each operator.

Rows of operators are added where a solution needs more than the budget, until none does.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np

from penstock.partitioner._level import Level, make_level
from penstock.partitioner._mesh import Mesh
from penstock.partitioner._split import FORBIDDEN, Model, StepSplit
from penstock.solvers import LinearProgram

_TOLERANCE = 1e-6  # of the solver, relative to the budget


class FlatSplit(NamedTuple):
    """Result of the integer program.

    Attributes:
        step: The best split within the budget; None if there is none, or none was found.
        cost: Its weighted exchange and repeated work; infinite without one.
        is_proved: Whether no other costs less, or none fits.
    """

    step: StepSplit | None
    cost: float
    is_proved: bool


def solve_flat(
    model: Model, mesh: Mesh, budget: int | None, time_limit: float = math.inf
) -> FlatSplit:
    """Return the cheapest split by a mesh of one level within a budget.

    Args:
        model: The step.
        mesh: The level.
        budget: Bytes of a rank; None: as many as needed.
        time_limit: Seconds.
    """
    until = time.monotonic() + time_limit
    level = make_level(model, mesh, None, {})
    program = _FlatProgram(level)
    while True:
        left = until - time.monotonic()
        if left <= 0:
            return FlatSplit(None, math.inf, False)
        options = program.solve(min(left, 1e6))
        if options is None:
            return FlatSplit(None, math.inf, program.is_infeasible)
        step = level.step_split(options)
        needed = model.device_bytes(step)
        if budget is None or needed.max(initial=0) <= budget * (1 + _TOLERANCE):
            return FlatSplit(step, model.exchange(step).cost, program.is_optimal)
        program.add_place(int(needed.argmax()), budget)


class _FlatProgram:
    """The integer program of a level."""

    def __init__(self, level: Level) -> None:
        self._level = level
        choices = level.choices
        self._program = LinearProgram()
        allowed = [table[table < FORBIDDEN] for table in choices.pair_costs.values()]
        costs = [*choices.costs, *allowed]
        self._unit = max((float(each.max(initial=0.0)) for each in costs), default=0.0) or 1.0
        self._columns = [
            [self._column(float(cost), integer=True) for cost in each] for each in choices.costs
        ]
        for each in self._columns:
            self._program.row(each, [1.0] * len(each), lower=1.0, upper=1.0)
        self._pairs = {key: self._add_pair(*key) for key in choices.pair_costs}

    def _column(self, cost: float, *, integer: bool) -> int:
        is_forbidden = cost >= FORBIDDEN
        return self._program.column(
            cost=0.0 if is_forbidden else cost / self._unit,
            upper=0.0 if is_forbidden else 1.0,
            integer=integer,
        )

    def _add_pair(self, a: int, b: int) -> list[list[int]]:
        table = self._level.choices.pair_costs[a, b]
        y = [[self._column(float(cost), integer=False) for cost in row] for row in table]
        for own, others in ((self._columns[a], y), (self._columns[b], zip(*y, strict=True))):
            for column, each in zip(own, others, strict=True):
                factors = [*[1.0] * len(each), -1.0]
                self._program.row([*each, column], factors, lower=0.0, upper=0.0)
        return y

    @property
    def is_infeasible(self) -> bool:
        """True if no solution exists."""
        return self._program.proved_infeasible

    @property
    def is_optimal(self) -> bool:
        """True if the last solution is an optimum."""
        return self._program.proved_optimal

    def add_place(self, place: int, budget: int) -> None:
        """Hold an operator to a budget."""
        level = self._level
        here = make_level(level.model, level.mesh, None, {place: 1.0}).choices
        columns, factors = [], []
        for v, num_bytes in enumerate(here.bytes):
            columns += self._columns[v]
            factors += num_bytes.tolist()
        for key, table in here.pair_bytes.items():
            for y_row, row in zip(self._pairs[key], table, strict=True):
                columns += y_row
                factors += row.tolist()
        scaled = [each / budget for each in factors]
        self._program.row(columns, scaled, upper=1.0)

    def solve(self, time_limit: float) -> np.ndarray | None:
        """Return an option for each variable; None if none was found."""
        self._program.solve(time_limit=time_limit)
        if not self._program.has_solution:
            return None
        values = self._program.values
        return np.array([int(np.argmax(values[each])) for each in self._columns])
