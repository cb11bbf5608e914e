"""A linear program over slots of a step: what is missing at a cut left before it and comes back.

A step is cut at the starts of some operators into slots; slot k ends with cut k, and slot 0 also
holds what runs after the last cut. Values that may be missing at the same cuts, for as long, are
put together: the rows hold for their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.planner._linear_program import LinearProgram
from penstock.planner._link_rates import LinkRates

NEVER = 1 << 20  # power of two of a cost that cannot be paid
PARTS = 4  # of a power of two, to which costs are rounded down
FREE = -200 * PARTS


class Spell(NamedTuple):
    """A cut at which values may be missing; slots and cuts count on over the end of the step."""

    cut: int
    until: int  # last slot in which they may come back
    since: int | None  # first slot in which they may have left; None: they need not have


class Absence(NamedTuple):
    """Values that may be missing at the same cuts.

    What comes in in a slot serves all cuts before it, and what goes out all after it.
    """

    spells: tuple[Spell, ...]
    remake_cost: int  # of making a byte again, as of `cost_level`


def cost_level(seconds_per_byte: float) -> int:
    """Return in which class a cost is: costs of a class are at least `level_cost` of it."""
    if seconds_per_byte <= 0:
        return FREE
    return max(FREE, math.floor(math.log2(seconds_per_byte) * PARTS - 1e-9))


def level_cost(level: int) -> float:
    """Return the least cost of a class that can be paid."""
    return 0.0 if level in (FREE, NEVER) else 2.0 ** (level / PARTS)


class Slots(NamedTuple):
    """The slots of a step.

    Attributes:
        excess: Per cut: bytes that have to be missing when its operator starts.
        work: Per slot: seconds of the operators that have to run in it.
        compute: Seconds of all operators.
    """

    excess: Sequence[float]
    work: Sequence[float]
    compute: float


def slots_bound(
    slots: Slots,
    absences: Mapping[Absence, int],
    rates: LinkRates,
    unit: float,
    *,
    time_limit: float,
) -> float | None:
    """Solve for the least time of a step.

    Columns, in bytes, for each absence: m, what is missing at each of its cuts; for each slot i and
    o, what comes in and goes out, and w, what is made again; for each slot its time t. Rows: at
    each cut what is missing is at least what is too much; m is at most the sum of i and w over the
    slots after the cut until they have to be back, and at most the sum of o over those before it
    since they could leave, plus that of w; t is at least the operators' time and the cost of w, and
    at least the time that i and o take; all t together are at least the time to compute and the
    cost of all w.

    Args:
        slots: The slots.
        absences: Bytes of each.
        rates: Of the links.
        unit: Bytes that the program counts as one.
        time_limit: Seconds.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    num_slots, scale = len(slots.work), max(slots.compute, 1e-30)
    program = LinearProgram()
    times = [program.column(cost=1.0) for _ in slots.work]
    inward: list[list[int]] = [[] for _ in slots.work]
    outward: list[list[int]] = [[] for _ in slots.work]
    remade: list[tuple[list[int], list[float]]] = [([], []) for _ in slots.work]
    missing: list[list[int]] = [[] for _ in slots.work]
    for absence, num_bytes in absences.items():
        comes: dict[int, int] = {}
        goes: dict[int, int] = {}
        makes: dict[int, int] = {}
        cost = level_cost(absence.remake_cost) * unit / scale
        for cut, until, since in absence.spells:
            after = {slot % num_slots for slot in range(cut + 1, until + 1)}
            before = (
                {slot % num_slots for slot in range(since, cut + 1)} if since is not None else ()
            )
            for slot in after - comes.keys():
                comes[slot] = program.column()
                inward[slot].append(comes[slot])
                if absence.remake_cost < NEVER:
                    makes[slot] = program.column()
                    remade[slot][0].append(makes[slot])
                    remade[slot][1].append(-cost)
            for slot in set(before) - goes.keys():
                goes[slot] = program.column()
                outward[slot].append(goes[slot])
            away = program.column(upper=num_bytes / unit)
            missing[cut % num_slots].append(away)
            made = [makes[slot] for slot in after if slot in makes]
            back = [comes[slot] for slot in after]
            program.row([away, *back, *made], [-1.0, *[1.0] * len(back + made)], lower=0.0)
            if since is not None:
                left = [goes[slot] for slot in before]
                program.row([away, *left, *made], [-1.0, *[1.0] * len(left + made)], lower=0.0)
    for slot, excess in enumerate(slots.excess):
        if excess > 0:
            program.row(missing[slot], [1.0] * len(missing[slot]), lower=excess / unit)
    for slot, work in enumerate(slots.work):
        columns, factors = remade[slot]
        program.row([times[slot], *columns], [1.0, *factors], lower=work / scale)
        for columns, rate in ((inward[slot], rates.inward), (outward[slot], rates.outward)):
            factor = -unit / rate / scale
            program.row([times[slot], *columns], [1.0, *[factor] * len(columns)], lower=0.0)
    columns = [column for part, _ in remade for column in part]
    factors = [factor for _, part in remade for factor in part]
    ones = [1.0] * num_slots
    program.row([*times, *columns], [*ones, *factors], lower=slots.compute / scale)
    bound = program.solve(time_limit=time_limit)
    return None if bound is None else bound * scale
