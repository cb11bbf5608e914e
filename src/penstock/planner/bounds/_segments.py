"""A bound for a fixed order in which large values are whole: one has its place, or it has not.

A share of a weight is no weight. Where a few large values fill the arena, linear programs keep
shares of them and say that little has to move. Here each is missing or there. As that takes
integers, the order is cut into stretches: a step takes at least the sum of the least times of its
stretches, for each of which anything may be anywhere when it begins and when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.planner._linear_program import LinearProgram
from penstock.planner.bounds._fixed_order import FixedOrder

_LARGE = 1 / 16  # of the arena
_PARTS = 256  # of the arena: what has to be missing is rounded down to so many parts of it
# Cuts of the first stretches; then two are put together while there is time and the bound grows by
# so much, up to the most.
_NUM_CUTS, _MOST_CUTS, _WORTH_IT = 12, 192, 1.002
_TIME_SHARE = 1 / 8  # of what is left, for one program
_TOLERANCE = 2e-3  # of a stretch: its optimum is not worth more
_SLACK = 1 - 1e-9  # of what halves take, so that rounding makes no stretch impossible


def stretch_bound(order: FixedOrder, *, time_limit: float) -> float | None:
    """Solve an integer program for each stretch of an order (see `_Stretch.least_seconds`).

    Args:
        order: The step.
        time_limit: Seconds.

    Returns:
        The bound in seconds; it grows with the time.
    """
    deadline = time.monotonic() + time_limit
    step = _Large(order)
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
    step: _Large, num_cuts: int, halves: Sequence[float], deadline: float
) -> list[float]:
    """Bound the seconds of each stretch of so many cuts, from below by what its halves take."""
    found: dict[_Stretch, float] = {}
    least = []
    for index, first in enumerate(range(0, len(step.cuts), num_cuts)):
        stretch = step.stretch(first, min(first + num_cuts, len(step.cuts)))
        parts = [seconds * _SLACK for seconds in halves[2 * index : 2 * index + 2]]
        left = deadline - time.monotonic()
        if stretch not in found and left > 0:
            found[stretch] = stretch.least_seconds(step.order, left * _TIME_SHARE, parts, num_cuts)
        least.append(max(sum(parts), found.get(stretch, sum(stretch.work))))
    return least


class _Absence(NamedTuple):
    """A gap of a large value in a stretch, in which it may be missing.

    Attributes:
        num_bytes: Of the value.
        first: The first cut in the gap.
        last: Behind the last one.
        returns: Whether the gap ends in the stretch: what is missing comes back.
        copy: Which of the copies that the stretch writes it needs, before it can be missing; None:
            the copy is there.
    """

    num_bytes: int
    first: int
    last: int
    returns: bool
    copy: int | None


class _Stretch(NamedTuple):
    """Operators between two positions, cut at those that use large values.

    Attributes:
        work: Per slot, from a cut to the next: seconds of its operators.
        first: Of these the seconds of the first, the operator at the cut.
        missing: Per cut: parts of the arena that have to be missing of the absences.
        absences: What may be missing.
        born: Per copy: the slot in which its value is made.
    """

    work: tuple[float, ...]
    first: tuple[float, ...]
    missing: tuple[int, ...]
    absences: tuple[_Absence, ...]
    born: tuple[int, ...]

    def least_seconds(
        self, order: FixedOrder, time_limit: float, halves: Sequence[float], num_cuts: int
    ) -> float:
        """Solve for the least time.

        Columns: per absence and cut m, 0 or 1, whether the value is missing there; in each slot of
        an absence that returns the bytes i of its last arrival, in those of a copy the bytes o of
        it; per slot its time t. Rows: s m is at least what is too much, over all absences; at most
        the sum of i over the slots after the cut, and of o over those before it; i and o are bytes
        of a value that has its place: i <= s (1 - m) at the next cut, o <= s (1 - m) at the cut
        before; t is at least the operators' time, and that of all i and that of all o. A value that
        is missing at a cut comes in after the cut's operator has run, and one that is made there or
        later goes out after that: with l >= i - s (1 - m) at the cut before, t is at least that
        operator's time and that of all l, and that operator's time and that of such o.

        Args:
            order: The step.
            time_limit: Seconds.
            halves: Seconds that the first half takes at least, and the second, as far as known.
            num_cuts: Cuts of both, of which the first half has half.

        Returns:
            At least the operators' time; less than the optimum if that is not known in time.
        """
        work = sum(self.work)
        if not any(self.missing):
            return work
        program, unit = LinearProgram(), float(order.capacity)
        scale = max(work, 1e-30)
        times = [program.column(cost=1.0) for _ in self.work]
        inward, outward, late_in, late_out = ([[] for _ in self.work] for _ in range(4))
        away: list[tuple[list[int], list[float]]] = [([], []) for _ in self.work]
        copies = [
            {slot: program.column() for slot in range(born, len(self.work))} for born in self.born
        ]
        for copy in copies:
            for slot, column in copy.items():
                outward[slot].append(column)
            late_out[min(copy)].append(copy[min(copy)])
        for absence in self.absences:
            size = absence.num_bytes / unit
            cuts = range(absence.first, absence.last)
            gone = {cut: program.column(upper=1.0, integer=True) for cut in cuts}
            for cut, column in gone.items():
                away[cut][0].append(column)
                away[cut][1].append(size)
            if absence.returns:
                back = {slot: program.column() for slot in cuts}
                for slot, column in back.items():
                    inward[slot].append(column)
                    late_in[slot].append(program.column())
                    late = [late_in[slot][-1], column, gone[slot]]
                    program.row(late, [1.0, -1.0, -size], lower=-size)
                    after = [back[other] for other in range(slot, absence.last)]
                    program.row([gone[slot], *after], [-size, *[1.0] * len(after)], lower=0.0)
                    if slot + 1 in gone:
                        program.row([column, gone[slot + 1]], [1.0, size], upper=size)
            if absence.copy is not None:
                copy = copies[absence.copy]
                for cut, column in gone.items():
                    before = [copy[slot] for slot in copy if slot < cut]
                    program.row([column, *before], [-size, *[1.0] * len(before)], lower=0.0)
                    if cut in copy:
                        program.row([copy[cut], column], [1.0, size], upper=size)
        for cut, parts in enumerate(self.missing):
            if parts:
                program.row(*away[cut], lower=parts / _PARTS)
        rates = order.rates
        for slot, seconds in enumerate(self.work):
            program.row([times[slot]], [1.0], lower=seconds / scale)
            for columns, rate, before in (
                (inward[slot], rates.inward, 0.0),
                (outward[slot], rates.outward, 0.0),
                (late_in[slot], rates.inward, self.first[slot]),
                (late_out[slot], rates.outward, self.first[slot]),
            ):
                factors = [1.0, *[-unit / rate / scale] * len(columns)]
                program.row([times[slot], *columns], factors, lower=before / scale)
        for first, seconds in zip((0, num_cuts // 2), halves, strict=False):
            half = times[first : first + num_cuts // 2]
            program.row(half, [1.0] * len(half), lower=seconds / scale)
        program.solve(time_limit=time_limit, relative_gap=_TOLERANCE)
        return max(program.bound * scale, work)


class _Gap(NamedTuple):
    """A gap of a large value, between the uses at two positions, perhaps of other steps.

    Attributes:
        life: Of the value; by what step it is made.
        born: Position at which it is made; None if it need not be written.
    """

    life: tuple[int, int]
    begin: int
    end: int
    num_bytes: int
    born: int | None


class _Large:
    """The large values of a step.

    What may be made again counts as small, for it need not come back; small values may be missing
    wherever they are not used.

    Attributes:
        cuts: The positions of operators that use so many bytes.
    """

    def __init__(self, order: FixedOrder) -> None:
        self.order = order
        lives, num_positions = order.table, len(order.seconds)
        is_large = lives.num_bytes >= order.capacity * _LARGE
        if order.again is not None:
            again = [operator.recomputable for operator in order.graph.operators]
            is_large &= ~np.array([made >= 0 and again[made] for made in lives.made_by.tolist()])
        self._gaps: list[_Gap] = []
        free = np.zeros(2 * num_positions + 1, np.int64)
        for life, begin, end in zip(
            *(column.tolist() for column in (lives.hole_range, lives.hole_begin, lives.hole_end)),
            strict=True,
        ):
            num_bytes = int(lives.num_bytes[life])
            if not is_large[life]:
                shift = num_positions if begin >= num_positions else 0
                free[begin + 1 - shift] += num_bytes
                free[end - shift] -= num_bytes
                continue
            for shift in (0, num_positions):
                if begin < shift + num_positions and end > shift:
                    born = None if lives.is_constant[life] else int(lives.defined[life]) - shift
                    key = (life, shift)
                    self._gaps.append(_Gap(key, begin - shift, end - shift, num_bytes, born))
        small = np.cumsum(free[:-1]).reshape(2, num_positions).sum(0)
        self._missing = order.excess - small
        # Operators that use large values are among those that use much.
        self.cuts: list[int] = np.flatnonzero(lives.used_bytes >= order.capacity * _LARGE).tolist()

    def stretch(self, first: int, last: int) -> _Stretch:
        """The stretch from one cut to another, exclusive, or to the end of the step."""
        order, cuts = self.order, np.array(self.cuts[first:last])
        end = self.cuts[last] if last < len(self.cuts) else len(order.seconds)
        begins = np.concatenate([[0.0], np.cumsum(order.seconds)])[[*cuts, end]]
        missing, absences = self._missing[cuts].astype(np.float64), []
        copies: dict[tuple[int, int], int] = {}
        born: list[int] = []
        for gap in self._gaps:
            inside = np.searchsorted(cuts, [gap.begin + 1, gap.end])
            low, high = int(inside[0]), int(inside[1])
            if low >= high:
                continue
            returns = gap.end <= end
            copy = None
            if gap.born is not None and cuts[0] <= gap.born:
                if gap.life not in copies:
                    copies[gap.life] = len(born)
                    born.append(int(np.searchsorted(cuts, gap.born, side="right")) - 1)
                copy = copies[gap.life]
            elif not returns:
                missing[low:high] -= gap.num_bytes
                continue
            absences.append(_Absence(gap.num_bytes, low, high, returns, copy))
        parts = np.floor(np.maximum(missing, 0.0) * _PARTS / order.capacity).astype(int)
        # Sums of equal times differ in their last digits.
        work = np.floor(np.diff(begins) * 1e9) / 1e9
        ahead = np.floor(order.seconds[cuts] * 1e9) / 1e9
        return _Stretch(
            tuple(work.tolist()),
            tuple(np.minimum(ahead, work).tolist()),
            tuple(parts.tolist()),
            tuple(absences),
            tuple(born),
        )
