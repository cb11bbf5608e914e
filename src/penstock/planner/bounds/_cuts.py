"""Bounds in time by cuts of a step into slots: of any order, and of a fixed one.

Operators of which each needs results of the one before, perhaps through others, run in this order
in any plan. Between two of them time passes for all that has to run between them, and a value that
is absent at one of them has left before it and is back for an operator that needs it and has to run
before another of them. `window_bound` cuts a fixed order at some positions: values in a hole that
are absent at a cut have left in the slots before it, since they were made, and return in the slots
after it, until they are used. A slot takes at least the time of its operators and of the bytes that
move in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.bounds._fixed_order import FixedOrder, LiveRangeTable
from penstock.planner.bounds._forced import Forced, made_anew, recompute_levels
from penstock.planner.bounds._slots import NEVER, Absence, CutWindow, Slots, slots_bound

_NUM_CUTS = 32
NUM_CUTS = 48


def chain_bound(
    graph: StepGraph,
    forced: Forced,
    operator_seconds: Sequence[float],
    capacity: int,
    rates: LinkRates,
    *,
    recompute: bool,
    time_limit: float,
    num_cuts: int = _NUM_CUTS,
) -> float | None:
    """Bound the time of a step in any order by bytes that are absent along a chain of operators.

    Let v(1), ..., v(K) be such a chain, v(0) the start of the step, and "start" that of a first
    run.

        slot k = from the start of v(k - 1) to that of v(k);  slot 0 = from v(K) to the end
        time of slot k >= time of all operators that follow v(k - 1) and precede v(k)
        time of all slots >= time of all operators

    A value may be absent at v(i) if an ancestor of v(i) makes it and a descendant needs it, and
    v(i) neither makes nor needs it. It then returns (or is recomputed) after v(i) and before the
    first of its users among the descendants of v(i) that is an ancestor of some v(j): in slots i +
    1 to j. It left between the last v that certainly starts before the operator that made it, and
    v(i). A persistent storage may be absent at every v(i) that does not access it, for some version
    of it; it returns for the first that accesses it, in this step or the next, and its last version
    left since it was written. The linear program is that of `slots_bound`.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    seconds = np.asarray(operator_seconds, dtype=np.float64)
    excess = forced.anywhere - capacity
    compute = float(seconds.sum())
    if excess.max(initial=0.0) <= 0:
        return compute
    chain = _chain(forced, seconds, excess, num_cuts)
    place = _ChainOrder.of(forced, chain)
    work = place.work(seconds)
    absences: dict[Absence, int] = {}
    costs = recompute_levels(graph, seconds) if recompute else {}
    for absence, num_bytes in _absences(graph, place, costs, recompute=recompute):
        absences[absence] = absences.get(absence, 0) + num_bytes
    return slots_bound(
        Slots([0.0, *(float(excess[v]) for v in chain)], work, compute),
        absences,
        rates,
        float(max(capacity, 1)),
        time_limit=time_limit,
    )


def _chain(forced: Forced, seconds: np.ndarray, excess: np.ndarray, num_cuts: int) -> list[int]:
    """Choose operators that run in this order in any plan, from the one of the largest excess on.

    In both directions: in each part of the program's time the one with the largest excess of those
    that follow (precede) the one chosen last.
    """
    total = max(float(seconds.sum()), 1e-30)
    part = ((np.cumsum(seconds) - seconds) / total * num_cuts).astype(np.int64)
    worst = int(np.argmax(excess))
    chain = [worst]
    for direction in (1, -1):
        at = worst
        for index in range(
            int(part[worst]) + direction, num_cuts if direction > 0 else -1, direction
        ):
            able = forced.descendants_of(at) if direction > 0 else forced.ancestors_of(at)
            able &= part == index
            if not able.any():
                continue
            at = int(np.argmax(np.where(able, excess, -np.inf)))
            chain.append(at)
    order = np.argsort([int(forced.ancestors_of(v).sum()) for v in chain])
    return [chain[index] for index in order]


