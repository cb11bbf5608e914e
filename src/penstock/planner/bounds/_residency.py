"""A bound for a fixed order: shares of the values that have to be absent in their holes."""

from __future__ import annotations

import numpy as np

from penstock.planner.bounds._fixed_order import FixedOrder
from penstock.solvers import LinearProgram

_Terms = tuple[list[int], list[float]]  # columns and their factors


def residency_bound(order: FixedOrder, *, time_limit: float) -> float | None:
    """Solve the linear program of the residency in a fixed order.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    if order.excess.max(initial=0) <= 0:
        return order.compute_seconds
    program = _HolesProgram(order)
    for hole in range(len(order.table.hole_range)):
        program.add_hole(hole)
    program.add_second_runs()
    program.add_missing_bytes()
    return program.least_seconds(time_limit)


# Holes h of live ranges v(h) with s(h) bytes, positions p, operators o; C is the time of all
# operators, c(o) that of one, M the arena, live(p) the live bytes if nothing is evicted. In the
# manner of Checkmate (Jain et al. 2020, section 4), with shares in place of integers.
#
# Columns, in bytes of the arena and times of C:
#   x(h)  the share of a value that leaves in h and comes back       0 <= x(h) <= 1
#   z(h)  the share that is recomputed after h                       0 <= z(h) <= 1
#   y(v)  the share that is written                                  0 <= y(v) <= 1
#   r(o)  second runs of o
#   m(p)  bytes that are absent at p                                 m(p) >= live(p) - M
#   T     time of the step
#
# minimise T subject to
#   m(p) = m(p - 1) + sum of s(h) (x(h) + z(h)) over holes that begin at p - 1
#                   - sum of s(h) (x(h) + z(h)) over holes that end at p
#   x(h) + z(h) <= 1
#   y(v) >= x(h)                         for each hole h of v, unless v is constant
#   r(o) >= sum of z(h) over h of v      o makes v: a value recomputed for one hole is absent in the
#                                        next one that it leaves in
#   T >= C + sum of c(o) r(o),  T >= sum of s(h) x(h) / in,  T >= sum of s(v) y(v) / out


class _HolesProgram:
    """The linear program above."""

    def __init__(self, order: FixedOrder) -> None:
        self.order = order
        self.unit = float(max(order.capacity, 1))
        self.program = LinearProgram()
        self.total = self.program.column(cost=1.0)
        excess = np.maximum(order.excess / self.unit, 0.0)
        self.missing = [self.program.column(lower=float(least)) for least in excess]
        self.change: list[_Terms] = [([], []) for _ in self.missing]
        self.across: _Terms = ([], [])  # absent at position 0
        self.moved_in: _Terms = ([], [])
        self.written: dict[int, int] = {}  # by live range
        self.remade: dict[int, list[int]] = {}  # by live range

    def add_hole(self, hole: int) -> None:
        """Add x and z of a hole."""
        order, table = self.order, self.order.table
        live_range = int(table.hole_range[hole])
        size = self._size(live_range)
        shares = [self.program.column(upper=1.0)]
        self.moved_in[0].append(shares[0])
        self.moved_in[1].append(size)
        if not table.is_constant[live_range]:
            if live_range not in self.written:
                self.written[live_range] = self.program.column(upper=1.0)
            self.program.row([self.written[live_range], shares[0]], [1.0, -1.0], lower=0.0)
        made_by = int(table.made_by[live_range])
        if order.again is not None and made_by >= 0 and order.graph.operators[made_by].recomputable:
            shares.append(self.program.column(upper=1.0))
            self.program.row(shares, [1.0, 1.0], upper=1.0)
            self.remade.setdefault(live_range, []).append(shares[1])
        num_positions = len(self.missing)
        begin, end = int(table.hole_begin[hole]) + 1, int(table.hole_end[hole])
        for position, sign in ((begin, 1.0), (end, -1.0)):
            columns, factors = self.change[position % num_positions]
            columns += shares
            factors += [sign * size] * len(shares)
        if begin == 0 or begin <= num_positions < end:
            self.across[0].extend(shares)
            self.across[1].extend([size] * len(shares))

    def add_second_runs(self) -> None:
        """Add r of the operators that make what is recomputed."""
        self.runs: dict[int, int] = {}
        for live_range, columns in self.remade.items():
            made_by = int(self.order.table.made_by[live_range])
            if made_by not in self.runs:
                self.runs[made_by] = self.program.column()
            factors = [1.0, *[-1.0] * len(columns)]
            self.program.row([self.runs[made_by], *columns], factors, lower=0.0)

    def add_missing_bytes(self) -> None:
        """Add the rows of m, which goes on from the end of the step at its beginning."""
        columns, factors = self.across
        self._equal([self.missing[0], *columns], [1.0, *(-factor for factor in factors)])
        for position, (columns, factors) in list(enumerate(self.change))[1:]:
            self._equal(
                [self.missing[position], self.missing[position - 1], *columns],
                [1.0, -1.0, *(-factor for factor in factors)],
            )

    def least_seconds(self, time_limit: float) -> float | None:
        """Add the rows of T, and solve."""
        order, again = self.order, self.order.again
        scale = max(order.compute_seconds, 1e-30)
        inward, outward = self.unit / order.rates.inward, self.unit / order.rates.outward
        columns, sizes = self.moved_in
        self._at_least(columns, [inward / scale * size for size in sizes])
        sizes = [self._size(live_range) for live_range in self.written]
        self._at_least([*self.written.values()], [outward / scale * size for size in sizes])
        costs = [] if again is None else [float(again[operator]) / scale for operator in self.runs]
        self._at_least([*self.runs.values()], costs, more=order.compute_seconds / scale)
        bound = self.program.solve(time_limit=time_limit)
        return None if bound is None else bound * scale

    def _size(self, live_range: int) -> float:
        return float(self.order.table.num_bytes[live_range]) / self.unit

    def _equal(self, columns: list[int], factors: list[float]) -> None:
        self.program.row(columns, factors, lower=0.0, upper=0.0)

    def _at_least(self, columns: list[int], seconds: list[float], more: float = 0.0) -> None:
        factors = [1.0, *(-each for each in seconds)]
        self.program.row([self.total, *columns], factors, lower=more)
