"""A bound in time for a fixed order: what leaves before a position comes back after it.

The order is cut at some positions into slots. For every cut the values that are alive there and not
needed at it may be missing; those that are have left in the slots before it, since they were made,
and come back in the slots after it, until they are used. A slot takes at least the time of its
operators and of the bytes that move in it.
"""

from __future__ import annotations

import numpy as np

from penstock.planner.bounds._fixed_order import FixedOrder, LiveRangeTable
from penstock.planner.bounds._forced import remake_costs
from penstock.planner.bounds._slots import NEVER, Absence, Slots, Spell, slots_bound

NUM_CUTS = 48


def window_bound(order: FixedOrder, *, time_limit: float, num_cuts: int = NUM_CUTS) -> float | None:
    """Solve the linear program of what moves when in a fixed order (see `slots_bound`).

    It holds since every plan of the order, averaged over its steps, is a solution. A value is
    missing at a cut if it has no place when the operator there starts: then its transfers out have
    ended, and those that bring it back begin later. Of the gaps of one life only one asks for bytes
    to go out, for the copy may serve all.

    Args:
        order: The step.
        time_limit: Seconds.
        num_cuts: Into how many slots the step is cut, at most.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    if order.excess.max(initial=0) <= 0:
        return order.compute_seconds
    cuts = _cuts(order.seconds, order.excess, num_cuts)
    begins = np.concatenate([[0.0], np.cumsum(order.seconds)])
    work = [float(begins[cut] - begins[cuts[slot - 1]]) for slot, cut in enumerate(cuts)]
    work[0] += order.compute_seconds
    return slots_bound(
        Slots([float(order.excess[cut]) for cut in cuts], work, order.compute_seconds),
        _absences(order, cuts),
        order.rates,
        float(max(order.capacity, 1)),
        time_limit=time_limit,
    )


def _cuts(seconds: np.ndarray, excess: np.ndarray, num_cuts: int) -> list[int]:
    """Positions to cut at: in each of equal parts of the time the one where most is too much."""
    num_positions = len(seconds)
    total = seconds.sum()
    if total > 0 and num_positions > num_cuts:
        part = np.minimum((np.cumsum(seconds) - seconds) * num_cuts / total, num_cuts - 1)
        part = part.astype(np.int64)
    else:
        part = np.arange(num_positions) * min(num_cuts, num_positions) // num_positions
    firsts = np.flatnonzero(np.diff(part, prepend=-1))
    lasts = [*firsts[1:], num_positions]
    return [
        int(first + np.argmax(excess[first:last]))
        for first, last in zip(firsts, lasts, strict=True)
    ]


def _absences(order: FixedOrder, cuts: list[int]) -> dict[Absence, int]:
    """Put gaps together; returns the bytes of each absence."""
    lives, num_slots, num_positions = order.table, len(cuts), len(order.seconds)
    unrolled = np.array([cut + step * num_positions for step in range(3) for cut in cuts])
    first = np.searchsorted(unrolled, lives.hole_begin, side="right")
    last = np.searchsorted(unrolled, lives.hole_end, side="left") - 1
    born = np.searchsorted(unrolled, lives.defined, side="right")
    writes = _writing_gaps(lives, last - first)
    absences: dict[Absence, int] = {}
    costs = {} if order.again is None else remake_costs(order.graph, order.again)
    for gap in np.flatnonzero(first <= last):
        life = int(lives.hole_range[gap])
        since = int(born[life]) if gap in writes else None
        shift = int(first[gap]) if since is None else min(int(first[gap]), since)
        shift -= shift % num_slots
        since = None if since is None else since - shift
        until = int(last[gap]) + 1 - shift
        spells = tuple(Spell(cut, until, since) for cut in range(int(first[gap]) - shift, until))
        kind = Absence(spells, costs.get(int(lives.made_by[life]), NEVER))
        absences[kind] = absences.get(kind, 0) + int(lives.num_bytes[life])
    return absences


def _writing_gaps(lives: LiveRangeTable, length: np.ndarray) -> set[int]:
    """For each life that has to be written the gap over most cuts."""
    best: dict[int, int] = {}
    for gap, life in enumerate(map(int, lives.hole_range)):
        if not lives.is_constant[life] and (life not in best or length[gap] > length[best[life]]):
            best[life] = gap
    return set(best.values())
