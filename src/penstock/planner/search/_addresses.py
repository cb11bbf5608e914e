"""Addresses for a choice, and what the step then takes.

Between its uses an object needs its room only as long as it is on its way out, and again from when
it begins to come back. How long that is follows from time, and how long it may be from addresses:
where somebody else lies at an object's address, one of the two waits. So the engine stacks the
stays such that they wait little. Where one finds no room, a little more has to leave at its
position, and they are stacked again. Where that leads nowhere the packer takes over, first with as
much time on the links as these would like, then with a part of that, down to the uses alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.errors import InfeasibleError
from penstock.planner.packing import Buffer, pack
from penstock.planner.search._engine import (
    NUM_WAYS,
    PRIORITY_WAYS,
    STAY,
    Rates,
    Replay,
    bytes_there,
)
from penstock.planner.search._residency import Below, Residency, ResidencySearch
from penstock.planner.search._stays import Stay, chains_of, moves_of, stays_of

# How much less is there where somebody found no room, as a share of the arena; twice as much each
# time that this was not enough.
_STEP = 0.001
_FEW_TRIES, _NUM_TRIES = 6, 60
# So long a wait for an address, as a share of the step, is worth a try with less there.
_LONG_WAIT = 0.001
# How much of the time on the links the packer gives room of its own.
_SLACKS = (1.0, 0.35, 0.0)
_AS_GOOD = 1.001
# So short a step is packed as well: what the packer fits tightly may make nobody leave or wait.
FEW_POSITIONS = 500
# So long a wait, as a share of the step, makes a stay come earlier.
_LONG_WAIT = 1e-4
_WORTH_IT = 0.999  # of the best time: choices that take longer in bytes alone are not looked at
# Shares of the arena for which choices are made; so many are tried once before the best of them are
# tried again, then some now and then.
_ROOMS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.98, 0.94, 0.9, 0.8)
_NUM_SURVEYED, _SHARE_OF_UNTRIED, _MAX_FAILURES = 6, 0.15, 1000

Addressed = tuple[Residency, list[int]]
"""A choice with the times that its addresses allow, and the offset of each chain of stays."""


def stacked(
    residency: Residency, capacity: int, below: Below | None, *, worth: float, deadline: float
) -> Addressed | None:
    """Addresses by the engine, for the choice, or for one for a little less where there is no room.

    Args:
        residency: The choice, with times for room that counts bytes only.
        capacity: Bytes of the arena.
        below: Where bytes can go.
        worth: Seconds of a step that has to be beaten.
        deadline: Time by `time.monotonic` at which to stop, unless anything would do.

    Returns:
        The fastest that was found; None if it has no addresses, or is not worth it.
    """
    if below is None:
        return None
    best: Addressed | None = None
    seconds_of = dict.fromkeys(range(NUM_WAYS), np.inf)
    for num_tries in (_FEW_TRIES, _NUM_TRIES):
        # One way may find room at once where another gives up much to find it: with many tries
        # first those that did well with few; where none found any, those for tight arenas.
        for way in sorted(seconds_of, key=lambda way: (seconds_of[way], -way)):
            found = _stacked(residency, capacity, below, way, num_tries, worth, deadline)
            if found is not None:
                best, worth = found, found[0].seconds
                seconds_of[way] = worth
            if worth <= residency.seconds * _AS_GOOD or time.monotonic() > deadline:
                return best
    return best


def _stacked(
    residency: Residency,
    capacity: int,
    below: Below,
    way: int,
    num_tries: int,
    worth: float,
    deadline: float,
) -> Addressed | None:
    # Stays are stacked from both ends: the upper one has to be aligned as well.
    capacity -= capacity % residency.sequence.problem.alignment
    search = ResidencySearch(residency.sequence, capacity, below)
    shares = residency.shares.copy()
    failures = np.zeros(len(shares), np.int64)
    choice: Residency | None = residency
    best: Addressed | None = None
    for _ in range(num_tries):
        is_late = time.monotonic() > deadline and worth < np.inf
        if choice is None or choice.seconds >= worth or is_late:
            break
        chains = _chains(choice, _shrunk(choice, 0.0))
        stays = _with_offsets(choice, chains, [0] * len(chains), below.rates)
        missing = choice.sequence.stack(
            stays, capacity, step_seconds=choice.replay.step_seconds, way=way
        )
        if not missing.any():
            replay = choice.sequence.replay(choice.evicted, stays, below.rates, tier=choice.tier)
            if replay.overflow > 0:
                break
            if replay.step_seconds + choice.toll < worth:
                best = dataclasses.replace(choice, replay=replay), stays["offset"].tolist()
                worth = best[0].seconds
            # Where one waits for an address, a little less there may be faster.
            waits = np.diff(replay.starts - choice.replay.starts, prepend=0.0)
            missing = (waits > _LONG_WAIT * choice.seconds).astype(np.int64)
        lacking = np.flatnonzero(missing)
        if not len(lacking):
            break
        less = np.maximum(_STEP, missing[lacking] / capacity / 4)
        if time.monotonic() > deadline:  # now anything will do
            less *= 8
        there = np.minimum(shares[lacking], bytes_there(stays, len(shares))[lacking] / capacity)
        shares[lacking] = there - less * 2.0 ** failures[lacking]
        failures[lacking] += 1
        choice = search.at(np.maximum(shares, 0.0))
    return best


class PriorityStacking:
    """Addresses of a choice by stacking its stays in one order after the other, for less waiting.

    Those that found no place in the last order, or wait for theirs, come earlier in the next: the
    squeaky wheel gets the oil (Joslin and Clements 1999). An order that led to more waiting than
    the best one is forgotten.

    Args:
        choice: The choice, with times for room that counts bytes only.
        capacity: Bytes of the arena.
        below: Where bytes can go.
        way: One of `PRIORITY_WAYS`.
        random: Generator of the changes of priorities.

    Attributes:
        seconds: Of a step with the best order so far; infinite if none gave all a place.
    """

    def __init__(
        self,
        choice: Residency,
        capacity: int,
        below: Below,
        way: int,
        random: np.random.Generator,
    ) -> None:
        self.seconds = np.inf
        self._choice, self._below, self._way, self._random = choice, below, way, random
        self._capacity = capacity - capacity % choice.sequence.problem.alignment
        chains = _chains(choice, _shrunk(choice, 0.0))
        self._stays = _with_offsets(choice, chains, [0] * len(chains), below.rates)
        self._starts = self._stays["start"] % len(choice.sequence.order)
        self._priority = np.zeros(len(chains))
        self._best_priority = self._priority.copy()

    @property
    def floor(self) -> float:
        """Seconds of a step with room that counts bytes only."""
        return self._choice.seconds

    def try_order(self) -> Addressed | None:
        """Try an order; return what it gives if that is faster than all before."""
        choice, stays, random = self._choice, self._stays, self._random
        missing = choice.sequence.stack(
            stays,
            self._capacity,
            step_seconds=choice.replay.step_seconds,
            way=self._way,
            priority=self._priority,
        )
        if missing.any():
            lacking = stays["offset"] < 0
            self._priority[lacking] += random.uniform(0.02, 0.3, int(lacking.sum()))
            return None
        rates = self._below.rates
        replay = choice.sequence.replay(choice.evicted, stays, rates, tier=choice.tier)
        found: Addressed | None = None
        if replay.overflow <= 0 and replay.step_seconds + choice.toll < self.seconds:
            found = dataclasses.replace(choice, replay=replay), stays["offset"].tolist()
            self.seconds, self._best_priority = found[0].seconds, self._priority.copy()
        else:
            self._priority = self._best_priority.copy()
        waits = np.diff(replay.starts - choice.replay.starts, prepend=0.0)[self._starts]
        waiting = np.flatnonzero((waits > _LONG_WAIT * choice.seconds) & (stays["arrives"] != -2))
        waiting = waiting[random.random(len(waiting)) < random.choice((0.1, 0.3, 1.0))]
        self._priority[waiting] += random.uniform(0.0, 0.2)
        if random.random() < 0.3:
            self._priority += random.uniform(0.0, 0.05) * random.random(len(self._priority))
        return found


def improve_addresses(
    best: Addressed,
    residencies: Sequence[Residency],
    capacity: int,
    below: Below,
    *,
    deadline: float,
    seed: int,
) -> Addressed:
    """Improve addresses, and the choice that they are for, while `PriorityStacking` helps.

    Choices are those of the residencies, and the same for less and less room. What does best has
    most of the time.

    Args:
        best: What is to be beaten.
        residencies: Choices with times for room that counts bytes only.
        capacity: Bytes of the arena.
        below: Where bytes can go.
        deadline: Time by `time.monotonic`.
        seed: Of what is random.
    """
    random = np.random.default_rng(seed)
    tried: list[PriorityStacking] = []
    untried = _stackings(residencies, capacity, below, random)
    longest, failures = 0.0, 0  # the longest time of a try; tries since the last that was better
    while failures < _MAX_FAILURES and (now := time.monotonic()) + longest < deadline:
        stacking = None
        if len(tried) < _NUM_SURVEYED or random.random() < _SHARE_OF_UNTRIED:
            stacking = next(
                (new for new in untried if new.floor < best[0].seconds * _WORTH_IT), None
            )
        if stacking is not None:
            tried.append(stacking)
        else:
            tried = [one for one in tried if one.floor < best[0].seconds * _WORTH_IT]
            if not tried:
                break
            by_time = sorted(tried, key=lambda one: (one.seconds, -one.floor))
            stacking = by_time[min(int(random.exponential(0.7)), len(by_time) - 1)]
        found = stacking.try_order()
        if found is not None and found[0].seconds < best[0].seconds:
            best, failures = found, 0
        else:
            failures += 1
        longest = max(longest, time.monotonic() - now)
    return best


def _stackings(
    residencies: Sequence[Residency], capacity: int, below: Below, random: np.random.Generator
) -> Iterator[PriorityStacking]:
    """Make choices of residencies for less and less room, each with every order of priorities."""
    for room in _ROOMS:
        for residency in residencies:
            search = ResidencySearch(residency.sequence, capacity, below)
            choice = search.at(residency.shares * room)
            if choice is not None:
                for way in PRIORITY_WAYS:
                    yield PriorityStacking(choice, capacity, below, way, random)


def packed(
    residency: Residency,
    capacity: int,
    below: Below | None,
    *,
    pack_seconds: float,
    deadline: float,
    seed: int,
) -> Addressed:
    """Addresses by the packer.

    Args:
        residency: The choice.
        capacity: Bytes of the arena.
        below: Where bytes can go.
        pack_seconds: Time for each packing.
        deadline: Time by `time.monotonic` after which only the uses get room.
        seed: For the packer.

    Raises:
        InfeasibleError: No packing fits the capacity; `sufficient_device_bytes` is the lowest.
    """
    core = _chains(residency, _shrunk(residency, 0.0))
    rates = below.rates if below is not None else (Rates(1.0, 1.0),)
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    for slack in _SLACKS if residency.evicted.any() else (0.0,):
        if slack and time.monotonic() > deadline:
            continue
        chains = core if slack == 0 else _chains(residency, _shrunk(residency, slack))
        try:
            packing = pack(list(_buffers(residency, chains)), capacity, pack_seconds, seed)
        except InfeasibleError as error:
            if failure is None or _enough(error) < _enough(failure):
                failure = error
            continue
        offsets = list(packing.offsets)
        stays = _with_offsets(residency, core, offsets, rates)
        replay = residency.sequence.replay(residency.evicted, stays, rates, tier=residency.tier)
        if replay.overflow <= 0 and (
            best is None or replay.step_seconds < best[0].replay.step_seconds
        ):
            best = dataclasses.replace(residency, replay=replay), offsets
            if best[0].seconds <= residency.seconds * _AS_GOOD:
                break
    if best is None:
        assert failure is not None
        raise failure
    return best


def _enough(error: InfeasibleError) -> int:
    assert error.sufficient_device_bytes is not None
    return error.sufficient_device_bytes


def _chains(residency: Residency, replay: Replay) -> list[list[Stay]]:
    return chains_of(stays_of(residency.sequence, moves_of(residency, replay)))


def _shrunk(residency: Residency, slack: float) -> Replay:
    """The times of a choice with a part of the boundaries on the way out and on the way back."""
    sequence, replay = residency.sequence, residency.replay
    uses = sequence.gap_end % len(sequence.order)
    after = sequence.gap_start + 1
    out_end = np.minimum(replay.out_end, sequence.gap_end)
    out_end = after + ((out_end - after) * slack).astype(np.int64)
    in_start = np.maximum(replay.in_start, uses - len(sequence.order)).astype(np.int64)
    in_start = uses - ((uses - in_start) * slack).astype(np.int64)
    return replay._replace(out_end=out_end, in_start=in_start)


def _buffers(residency: Residency, chains: Sequence[Sequence[Stay]]) -> Iterator[Buffer]:
    """What the packer gets; an interval over the end of the step is one with a gap.

    Bytes are the real ones: the arena may end before a multiple of the alignment.
    """
    num_positions = len(residency.sequence.order)
    problem = residency.sequence.problem
    for chain in chains:
        start, end, gaps = chain[0].start, chain[-1].end, ()
        num_bytes = max(int(problem.actual_bytes[stay.item]) for stay in chain)
        if end > num_positions:
            gaps = ((end - num_positions, start),) if end - num_positions < start else ()
            start, end = 0, num_positions
        yield Buffer(start, end, num_bytes, alignment=problem.alignment, gaps=gaps)


def _with_offsets(
    residency: Residency,
    chains: Sequence[Sequence[Stay]],
    offsets: Sequence[int],
    rates: Sequence[Rates],
) -> np.ndarray:
    """The stays as the engine takes them."""
    stays = np.zeros(len(chains), STAY)
    stays["offset"] = offsets
    stays["bytes"] = residency.sequence.problem.object_bytes[[chain[0].item for chain in chains]]
    stays["start"] = [chain[0].start for chain in chains]
    stays["end"] = [chain[-1].end for chain in chains]
    stays["arrives"] = [chain[0].arrives for chain in chains]
    stays["leaves"] = [chain[-1].leaves for chain in chains]
    # When each needs its room, and when that is free again if nobody waits.
    last, goes = stays["end"].astype(np.int64), stays["leaves"] >= 0
    num_positions = len(residency.sequence.order)
    left = residency.replay.out_end[stays["leaves"][goes]].astype(np.int64)
    around = np.where(last[goes] > num_positions, num_positions, 0)
    last[goes] = np.maximum(last[goes], np.minimum(left, 2 * num_positions) + around)
    stays["from"] = _due(residency, stays, rates)
    stays["until"] = np.where(stays["leaves"] == -2, np.inf, _seconds(residency, last))
    return stays


def _due(residency: Residency, stays: np.ndarray, rates: Sequence[Rates]) -> np.ndarray:
    """When stays need their room so that nothing waits: what comes in as late as links allow.

    What comes in earlier than that may wait for somebody who is on the way out. Transfers of a link
    come in the order of their uses, so each has to end when the next one has to begin.
    """
    used = _seconds(residency, stays["start"].astype(np.int64))
    due, gaps = used.copy(), stays["arrives"]
    comes = np.flatnonzero(gaps >= 0)
    comes = comes[np.argsort(stays["start"][comes], kind="stable")[::-1]]
    tiers = np.zeros(len(comes)) if residency.tier is None else residency.tier[gaps[comes]]
    for tier, rate in enumerate(rates):
        end = np.inf
        for step in (1, 0):  # the first transfers of the next step follow the last ones of this
            for stay in comes[tiers == tier].tolist():
                end = min(end, used[stay] + step * residency.replay.step_seconds)
                end -= stays["bytes"][stay] / rate.back
                due[stay] = end
    return due


def _seconds(residency: Residency, boundaries: np.ndarray) -> np.ndarray:
    """When boundaries are reached, in seconds since their step began; those of other steps too."""
    steps, positions = np.divmod(boundaries, len(residency.sequence.order))
    return steps * residency.replay.step_seconds + residency.replay.starts[positions]
