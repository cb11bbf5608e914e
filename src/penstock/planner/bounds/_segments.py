"""A bound for a fixed order in which large values are whole: resident, or absent.

A share of a weight is no weight. Where a few large values fill the arena, linear programs keep
shares of them and say that few bytes have to move. Here each is absent or resident. As that takes
integers, the order is cut into segments: a step takes at least the sum of the least times of its
segments, for each of which any value may be anywhere when it begins and when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.planner._live_ranges import occupied_bytes
from penstock.planner.bounds._fixed_order import FixedOrder
from penstock.solvers import LinearProgram

_LARGE = 1 / 16  # of the arena
_PARTS = 256  # of the arena: bytes that have to be absent are rounded down to so many parts of it
# Cuts of the first segments; then two are put together while there is time and the bound grows by
# so much, up to the most.
_NUM_CUTS, _MOST_CUTS, _WORTH_IT = 12, 192, 1.002
_TIME_SHARE = 1 / 8  # of what is left, for one program
_TOLERANCE = 2e-3  # of a segment: its optimum is not worth more
_SLACK = 1 - 1e-9  # of the times of halves, so that rounding makes no segment impossible


def segment_bound(order: FixedOrder, *, time_limit: float) -> float | None:
    """Solve an integer program for each segment of an order.

    Returns:
        The bound in seconds; it grows with the time.
    """
    deadline = time.monotonic() + time_limit
    step = _LargeValues(order)
    if not step.cuts:
        return order.compute_seconds
    num_cuts, least = _NUM_CUTS, _least_seconds(step, _NUM_CUTS, [], deadline)
    while len(least) > 1 and num_cuts < _MOST_CUTS and time.monotonic() < deadline:
        before, num_cuts = sum(least), 2 * num_cuts
        least = _least_seconds(step, num_cuts, least, deadline)
        if sum(least) < before * _WORTH_IT:
            break
    return float(order.seconds[: step.cuts[0]].sum()) + sum(least)


def _least_seconds(
    step: _LargeValues, num_cuts: int, halves: Sequence[float], deadline: float
) -> list[float]:
    """Bound the seconds of each segment of so many cuts, from below by the times of its halves."""
    found: dict[_OrderSegment, float] = {}
    least = []
    for index, first in enumerate(range(0, len(step.cuts), num_cuts)):
        segment = step.segment(first, min(first + num_cuts, len(step.cuts)))
        parts = [seconds * _SLACK for seconds in halves[2 * index : 2 * index + 2]]
        left = deadline - time.monotonic()
        if segment not in found and left > 0:
            found[segment] = segment.least_seconds(step.order, left * _TIME_SHARE, parts, num_cuts)
        least.append(max(sum(parts), found.get(segment, sum(segment.work))))
    return least


class _SegmentHole(NamedTuple):
    """A hole of a large value in a segment, in which it may be absent."""

    num_bytes: int  # of the value
    first: int  # the first cut in the hole
    last: int  # behind the last one
    returns: bool  # whether the hole ends in the segment, so that an absent value returns
    # Number of the copy that the segment writes before the value can be absent; None: the copy
    # exists.
    copy: int | None


class _OrderSegment(NamedTuple):
    """Operators between two positions, cut at those that use large values."""

    work: tuple[float, ...]  # per slot, from a cut to the next: seconds of its operators
    first: tuple[float, ...]  # of these the seconds of the first, the operator at the cut
    # Per cut: parts of the arena that have to be absent of the values in holes.
    missing: tuple[int, ...]
    holes: tuple[_SegmentHole, ...]  # holes of large values
    made_in: tuple[int, ...]  # per copy: the slot in which its value is made

    def least_seconds(
        self, order: FixedOrder, time_limit: float, halves: Sequence[float], num_cuts: int
    ) -> float:
        """Solve for the least time; return less, as far as it is known, if that takes too long.

        `halves` are the seconds that the first half of the cuts takes at least, and the second, as
        far as known.
        """
        if not any(self.missing):
            return sum(self.work)
        program = _SegmentProgram(self, order)
        for hole in self.holes:
            program.add_hole(hole)
        return program.least_seconds(time_limit, halves, num_cuts)


# Cuts c and slots k from cut to cut; holes h of s(h) bytes from cut first(h) to last(h); copies y.
# E(c) is the excess at a cut that small values cannot cover, W(k) the work of a slot, W1(k) that of
# its first operator.
#
# Columns, in bytes:
#   m(h, c)  1 if the value is absent at c, else 0
#   i(h, k)  bytes that return in k, if the hole ends in the segment
#   l(h, k)  of these the bytes that come in after the first operator of k
#   o(y, k)  bytes that leave in k, from the slot on in which the value of y is made
#   t(k)     time of k
#
# minimise   sum of t(k)
# subject to
#   sum of s(h) m(h, c) >= E(c)
#   s(h) m(h, c) <= sum of i(h, k) over k >= c
#   s(h) m(h, c) <= sum of o(y, k) over k < c                    h needs the copy y
#   i(h, c) <= s(h) (1 - m(h, c + 1))                            a value that is in has its place
#   o(y, c) <= s(h) (1 - m(h, c))                                a value that leaves has its place
#   l(h, c) >= i(h, c) - s(h) (1 - m(h, c))                      absent at c: in after its operator
#   t(k) >= W(k),  t(k) >= sum of i(h, k) / in,  t(k) >= sum of o(y, k) / out
#   t(k) >= W1(k) + sum of l(h, k) / in
#   t(k) >= W1(k) + sum of o(y, k) / out                         over y whose values are made in k
#   sum of t(k) over a half >= its least time


class _SegmentProgram:
    """The integer program above; times are in units of the operators' time."""

    def __init__(self, segment: _OrderSegment, order: FixedOrder) -> None:
        self.segment, self.rates = segment, order.rates
        self.unit, self.scale = float(order.capacity), max(sum(segment.work), 1e-30)
        self.program = LinearProgram()
        self.times = [self.program.column(cost=1.0) for _ in segment.work]
        self.inward, self.outward, self.late_in, self.late_out = (
            [[] for _ in segment.work] for _ in range(4)
        )
        self.absent: list[tuple[list[int], list[float]]] = [([], []) for _ in segment.work]
        self.copies = [
            {slot: self.program.column() for slot in range(made_in, len(segment.work))}
            for made_in in segment.made_in
        ]
        for copy in self.copies:
            for slot, column in copy.items():
                self.outward[slot].append(column)
            self.late_out[min(copy)].append(copy[min(copy)])

    def add_hole(self, hole: _SegmentHole) -> None:
        """Add m, i and l of a hole."""
        program, size = self.program, hole.num_bytes / self.unit
        cuts = range(hole.first, hole.last)
        absent = {cut: program.column(upper=1.0, integer=True) for cut in cuts}
        for cut, column in absent.items():
            self.absent[cut][0].append(column)
            self.absent[cut][1].append(size)
        if hole.returns:
            back = {slot: program.column() for slot in cuts}
            for slot, column in back.items():
                self.inward[slot].append(column)
                self.late_in[slot].append(program.column())
                late = [self.late_in[slot][-1], column, absent[slot]]
                program.row(late, [1.0, -1.0, -size], lower=-size)
                after = [back[other] for other in range(slot, hole.last)]
                program.row([absent[slot], *after], [-size, *[1.0] * len(after)], lower=0.0)
                if slot + 1 in absent:
                    program.row([column, absent[slot + 1]], [1.0, size], upper=size)
        if hole.copy is not None:
            copy = self.copies[hole.copy]
            for cut, column in absent.items():
                before = [copy[slot] for slot in copy if slot < cut]
                program.row([column, *before], [-size, *[1.0] * len(before)], lower=0.0)
                if cut in copy:
                    program.row([copy[cut], column], [1.0, size], upper=size)

    def least_seconds(self, time_limit: float, halves: Sequence[float], num_cuts: int) -> float:
        """Add the rows of E and t, and solve."""
        program, segment, scale = self.program, self.segment, self.scale
        for cut, parts in enumerate(segment.missing):
            if parts:
                program.row(*self.absent[cut], lower=parts / _PARTS)
        inward, outward = self.rates.inward, self.rates.outward
        for slot, seconds in enumerate(segment.work):
            program.row([self.times[slot]], [1.0], lower=seconds / scale)
            for columns, rate, before in (
                (self.inward[slot], inward, 0.0),
                (self.outward[slot], outward, 0.0),
                (self.late_in[slot], inward, segment.first[slot]),
                (self.late_out[slot], outward, segment.first[slot]),
            ):
                factors = [1.0, *[-self.unit / rate / scale] * len(columns)]
                program.row([self.times[slot], *columns], factors, lower=before / scale)
        for first, seconds in zip((0, num_cuts // 2), halves, strict=False):
            half = self.times[first : first + num_cuts // 2]
            program.row(half, [1.0] * len(half), lower=seconds / scale)
        program.solve(time_limit=time_limit, relative_gap=_TOLERANCE)
        return max(program.bound * scale, sum(segment.work))


class _LargeHole(NamedTuple):
    """A hole of a large value, between the uses at two positions, perhaps of other steps."""

    live_range: tuple[int, int]  # live range of the value, and the step that makes it
    begin: int  # position of the use before it
    end: int  # position of the use after it
    num_bytes: int  # of the value
    made_at: int | None  # position at which it is made; None if it need not be written


class _LargeValues:
    """The large values of a step.

    Values that may be recomputed count as small, for they need not return; small values may be
    absent wherever they are not used.

    Attributes:
        cuts: The positions of operators that use so many bytes.
    """

    def __init__(self, order: FixedOrder) -> None:
        self.order = order
        table, num_positions = order.table, len(order.seconds)
        is_large = table.num_bytes >= order.capacity * _LARGE
        if order.again is not None:
            again = [operator.recomputable for operator in order.graph.operators]
            is_large &= ~np.array([made >= 0 and again[made] for made in table.made_by.tolist()])
        self._holes: list[_LargeHole] = []
        for live_range, begin, end in zip(
            *(column.tolist() for column in (table.hole_range, table.hole_begin, table.hole_end)),
            strict=True,
        ):
            if not is_large[live_range]:
                continue
            num_bytes, is_constant = int(table.num_bytes[live_range]), table.is_constant[live_range]
            for shift in (0, num_positions):
                if begin < shift + num_positions and end > shift:
                    made_at = None if is_constant else int(table.defined[live_range]) - shift
                    key = live_range, shift
                    hole = _LargeHole(key, begin - shift, end - shift, num_bytes, made_at)
                    self._holes.append(hole)
        small = np.flatnonzero(~is_large[table.hole_range])
        begin, num_bytes = table.hole_begin[small] + 1, table.num_bytes[table.hole_range[small]]
        absent = occupied_bytes(begin, table.hole_end[small], num_bytes, num_positions)
        self._missing = order.excess - absent
        # Operators that use large values are among those that use many bytes.
        self.cuts: list[int] = np.flatnonzero(table.used_bytes >= order.capacity * _LARGE).tolist()

    def segment(self, first: int, last: int) -> _OrderSegment:
        """Return the segment from one cut to another, exclusive, or to the end of the step."""
        order, cuts = self.order, np.array(self.cuts[first:last])
        end = self.cuts[last] if last < len(self.cuts) else len(order.seconds)
        begins = np.concatenate([[0.0], np.cumsum(order.seconds)])[[*cuts, end]]
        missing, holes = self._missing[cuts].astype(np.float64), []
        copies: dict[tuple[int, int], int] = {}
        made_in: list[int] = []
        for hole in self._holes:
            inside = np.searchsorted(cuts, [hole.begin + 1, hole.end])
            low, high = int(inside[0]), int(inside[1])
            if low >= high:
                continue
            returns = hole.end <= end
            copy = None
            if hole.made_at is not None and cuts[0] <= hole.made_at:
                if hole.live_range not in copies:
                    copies[hole.live_range] = len(made_in)
                    made_in.append(int(np.searchsorted(cuts, hole.made_at, side="right")) - 1)
                copy = copies[hole.live_range]
            elif not returns:
                missing[low:high] -= hole.num_bytes
                continue
            holes.append(_SegmentHole(hole.num_bytes, low, high, returns, copy))
        parts = np.floor(np.maximum(missing, 0.0) * _PARTS / order.capacity).astype(int)
        # Sums of equal times differ in their last digits.
        work = np.floor(np.diff(begins) * 1e9) / 1e9
        ahead = np.floor(order.seconds[cuts] * 1e9) / 1e9
        return _OrderSegment(
            tuple(work.tolist()),
            tuple(np.minimum(ahead, work).tolist()),
            tuple(parts.tolist()),
            tuple(holes),
            tuple(made_in),
        )
