"""A linear program over slots of a step: bytes absent at a cut left before it and return after it.

A step is cut at the starts of some operators into slots; slot k ends with cut k, and slot 0 also
holds what runs after the last cut. Values that may be absent at the same cuts, for as long, are
put together: the rows hold for their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.planner._request import LinkRates
from penstock.solvers import LinearProgram

NEVER = 1 << 20  # power of two of a cost that cannot be paid
PARTS = 4  # of a power of two, to which costs are rounded down
FREE = -200 * PARTS


class CutWindow(NamedTuple):
    """A cut at which values may be absent; slots and cuts count on over the end of the step."""

    cut: int
    until: int  # last slot in which they may return
    since: int | None  # first slot in which they may have left; None: they need not have


class Absence(NamedTuple):
    """Values that may be absent at the same cuts."""

    # The cuts. Bytes that return in a slot serve all cuts before it, and bytes that leave serve all
    # cuts after it.
    windows: tuple[CutWindow, ...]
    recompute_level: int  # class of the cost of recomputing a byte, as of `cost_level`


def cost_level(seconds_per_byte: float) -> int:
    """Return the class of a cost: costs of a class are at least `level_cost` of it."""
    if seconds_per_byte <= 0:
        return FREE
    return max(FREE, math.floor(math.log2(seconds_per_byte) * PARTS - 1e-9))


def level_cost(level: int) -> float:
    """Return the least cost of a class that can be paid."""
    return 0.0 if level in (FREE, NEVER) else 2.0 ** (level / PARTS)


class Slots(NamedTuple):
    """The slots of a step."""

    excess: Sequence[float]  # per cut: bytes that have to be absent when its operator starts
    work: Sequence[float]  # per slot: seconds of the operators that have to run in it
    compute: float  # seconds of all operators


def slots_bound(
    slots: Slots,
    absences: Mapping[Absence, int],
    rates: LinkRates,
    unit: float,
    *,
    time_limit: float,
) -> float | None:
    """Solve for the least time of a step.

    `unit` are the bytes that the program counts as one; `time_limit` is in seconds.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    program = _SlotsProgram(slots, rates, unit)
    for absence, num_bytes in absences.items():
        program.add_absence(absence, num_bytes)
    return program.least_seconds(time_limit)


# Absences a of s(a) bytes, cuts c of a with a window from slot `since` to slot `until`, slots k;
# E(c) is the excess at a cut, W(k) the work of a slot, C the time of all operators, q(a) the
# seconds for which a byte of a is recomputed.
#
# Columns, in units of bytes and of C:
#   m(a, c)  bytes that are absent at c            0 <= m(a, c) <= s(a)
#   i(a, k)  bytes that return in k
#   o(a, k)  bytes that leave in k
#   w(a, k)  bytes that are recomputed in k
#   t(k)     time of k
#
# minimise   sum of t(k)
# subject to
#   sum over a of m(a, c) >= E(c)
#   m(a, c) <= sum of i(a, k) + w(a, k) over c < k <= until(c)
#   m(a, c) <= sum of o(a, k) over since(c) <= k <= c + sum of w(a, k) over c < k <= until(c)
#   t(k) >= W(k) + sum over a of q(a) w(a, k)
#   t(k) >= sum over a of i(a, k) / in,  t(k) >= sum over a of o(a, k) / out
#   sum of t(k) >= C + sum of q(a) w(a, k)


class _SlotsProgram:
    """The linear program above."""

    def __init__(self, slots: Slots, rates: LinkRates, unit: float) -> None:
        self.slots, self.rates, self.unit = slots, rates, unit
        self.scale = max(slots.compute, 1e-30)
        self.program = LinearProgram()
        self.times = [self.program.column(cost=1.0) for _ in slots.work]
        self.inward: list[list[int]] = [[] for _ in slots.work]
        self.outward: list[list[int]] = [[] for _ in slots.work]
        self.remade: list[tuple[list[int], list[float]]] = [([], []) for _ in slots.work]
        self.missing: list[list[int]] = [[] for _ in slots.work]

    def add_absence(self, absence: Absence, num_bytes: int) -> None:
        """Add the columns of an absence, and the rows of m."""
        program, num_slots = self.program, len(self.slots.work)
        returning: dict[int, int] = {}
        leaving: dict[int, int] = {}
        remade: dict[int, int] = {}
        cost = level_cost(absence.recompute_level) * self.unit / self.scale
        for cut, until, since in absence.windows:
            after = {slot % num_slots for slot in range(cut + 1, until + 1)}
            before = (
                {slot % num_slots for slot in range(since, cut + 1)} if since is not None else ()
            )
            for slot in after - returning.keys():
                returning[slot] = program.column()
                self.inward[slot].append(returning[slot])
                if absence.recompute_level < NEVER:
                    remade[slot] = program.column()
                    self.remade[slot][0].append(remade[slot])
                    self.remade[slot][1].append(-cost)
            for slot in set(before) - leaving.keys():
                leaving[slot] = program.column()
                self.outward[slot].append(leaving[slot])
            missing = program.column(upper=num_bytes / self.unit)
            self.missing[cut % num_slots].append(missing)
            made = [remade[slot] for slot in after if slot in remade]
            back = [returning[slot] for slot in after]
            program.row([missing, *back, *made], [-1.0, *[1.0] * len(back + made)], lower=0.0)
            if since is not None:
                left = [leaving[slot] for slot in before]
                program.row([missing, *left, *made], [-1.0, *[1.0] * len(left + made)], lower=0.0)

    def least_seconds(self, time_limit: float) -> float | None:
        """Add the rows of E and t, and solve."""
        program, scale = self.program, self.scale
        for slot, excess in enumerate(self.slots.excess):
            if excess > 0:
                columns = self.missing[slot]
                program.row(columns, [1.0] * len(columns), lower=excess / self.unit)
        for slot, work in enumerate(self.slots.work):
            columns, factors = self.remade[slot]
            program.row([self.times[slot], *columns], [1.0, *factors], lower=work / scale)
            for columns, rate in (
                (self.inward[slot], self.rates.inward),
                (self.outward[slot], self.rates.outward),
            ):
                factor = -self.unit / rate / scale
                factors = [1.0, *[factor] * len(columns)]
                program.row([self.times[slot], *columns], factors, lower=0.0)
        columns = [column for part, _ in self.remade for column in part]
        factors = [factor for _, part in self.remade for factor in part]
        ones = [1.0] * len(self.times)
        compute = self.slots.compute / scale
        program.row([*self.times, *columns], [*ones, *factors], lower=compute)
        bound = program.solve(time_limit=time_limit)
        return None if bound is None else bound * scale
