"""A bound in time for a fixed order: what leaves before a position comes back after it.

The order is cut at some positions into slots. For every cut the values that are alive there and not
needed at it may be missing; those that are have left in the slots before it, since they were made,
and come back in the slots after it, until they are used. A slot takes at least the time of its
operators and of the bytes that move in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._rates import Rates
from penstock.planner.proofs._linear import LinearProgram
from penstock.planner.proofs._lives import Lives

_NUM_CUTS = 48


class _Class(NamedTuple):
    """Gaps that look the same from the cuts; slots and cuts count on over the end of the step.

    Slot k ends with cut k.
    """

    leaves_from: int  # slot in which its values may first leave; -1: they need not
    first: int  # cut
    last: int  # cut; they come back until slot `last + 1`
    remake_cost: int  # power of two of the seconds per byte to make them again, rounded down


_NO_REMAKING = 1 << 20


def window_bound(
    graph: StepGraph,
    lives: Lives,
    seconds: np.ndarray,
    capacity: int,
    rates: Rates,
    again: np.ndarray | None,
    *,
    time_limit: float,
    num_cuts: int = _NUM_CUTS,
) -> float | None:
    """Solve the linear program of what moves when.

    Columns, in bytes: for each class of gaps and each cut within them m, what is missing at the
    cut; for each slot i and o, what comes in and goes out, and w, what is made again; for each slot
    its time t. Rows: at each cut what is missing is at least what is too much; m at a cut is at
    most the sum of i and w over the slots after it, until the use, and at most the sum of o before
    it, since the value was made, plus that of w after it; t is at least the operators' time and the
    cost of w, and at least the time that i and o take.

    It holds since every plan of the order, averaged over its steps, is a solution. A value is
    missing at a cut if it has no place when the operator there starts: then its transfers out have
    ended, and those that bring it back begin later. Of the gaps of one life only one asks for bytes
    to go out, for the copy may serve all. Gaps are put together into classes by rows that hold for
    their sum.

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
    num_slots = len(cuts)
    scale, unit = max(compute, 1e-30), float(max(capacity, 1))
    program = LinearProgram()
    slots = [program.column(cost=1.0) for _ in cuts]
    inward: list[list[int]] = [[] for _ in cuts]
    outward: list[list[int]] = [[] for _ in cuts]
    remade: list[tuple[list[int], list[float]]] = [([], []) for _ in cuts]
    missing: list[list[int]] = [[] for _ in cuts]
    for kind, num_bytes in _classes(graph, lives, cuts, len(seconds), again).items():
        size = num_bytes / unit
        comes = {slot: program.column() for slot in range(kind.first + 1, kind.last + 2)}
        makes: dict[int, int] = {}
        if kind.remake_cost < _NO_REMAKING:
            makes = {slot: program.column() for slot in comes}
            cost = math.ldexp(unit, kind.remake_cost) / scale
            for slot, column in makes.items():
                remade[slot % num_slots][0].append(column)
                remade[slot % num_slots][1].append(-cost)
        goes: dict[int, int] = {}
        if kind.leaves_from >= 0:
            goes = {slot: program.column() for slot in range(kind.leaves_from, kind.last + 1)}
        for slot, column in comes.items():
            inward[slot % num_slots].append(column)
        for slot, column in goes.items():
            outward[slot % num_slots].append(column)
        for cut in range(kind.first, kind.last + 1):
            away = program.column(upper=size)
            missing[cut % num_slots].append(away)
            after = [column for slot, column in comes.items() if slot > cut]
            made = [column for slot, column in makes.items() if slot > cut]
            before = [column for slot, column in goes.items() if slot <= cut]
            program.row([away, *after, *made], [-1.0, *[1.0] * len(after + made)], lower=0.0)
            if goes:
                program.row([away, *before, *made], [-1.0, *[1.0] * len(before + made)], lower=0.0)
    begins = np.concatenate([[0.0], np.cumsum(seconds)])
    for slot, cut in enumerate(cuts):
        if excess[cut] > 0:
            columns = missing[slot]
            program.row(columns, [1.0] * len(columns), lower=float(excess[cut]) / unit)
        work = float(begins[cut] - begins[cuts[slot - 1]]) + (0.0 if slot else compute)
        program.row([slots[slot], *remade[slot][0]], [1.0, *remade[slot][1]], lower=work / scale)
        for columns, rate in ((inward[slot], rates.inward), (outward[slot], rates.outward)):
            factor = -unit / rate / scale
            program.row([slots[slot], *columns], [1.0, *[factor] * len(columns)], lower=0.0)
    bound = program.solve(time_limit=time_limit)
    return None if bound is None else bound * scale


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


def _classes(
    graph: StepGraph,
    lives: Lives,
    cuts: list[int],
    num_positions: int,
    again: np.ndarray | None,
) -> dict[_Class, int]:
    """Put gaps together; returns the bytes of each class."""
    num_slots = len(cuts)
    unrolled = np.array([cut + step * num_positions for step in range(3) for cut in cuts])
    first = np.searchsorted(unrolled, lives.gap_begin, side="right")
    last = np.searchsorted(unrolled, lives.gap_end, side="left") - 1
    born = np.searchsorted(unrolled, lives.born, side="right")
    writes = _writing_gaps(lives, last - first)
    classes: dict[_Class, int] = {}
    costs = _remake_costs(graph, again)
    for gap in np.flatnonzero(first <= last):
        life = int(lives.gap_life[gap])
        leaves_from = int(born[life]) if gap in writes else -1
        shift = int(min(first[gap], leaves_from) if leaves_from >= 0 else first[gap])
        shift -= shift % num_slots
        kind = _Class(
            leaves_from - shift if leaves_from >= 0 else -1,
            int(first[gap]) - shift,
            int(last[gap]) - shift,
            costs.get(int(lives.made_by[life]), _NO_REMAKING),
        )
        classes[kind] = classes.get(kind, 0) + int(lives.num_bytes[life])
    return classes


def _writing_gaps(lives: Lives, length: np.ndarray) -> set[int]:
    """For each life that has to be written the gap over most cuts."""
    best: dict[int, int] = {}
    for gap, life in enumerate(map(int, lives.gap_life)):
        if not lives.clean[life] and (life not in best or length[gap] > length[best[life]]):
            best[life] = gap
    return set(best.values())


def _remake_costs(graph: StepGraph, again: np.ndarray | None) -> dict[int, int]:
    """Seconds per byte of running each operator again, as powers of two, rounded down."""
    if again is None:
        return {}
    return dict(_costs(graph, again))


def _costs(graph: StepGraph, again: np.ndarray) -> Iterator[tuple[int, int]]:
    for index, operator in enumerate(graph.operators):
        made_bytes = sum(map(graph.num_bytes, operator.makes))
        if operator.recomputable and made_bytes:
            cost = float(again[index]) / made_bytes
            yield index, math.frexp(cost)[1] - 1 if cost > 0 else -200
