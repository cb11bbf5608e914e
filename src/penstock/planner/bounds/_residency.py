"""A bound for a fixed order: which shares of which values have to be elsewhere in their gaps."""

from __future__ import annotations

import numpy as np

from penstock.planner._linear_program import LinearProgram
from penstock.planner.bounds._fixed_order import FixedOrder

_Terms = tuple[list[int], list[float]]  # columns and their factors


def residency_bound(order: FixedOrder, *, time_limit: float) -> float | None:
    """Solve the linear program of what is where in a fixed order.

    Columns: for each gap the share x that leaves and comes back, and z that is made again; for each
    life that has to be written the share y; for each operator how often r it runs again; for each
    position the bytes that are missing; T. Rows: missing bytes change by s(x + z) where a gap
    begins and ends, and are at least what is too much; y >= x; r >= the sum of z over the gaps of
    a value, since what is made again for one gap is not there in the next one that it leaves in;
    T >= C + sum of c r, T >= sum of s x / in, T >= sum of s y / out.

    Args:
        order: The step.
        time_limit: Seconds.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    if order.excess.max(initial=0) <= 0:
        return order.compute_seconds
    program = _Program(order)
    for gap in range(len(order.table.hole_range)):
        program.add_gap(gap)
    program.add_second_runs()
    program.add_missing_bytes()
    return program.least_seconds(time_limit)


class _Program:
    """The linear program: bytes in units of the arena, seconds in units of the time to compute."""

    def __init__(self, order: FixedOrder) -> None:
        self.order = order
        self.unit = float(max(order.capacity, 1))
        self.program = LinearProgram()
        self.total = self.program.column(cost=1.0)
        excess = np.maximum(order.excess / self.unit, 0.0)
        self.missing = [self.program.column(lower=float(least)) for least in excess]
        self.change: list[_Terms] = [([], []) for _ in self.missing]
        self.across: _Terms = ([], [])  # missing at position 0
        self.moved_in: _Terms = ([], [])
        self.written: dict[int, int] = {}  # by life
        self.remade: dict[int, list[int]] = {}  # by life

    def add_gap(self, gap: int) -> None:
        """What of a life leaves, or is made again, and when that is missing."""
        order, lives = self.order, self.order.table
        life = int(lives.hole_range[gap])
        size = self._size(life)
        shares = [self.program.column(upper=1.0)]
        self.moved_in[0].append(shares[0])
        self.moved_in[1].append(size)
        if not lives.is_constant[life]:
            if life not in self.written:
                self.written[life] = self.program.column(upper=1.0)
            self.program.row([self.written[life], shares[0]], [1.0, -1.0], lower=0.0)
        made_by = int(lives.made_by[life])
        if order.again is not None and made_by >= 0 and order.graph.operators[made_by].recomputable:
            shares.append(self.program.column(upper=1.0))
            self.program.row(shares, [1.0, 1.0], upper=1.0)
            self.remade.setdefault(life, []).append(shares[1])
        num_positions = len(self.missing)
        begin, end = int(lives.hole_begin[gap]) + 1, int(lives.hole_end[gap])
        for position, sign in ((begin, 1.0), (end, -1.0)):
            columns, factors = self.change[position % num_positions]
            columns += shares
            factors += [sign * size] * len(shares)
        if begin == 0 or begin <= num_positions < end:
            self.across[0].extend(shares)
            self.across[1].extend([size] * len(shares))

    def add_second_runs(self) -> None:
        """An operator runs again at least as often as each of its results is made again."""
        self.runs: dict[int, int] = {}
        for life, columns in self.remade.items():
            made_by = int(self.order.table.made_by[life])
            if made_by not in self.runs:
                self.runs[made_by] = self.program.column()
            factors = [1.0, *[-1.0] * len(columns)]
            self.program.row([self.runs[made_by], *columns], factors, lower=0.0)

    def add_missing_bytes(self) -> None:
        """Missing bytes at a position are those at the one before and what changes between."""
        columns, factors = self.across
        self._equal([self.missing[0], *columns], [1.0, *(-factor for factor in factors)])
        for position, (columns, factors) in list(enumerate(self.change))[1:]:
            self._equal(
                [self.missing[position], self.missing[position - 1], *columns],
                [1.0, -1.0, *(-factor for factor in factors)],
            )

    def least_seconds(self, time_limit: float) -> float | None:
        """Solve; a step takes its operators' time and that of each direction's bytes."""
        order, again = self.order, self.order.again
        scale = max(order.compute_seconds, 1e-30)
        inward, outward = self.unit / order.rates.inward, self.unit / order.rates.outward
        columns, sizes = self.moved_in
        self._at_least(columns, [inward / scale * size for size in sizes])
        sizes = [self._size(life) for life in self.written]
        self._at_least([*self.written.values()], [outward / scale * size for size in sizes])
        costs = [] if again is None else [float(again[operator]) / scale for operator in self.runs]
        self._at_least([*self.runs.values()], costs, more=order.compute_seconds / scale)
        bound = self.program.solve(time_limit=time_limit)
        return None if bound is None else bound * scale

    def _size(self, life: int) -> float:
        return float(self.order.table.num_bytes[life]) / self.unit

    def _equal(self, columns: list[int], factors: list[float]) -> None:
        self.program.row(columns, factors, lower=0.0, upper=0.0)

    def _at_least(self, columns: list[int], seconds: list[float], more: float = 0.0) -> None:
        """The step takes at least so much for each column, and more."""
        factors = [1.0, *(-each for each in seconds)]
        self.program.row([self.total, *columns], factors, lower=more)
