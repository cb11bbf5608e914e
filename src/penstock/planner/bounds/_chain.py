"""A bound in time for any order: the slots between operators that run one after the other anyway.

Operators of which each needs what the one before makes, through whatever lies between, run in this
order in any plan. Between two of them time passes for all that has to run between them, and what is
missing at one of them has left before it and is back when an operator needs it that has to run
before another of them. This is `window_bound` with what is certain of all orders in place of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._link_rates import LinkRates
from penstock.planner.bounds._forced import Forced, made_anew, remake_costs
from penstock.planner.bounds._slots import NEVER, Absence, Slots, Spell, slots_bound

_NUM_CUTS = 32


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
    """Bound the time of a step in any order by what has to be missing along a chain of operators.

    Let v(1), ..., v(K) be such a chain and slot k the time from the start of v(k - 1) to that of
    v(k), where "start" is that of the first run, and v(0) the start of the step; slot 0 is from
    v(K) to the end. A value is missable at v(i) if an ancestor of
    v(i) makes it and a descendant needs it, and v(i) neither makes nor needs it. It then comes back
    (or is made again) after v(i) and before the first of its users among the descendants of v(i)
    that is an ancestor of some v(j): in slots i + 1 to j. It went out between the last v that
    certainly starts before the operator that made it, and v(i). A persistent storage is missable at
    every v(i) that does not touch it, for some version of it; it has to be back for the first that
    touches it, in this step or the next, and what was written last went out since. A slot lasts at
    least as long as what follows v(k - 1) and precedes v(k); all slots at least as long as all
    operators.

    Args:
        graph: The step.
        forced: What is alive when operators run, and who precedes whom.
        operator_seconds: Time of each operator.
        capacity: Bytes of the arena.
        rates: Of the links.
        recompute: Whether operators may run again.
        time_limit: Seconds.
        num_cuts: Length of the chain, at most.

    Returns:
        The bound in seconds; None if it takes too long.
    """
    seconds = np.asarray(operator_seconds, dtype=np.float64)
    excess = forced.anywhere - capacity
    compute = float(seconds.sum())
    if excess.max(initial=0.0) <= 0:
        return compute
    chain = _chain(forced, seconds, excess, num_cuts)
    place = _Places.of(forced, chain)
    work = place.work(seconds)
    absences: dict[Absence, int] = {}
    costs = remake_costs(graph, seconds) if recompute else {}
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
    """Choose operators that run in this order in any plan; the worst one is among them.

    From there on, in both directions: in each part of the program's time the one with the most
    excess of those that follow (precede) the one chosen last.
    """
    total = max(float(seconds.sum()), 1e-30)
    part = ((np.cumsum(seconds) - seconds) / total * num_cuts).astype(np.int64)
    part += np.linspace(0, 1e-9, len(seconds)).astype(np.int64)
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
class _Places:
    """Where operators are along a chain, for certain.

    Attributes:
        num_slots: One more than the operators of the chain, which count from 1.
        after: Per operator: the last of the chain that it is or follows; 0 is the start.
        before: Per operator: the first of the chain that it is or precedes; `num_slots` is the end.
    """

    num_slots: int
    after: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, forced: Forced, chain: list[int]) -> _Places:
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
        """Per slot the time of what has to run in it: between its cuts, and what it begins with."""
        first = self.after + 1
        last = np.where(self.after == self.before, self.before + 1, self.before)
        slot = np.where(first == last, first % self.num_slots, -1)
        return [float(seconds[slot == index].sum()) for index in range(self.num_slots)]


def _absences(
    graph: StepGraph, place: _Places, costs: dict[int, int], *, recompute: bool
) -> Iterator[tuple[Absence, int]]:
    """All that may be missing, with its bytes."""
    anew = made_anew(graph, recompute=recompute)
    persistent: dict[int, tuple[list[int], list[int]]] = {}  # who touches it, who changes it
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        producer = graph.producers[value]
        if storage.persistent:
            touching, changing = persistent.setdefault(storage_index, ([], []))
            touching += graph.consumers[value]
            changing += [] if producer is None else [producer]
        elif storage.num_bytes:
            spells = _spells(place, producer, graph.consumers[value], storage.final == value)
            if spells:
                cost = NEVER if producer is None else costs.get(producer, NEVER)
                yield Absence(tuple(spells), cost), storage.num_bytes
    for index, (touching, changing) in persistent.items():
        storage = graph.storages[index]
        if storage.num_bytes and touching and index not in anew:
            spells = _persistent_spells(place, touching, changing)
            if spells:
                yield Absence(tuple(spells), NEVER), storage.num_bytes


def _spells(
    place: _Places, producer: int | None, consumers: Sequence[int], is_result: bool
) -> list[Spell]:
    """Where along the chain a value of one step is missable."""
    first, since = 1, 1
    if producer is not None:
        first, since = int(place.before[producer]), int(place.after[producer]) + 1
        first += first < since  # it is one of the chain
    users = [(int(place.after[c]), int(place.before[c])) for c in consumers]
    spells = []
    for cut in range(first, place.num_slots):
        if (cut, cut) in users:  # it is there
            continue
        later = [before for after, before in users if after >= cut]
        if later or is_result:
            spells.append(Spell(cut, min(later, default=place.num_slots), since))
    return spells


def _persistent_spells(
    place: _Places, touching: Sequence[int], changing: Sequence[int]
) -> list[Spell]:
    """Where a storage that lives from step to step is missable."""
    num_slots = place.num_slots
    users = [(int(place.after[c]), int(place.before[c])) for c in {*touching, *changing}]
    needing = [(int(place.after[c]), int(place.before[c])) for c in set(touching)]
    writers = [(int(place.after[c]), int(place.before[c])) for c in set(changing)]
    next_step = num_slots + min(before for _, before in needing)
    spells = []
    for cut in range(1, num_slots):
        if (cut, cut) in users:
            continue
        later = [before for after, before in needing if after >= cut]
        since = None
        if writers:  # the last one before is not before any that is certainly before
            since = max(
                (after + 1 for after, before in writers if before <= cut and after < cut),
                default=max(after + 1 for after, _ in writers) - num_slots,
            )
        spells.append(Spell(cut, min([*later, next_step]), since))
    return spells
