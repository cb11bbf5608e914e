"""A bound in time for a fixed order: what leaves before a position comes back after it.

The order is cut at some positions into slots. For every cut the values that are alive there and not
needed at it may be missing; those that are have left in the slots before it, since they were made,
and come back in the slots after it, until they are used. A slot takes at least the time of its
operators and of the bytes that move in it.
"""

from __future__ import annotations

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._rates import Rates
from penstock.planner.proofs._forced import remake_costs
from penstock.planner.proofs._lives import Lives
from penstock.planner.proofs._slots import NEVER, Absence, Slots, Spell, slots_bound

NUM_CUTS = 48


def window_bound(
    graph: StepGraph,
    lives: Lives,
    seconds: np.ndarray,
    capacity: int,
    rates: Rates,
    again: np.ndarray | None,
    *,
    time_limit: float,
    num_cuts: int = NUM_CUTS,
) -> float | None:
    """Solve the linear program of what moves when in a fixed order (see `slots_bound`).

    It holds since every plan of the order, averaged over its steps, is a solution. A value is
    missing at a cut if it has no place when the operator there starts: then its transfers out have
    ended, and those that bring it back begin later. Of the gaps of one life only one asks for bytes
    to go out, for the copy may serve all.

    Args:
        graph: The step.
        lives: Lives and gaps of the order.
        seconds: Time of the operator at each position.
        capacity: Bytes of the arena.
        rates: Of the links.
        again: Time of each operator (by index) if it may run again; None if none may.
        time_limit: Seconds.
        num_cuts: Into how many slots the step is cut, at most.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    compute = float(seconds.sum())
    excess = lives.live_bytes - capacity
    if excess.max(initial=0) <= 0:
        return compute
    cuts = _cuts(seconds, excess, num_cuts)
    begins = np.concatenate([[0.0], np.cumsum(seconds)])
    work = [float(begins[cut] - begins[cuts[slot - 1]]) for slot, cut in enumerate(cuts)]
    work[0] += compute
    return slots_bound(
        Slots([float(excess[cut]) for cut in cuts], work, compute),
        _absences(graph, lives, cuts, len(seconds), again),
        rates,
        float(max(capacity, 1)),
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


def _absences(
    graph: StepGraph,
    lives: Lives,
    cuts: list[int],
    num_positions: int,
    again: np.ndarray | None,
) -> dict[Absence, int]:
    """Put gaps together; returns the bytes of each absence."""
    num_slots = len(cuts)
    unrolled = np.array([cut + step * num_positions for step in range(3) for cut in cuts])
    first = np.searchsorted(unrolled, lives.gap_begin, side="right")
    last = np.searchsorted(unrolled, lives.gap_end, side="left") - 1
    born = np.searchsorted(unrolled, lives.born, side="right")
    writes = _writing_gaps(lives, last - first)
    absences: dict[Absence, int] = {}
    costs = {} if again is None else remake_costs(graph, again)
    for gap in np.flatnonzero(first <= last):
        life = int(lives.gap_life[gap])
        since = int(born[life]) if gap in writes else None
        shift = int(first[gap]) if since is None else min(int(first[gap]), since)
        shift -= shift % num_slots
        since = None if since is None else since - shift
        until = int(last[gap]) + 1 - shift
        spells = tuple(Spell(cut, until, since) for cut in range(int(first[gap]) - shift, until))
        kind = Absence(spells, costs.get(int(lives.made_by[life]), NEVER))
        absences[kind] = absences.get(kind, 0) + int(lives.num_bytes[life])
    return absences


def _writing_gaps(lives: Lives, length: np.ndarray) -> set[int]:
    """For each life that has to be written the gap over most cuts."""
    best: dict[int, int] = {}
    for gap, life in enumerate(map(int, lives.gap_life)):
        if not lives.clean[life] and (life not in best or length[gap] > length[best[life]]):
            best[life] = gap
    return set(best.values())