@dataclass(frozen=True)
class _ChainOrder:
    """Certain orders between operators and those of a chain."""

    num_slots: int  # one more than the operators of the chain, which count from 1
    after: np.ndarray  # per operator: the last of the chain that it is or follows; 0 is the start
    # Per operator: the first of the chain that it is or precedes; `num_slots` is the end.
    before: np.ndarray

    @classmethod
    def of(cls, forced: Forced, chain: list[int]) -> _ChainOrder:
        num_operators = len(forced.here)
        after = np.zeros(num_operators, dtype=np.int64)
        before = np.full(num_operators, len(chain) + 1, dtype=np.int64)
        for index, v in enumerate(chain, 1):
            after[forced.descendants_of(v)] = index
            after[v] = index
        for index, v in reversed(list(enumerate(chain, 1))):
            before[forced.ancestors_of(v)] = index
            before[v] = index
        return cls(len(chain) + 1, after, before)

    def work(self, seconds: np.ndarray) -> list[float]:
        """Return per slot the time of the operators that have to run in it, its first included."""
        first = self.after + 1
        last = np.where(self.after == self.before, self.before + 1, self.before)
        slot = np.where(first == last, first % self.num_slots, -1)
        return [float(seconds[slot == index].sum()) for index in range(self.num_slots)]


def _absences(
    graph: StepGraph, place: _ChainOrder, costs: dict[int, int], *, recompute: bool
) -> Iterator[tuple[Absence, int]]:
    """Yield values that may be absent, with their bytes."""
    anew = made_anew(graph, recompute=recompute)
    persistent: dict[int, tuple[list[int], list[int]]] = {}  # users, writers
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        producer = graph.producers[value]
        if storage.persistent:
            touching, changing = persistent.setdefault(storage_index, ([], []))
            touching += graph.consumers[value]
            changing += [] if producer is None else [producer]
        elif storage.num_bytes:
            windows = _windows(place, producer, graph.consumers[value], storage.final == value)
            if windows:
                cost = NEVER if producer is None else costs.get(producer, NEVER)
                yield Absence(tuple(windows), cost), storage.num_bytes
    for index, (touching, changing) in persistent.items():
        storage = graph.storages[index]
        if storage.num_bytes and touching and index not in anew:
            windows = _persistent_windows(place, touching, changing)
            if windows:
                yield Absence(tuple(windows), NEVER), storage.num_bytes


def _windows(
    place: _ChainOrder, producer: int | None, consumers: Sequence[int], is_result: bool
) -> list[CutWindow]:
    """Return the cuts of the chain at which a value of one step may be absent."""
    first, since = 1, 1
    if producer is not None:
        first, since = int(place.before[producer]), int(place.after[producer]) + 1
        first += first < since  # it is one of the chain
    users = [(int(place.after[c]), int(place.before[c])) for c in consumers]
    windows = []
    for cut in range(first, place.num_slots):
        if (cut, cut) in users:  # it is resident
            continue
        later = [before for after, before in users if after >= cut]
        if later or is_result:
            windows.append(CutWindow(cut, min(later, default=place.num_slots), since))
    return windows


def _persistent_windows(
    place: _ChainOrder, touching: Sequence[int], changing: Sequence[int]
) -> list[CutWindow]:
    """Return the cuts of the chain at which a persistent storage may be absent."""
    num_slots = place.num_slots
    users = [(int(place.after[c]), int(place.before[c])) for c in {*touching, *changing}]
    needing = [(int(place.after[c]), int(place.before[c])) for c in set(touching)]
    writers = [(int(place.after[c]), int(place.before[c])) for c in set(changing)]
    next_step = num_slots + min(before for _, before in needing)
    windows = []
    for cut in range(1, num_slots):
        if (cut, cut) in users:
            continue
        later = [before for after, before in needing if after >= cut]
        since = None
        if writers:  # the last write before the cut is not before any that certainly precedes it
            since = max(
                (after + 1 for after, before in writers if before <= cut and after < cut),
                default=max(after + 1 for after, _ in writers) - num_slots,
            )
        windows.append(CutWindow(cut, min([*later, next_step]), since))
    return windows


def window_bound(order: FixedOrder, *, time_limit: float, num_cuts: int = NUM_CUTS) -> float | None:
    """Solve the linear program of `slots_bound` for the slots of a fixed order.

    It holds since every plan of the order, averaged over its steps, is a solution. A value is
    absent at a cut if it has no place when the operator there starts: then its transfers out have
    ended, and those that bring it back begin later. Of the holes of one live range only one
    requires bytes to leave, as one copy may serve all.

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
        _absences_in(order, cuts),
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


def _absences_in(order: FixedOrder, cuts: list[int]) -> dict[Absence, int]:
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
