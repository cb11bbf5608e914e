"""A bound in time for a fixed order: bytes that leave before a position return after it.

The order is cut at some positions into slots. At every cut values in a hole may be absent; those
that are have left in the slots before it, since they were made, and return in the slots after it,
until they are used. A slot takes at least the time of its operators and of the bytes that move in
it.
"""

from __future__ import annotations

import numpy as np

from penstock.planner.bounds._fixed_order import FixedOrder, LiveRangeTable
from penstock.planner.bounds._forced import recompute_levels
from penstock.planner.bounds._slots import NEVER, Absence, CutWindow, Slots, slots_bound

NUM_CUTS = 48


def window_bound(order: FixedOrder, *, time_limit: float, num_cuts: int = NUM_CUTS) -> float | None:
    """Solve the linear program of `slots_bound` for the slots of a fixed order.

    It holds since every plan of the order, averaged over its steps, is a solution. A value is
    absent at a cut if it has no place when the operator there starts: then its transfers out have
    ended, and those that bring it back begin later. Of the holes of one live range only one
    requires bytes to leave, as one copy may serve all.

    Args:
        order: The step.
        time_limit: Seconds.
        num_cuts: Number of slots of the step, at most.

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
    """Return positions to cut at: the one of the largest excess in each of equal parts of time."""
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
    """Return the bytes of each absence; holes with the same cuts and costs are put together."""
    table, num_slots, num_positions = order.table, len(cuts), len(order.seconds)
    unrolled = np.array([cut + step * num_positions for step in range(3) for cut in cuts])
    first = np.searchsorted(unrolled, table.hole_begin, side="right")
    last = np.searchsorted(unrolled, table.hole_end, side="left") - 1
    defined = np.searchsorted(unrolled, table.defined, side="right")
    writing = _writing_holes(table, last - first)
    absences: dict[Absence, int] = {}
    costs = {} if order.again is None else recompute_levels(order.graph, order.again)
    for hole in np.flatnonzero(first <= last):
        live_range = int(table.hole_range[hole])
        since = int(defined[live_range]) if hole in writing else None
        shift = int(first[hole]) if since is None else min(int(first[hole]), since)
        shift -= shift % num_slots
        since = None if since is None else since - shift
        until = int(last[hole]) + 1 - shift
        inside = range(int(first[hole]) - shift, until)
        windows = tuple(CutWindow(cut, until, since) for cut in inside)
        absence = Absence(windows, costs.get(int(table.made_by[live_range]), NEVER))
        absences[absence] = absences.get(absence, 0) + int(table.num_bytes[live_range])
    return absences


def _writing_holes(table: LiveRangeTable, length: np.ndarray) -> set[int]:
    """Return for each live range that has to be written the hole over most cuts."""
    best: dict[int, int] = {}
    for hole, live_range in enumerate(map(int, table.hole_range)):
        is_better = live_range not in best or length[hole] > length[best[live_range]]
        if not table.is_constant[live_range] and is_better:
            best[live_range] = hole
    return set(best.values())
