"""Integer programs of bins: fewer bins than first fit finds, and then the lightest last one.

Samples of one size are a class c of size s_c and count n_c. A pattern p is a bin that holds a_cp
samples of class c. Of K bins with the cap C no more than W = K C - sum of s_c n_c is left empty, so
a pattern is possible only if its load l_p = sum over c of s_c a_cp is at least C - W. Where these
are few, the program is that of Gilmore and Gomory (1961), whose linear relaxation is tight: y_p
bins have pattern p, and the last one has it if z_p = 1.

    sum over p of a_cp (y_p + z_p) = n_c     for each class c
    sum over p of z_p = 1,   sum over p of y_p = K - 1
    y_p, z_p whole numbers >= 0

Where they are many, much room is left empty, and the plain program does, with x_cb samples of class
c in bin b:

    sum over b of x_cb = n_c     for each class c
    sum over c of s_c x_cb <= C  for each bin b
    x_cb whole numbers >= 0

No two samples above C / 2 share a bin: they are in bins 0, 1, ... in their order.

First K is the least number for which there is a solution. Then the last bin becomes light: minimise
sum over p of l_p z_p, or sum over c of s_c x_cb for b = K - 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.solvers import LinearProgram

_MAX_PATTERNS = 6000
_MAX_VISITS = 60_000  # of the search for patterns
# Nodes of branch and bound, which are the same on every machine: for fewer bins, for lighter ones.
_FEWEST_NODES, _LIGHTEST_NODES = 20, 1
_MOST_COLUMNS = 200  # of a program for lighter bins, which larger ones seldom find in time

Counts = tuple[int, ...]
"""Samples of each class."""


@dataclass(frozen=True)
class Improvement:
    """Result of the programs: bins, if any were found, and what was proved."""

    bins: tuple[Counts, ...] | None
    """For each bin the samples of each class; None: nothing better was found."""
    lower_bound: int
    """A number of bins below which there is no packing."""
    timed_out: bool
    """True if the time ended the search."""


def improve(
    sizes: Sequence[int], counts: Sequence[int], cap: int, bounds: tuple[int, int], seconds: float
) -> Improvement:
    """Search packings of fewest bins, and among those for one with a light bin.

    Args:
        sizes: Of the classes, distinct and descending, from 1 to `cap`.
        counts: Samples of each class.
        cap: The most that a bin holds.
        bounds: A number of bins that is too small or just enough, and one that is enough.
        seconds: Time limit.
    """
    deadline = time.monotonic() + seconds
    least, most = bounds
    bins, num_bins, timed_out = None, most, False
    for tried in range(least, most):
        program = _BinProgram(sizes, counts, cap, tried)
        bins = program.solve(deadline - time.monotonic(), _FEWEST_NODES)
        timed_out |= program.timed_out
        if bins is not None:
            num_bins = tried
            break
        if program.proved_infeasible and tried == least:
            least += 1
    lighter = _BinProgram(sizes, counts, cap, num_bins, minimise=True)
    if not timed_out and lighter.num_columns <= _MOST_COLUMNS:
        bins = lighter.solve(deadline - time.monotonic(), _LIGHTEST_NODES) or bins
        timed_out = lighter.timed_out
    return Improvement(bins, least, timed_out)


class _BinProgram:
    """The program for one number of bins, with or without a light last one."""

    def __init__(
        self,
        sizes: Sequence[int],
        counts: Sequence[int],
        cap: int,
        num_bins: int,
        *,
        minimise: bool = False,
    ) -> None:
        self._sizes, self._counts, self._cap, self._num_bins = sizes, counts, cap, num_bins
        self._minimise = minimise
        self.proved_infeasible = self.timed_out = False
        total = sum(map(int.__mul__, sizes, counts))
        least = max(total - (num_bins - 1) * cap, 0)
        self._patterns = find_patterns(sizes, counts, cap, least)
        kinds = num_bins if self._patterns is None else 2 * len(self._patterns)
        self.num_columns = kinds * (len(sizes) if self._patterns is None else 1)

    def solve(self, seconds: float, max_nodes: int) -> tuple[Counts, ...] | None:
        """Return bins, or None where none were found within the limits."""
        if seconds <= 0:
            self.timed_out = True
            return None
        if self._patterns == []:
            self.proved_infeasible = True
            return None
        program = LinearProgram()
        columns: list[list[int]] = []
        if self._patterns is None:
            columns = self._add_bins(program)
        else:
            self._add_patterns(program, self._patterns)
        program.solve(time_limit=seconds, relative_gap=1e-4, max_nodes=max_nodes)
        self.proved_infeasible, self.timed_out = program.proved_infeasible, program.timed_out
        if not program.has_solution:
            return None
        values = np.rint(program.values).astype(int)
        if self._patterns is None:
            bins = tuple(zip(*values[np.array(columns)].tolist(), strict=True))
        else:
            bins = _of_patterns(values.tolist(), self._patterns)
        return bins if self._is_packing(bins) else None

    def _add_patterns(self, program: LinearProgram, patterns: list[Counts]) -> None:
        """Add the columns y_p, then z_p, and their rows."""
        loads = [sum(map(int.__mul__, self._sizes, each)) / self._cap for each in patterns]
        costs = loads if self._minimise else [0.0] * len(patterns)
        ordinary = [program.column(integer=True) for _ in patterns]
        lightest = [program.column(cost=cost, upper=1.0, integer=True) for cost in costs]
        for number, count in enumerate(self._counts):
            using = [p for p, each in enumerate(patterns) if each[number]]
            factors = [float(patterns[p][number]) for p in using]
            program.row(
                [ordinary[p] for p in using] + [lightest[p] for p in using],
                factors * 2,
                lower=count,
                upper=count,
            )
        ones = [1.0] * len(patterns)
        program.row(ordinary, ones, lower=self._num_bins - 1, upper=self._num_bins - 1)
        program.row(lightest, ones, lower=1.0, upper=1.0)

    def _add_bins(self, program: LinearProgram) -> list[list[int]]:
        """Add the columns x_cb and their rows; return them by class and bin."""
        bins = range(self._num_bins)
        columns, above_half = [], 0
        for size, count in zip(self._sizes, self._counts, strict=True):
            own = range(above_half, above_half + count) if 2 * size > self._cap else None
            if own is not None:
                above_half += count
            each = []
            for number in bins:
                upper = count if own is None else int(number in own)
                is_light = self._minimise and number == self._num_bins - 1
                cost = size / self._cap if is_light else 0.0
                each.append(program.column(cost=cost, upper=float(upper), integer=True))
            columns.append(each)
            program.row(each, [1.0] * self._num_bins, lower=count, upper=count)
        factors = [size / self._cap for size in self._sizes]
        for number in bins:
            program.row([each[number] for each in columns], factors, upper=1.0)
        return columns

    def _is_packing(self, bins: tuple[Counts, ...]) -> bool:
        """Compare bins in whole numbers: HiGHS keeps rows to a tolerance only."""
        used = tuple(map(sum, zip(*bins, strict=True)))
        loads = [sum(map(int.__mul__, self._sizes, each)) for each in bins]
        return used == tuple(self._counts) and max(loads) <= self._cap


def _of_patterns(values: list[int], patterns: list[Counts]) -> tuple[Counts, ...]:
    """Return the bins of the columns y_p and z_p."""
    times = zip(values[: len(patterns)], values[len(patterns) :], strict=True)
    return tuple(
        pattern
        for pattern, (y, z) in zip(patterns, times, strict=True)
        for _ in range(max(y, 0) + max(z, 0))
    )


def find_patterns(
    sizes: Sequence[int], counts: Sequence[int], cap: int, least: int
) -> list[Counts] | None:
    """Return all ways to fill a bin with a load from `least` to `cap`; None if these are too many.

    Args:
        sizes: Of the classes, descending.
        counts: Samples of each class.
        cap: The most that a bin holds.
        least: The least load of a pattern.
    """
    # The load that all classes from one on could add.
    behind = [0]
    for size, count in zip(reversed(sizes), reversed(counts), strict=True):
        behind.append(behind[-1] + size * count)
    behind.reverse()
    patterns: list[Counts] = []
    visits = 0
    stack: list[tuple[int, Counts]] = [(0, ())]  # the load of the first classes of a pattern
    while stack:
        load, chosen = stack.pop()
        visits += 1
        if visits > _MAX_VISITS or len(patterns) > _MAX_PATTERNS:
            return None
        number = len(chosen)
        if load + behind[number] < least:
            continue
        if number == len(sizes):
            patterns.append(chosen)
            continue
        room = min(counts[number], (cap - load) // sizes[number])
        stack += [(load + sizes[number] * taken, (*chosen, taken)) for taken in range(room + 1)]
    return patterns
