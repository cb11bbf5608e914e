"""Offsets for a choice of evictions, and the time of the step with them.

Between its uses a storage occupies its place only while it is on its way out, and again from when
it begins to come back. How long that is follows from time, and how long it may be from offsets: of
two storages at one address the later one waits. So the engine assigns offsets with which transfers
wait little. Where an interval finds no place, a little more is evicted at its position, and the
engine starts again. Where that leads nowhere the packer takes over, first with as much time on the
links as transfers may use, then with a part of that, at last with the uses alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.errors import InfeasibleError
from penstock.planner._live_ranges import occupied_bytes
from penstock.planner._request import LinkRates
from penstock.planner.packing import Buffer, pack
from penstock.planner.search._problem import ALWAYS, INTERVAL
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch
from penstock.planner.search._sequence import NUM_STRATEGIES, ReplayTimes

# Share of the arena by which it is lowered where an interval found no place; twice as much each
# time that this was not enough.
_STEP = 0.001
_FEW_TRIES, _NUM_TRIES = 6, 60
# A wait for an address, as a share of the step, from which on a lower arena there is tried.
_LONG_WAIT = 0.001
# Parts of the time on the links for which the packer reserves bytes.
_SLACKS = (1.0, 0.35, 0.0)
_AS_GOOD = 1.001

# Few intervals get the same offsets again and again.
_FEW_INTERVALS, _MOST_KEPT = 64, 512

Addressed = tuple[EvictionChoice, list[int]]
"""A choice with the times that its offsets allow, and the offset of each chain of intervals."""


def assign_offsets(
    choice: EvictionChoice, arena: Arena, *, worth: float, deadline: float, quick: bool = False
) -> Addressed | None:
    """Find offsets by the engine, for the choice, or for one for a little less where none fit.

    The choice has times for which bytes alone were counted; `worth` are the seconds of a step
    that have to be beaten, after the deadline any plan does.
    A `quick` search has few tries.

    Returns:
        The fastest that was found; None if there are no offsets, or none that beat `worth`.
    """
    if arena.lower is None:
        return None
    best: Addressed | None = None
    seconds_of = dict.fromkeys(range(NUM_STRATEGIES), np.inf)
    for num_tries in (_FEW_TRIES,) if quick else (_FEW_TRIES, _NUM_TRIES):
        # With many tries first the strategies that did well with few; where none found any offsets,
        # those for tight arenas.
        for strategy in sorted(seconds_of, key=lambda number: (seconds_of[number], -number)):
            found = _assign_by(strategy, choice, arena, num_tries, worth, deadline)
            if found is not None:
                best, worth = found, found[0].seconds
                seconds_of[strategy] = worth
            if worth <= choice.seconds * _AS_GOOD or time.monotonic() > deadline:
                return best
        if best is None and worth < np.inf:  # more tries are for what has some, or for any plan
            return None
    return best


def _assign_by(
    strategy: int,
    given: EvictionChoice,
    arena: Arena,
    num_tries: int,
    worth: float,
    deadline: float,
) -> Addressed | None:
    assert arena.lower is not None
    rates = arena.lower.rates
    # Intervals are laid from both ends: the upper one has to be aligned as well.
    capacity = arena.capacity - arena.capacity % given.sequence.problem.alignment
    search = ResidencySearch(given.sequence, dataclasses.replace(arena, capacity=capacity))
    shares = given.shares.copy()
    failures = np.zeros(len(shares), np.int64)
    choice: EvictionChoice | None = given
    best: Addressed | None = None
    for _ in range(num_tries):
        is_late = time.monotonic() > deadline and worth < np.inf
        if choice is None or choice.seconds >= worth or is_late:
            break
        intervals = engine_intervals(choice, rates)
        missing = choice.sequence.assign_offsets(
            intervals, capacity, step_seconds=choice.replay.step_seconds, strategy=strategy
        )
        if not missing.any():
            replay = choice.sequence.replay(choice.evicted, intervals, rates, tier=choice.tier)
            if replay.overflow > 0:
                break
            if replay.step_seconds + choice.interference_seconds < worth:
                best = dataclasses.replace(choice, replay=replay), intervals["offset"].tolist()
                worth = best[0].seconds
            # Where a transfer waits for an address, a lower arena may be faster.
            waits = subtract_previous(replay.starts - choice.replay.starts)
            missing = (waits > _LONG_WAIT * choice.seconds).astype(np.int64)
        lacking = np.flatnonzero(missing)
        if not len(lacking):
            break
        less = np.maximum(_STEP, missing[lacking] / capacity / 4)
        if time.monotonic() > deadline:  # now any plan will do
            less *= 8
        ends = intervals["start"], intervals["end"]
        resident = occupied_bytes(*ends, intervals["bytes"], len(shares))[lacking] / capacity
        shares[lacking] = np.minimum(shares[lacking], resident) - less * 2.0 ** failures[lacking]
        failures[lacking] += 1
        choice = search.at(np.maximum(shares, 0.0))
    return best


def pack_offsets(choice: EvictionChoice, arena: Arena, *, deadline: float, seed: int) -> Addressed:
    """Find offsets by the packer.

    After the deadline bytes are reserved for uses only.

    Raises:
        InfeasibleError: No packing fits the capacity; `sufficient_device_bytes` is the lowest.
    """
    core = choice.parts(slack=0.0)
    pack_seconds = min(max(0.5, (deadline - time.monotonic()) / 16), 2.0)
    rates = arena.lower.rates if arena.lower is not None else (LinkRates(1.0, 1.0),)
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    for slack in _SLACKS if choice.evicted.any() else (0.0,):
        if slack and time.monotonic() > deadline:
            continue
        buffers = _buffers(choice, choice.parts(slack))
        try:
            packing = pack(list(buffers), arena.capacity, pack_seconds, seed)
        except InfeasibleError as error:
            failure = better_failure(failure, error)
            continue
        intervals = engine_intervals(choice, rates, core)
        intervals["offset"] = packing.offsets
        replay = choice.sequence.replay(choice.evicted, intervals, rates, tier=choice.tier)
        is_better = best is None or replay.step_seconds < best[0].replay.step_seconds
        if replay.overflow <= 0 and is_better:
            best = dataclasses.replace(choice, replay=replay), list(packing.offsets)
            if best[0].seconds <= choice.seconds * _AS_GOOD:
                break
    if best is None:
        assert failure is not None
        raise failure
    return best


def sufficient_bytes(error: InfeasibleError) -> int:
    """Return the bytes that an error says to be sufficient."""
    assert error.sufficient_device_bytes is not None
    return error.sufficient_device_bytes


def better_failure(one: InfeasibleError | None, other: InfeasibleError) -> InfeasibleError:
    """Return the error for which fewer bytes are sufficient."""
    if one is None or sufficient_bytes(other) < sufficient_bytes(one):
        return other
    return one


def _chain_ends(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last part of each chain."""
    last = parts[parts["next"] < 0]
    return parts[parts["before"] < 0], last[np.argsort(last["chain"])]


def _buffers(choice: EvictionChoice, parts: np.ndarray) -> Iterator[Buffer]:
    """Yield buffers for the packer; one across the end of the step has a gap inside the step.

    Bytes are not rounded up: the arena may end before a multiple of the alignment.
    """
    num_positions, problem = len(choice.sequence.order), choice.sequence.problem
    first, last = _chain_ends(parts)
    num_bytes = np.zeros(len(first), np.int64)
    np.maximum.at(num_bytes, parts["chain"], problem.actual_bytes[parts["object"]])
    columns = first["start"].tolist(), last["end"].tolist(), num_bytes.tolist()
    for start, end, size in zip(*columns, strict=True):
        gaps = ()
        if end > num_positions:
            gaps = ((end - num_positions, start),) if end - num_positions < start else ()
            start, end = 0, num_positions
        yield Buffer(start, end, size, alignment=problem.alignment, gaps=gaps)


def engine_intervals(
    choice: EvictionChoice, rates: Sequence[LinkRates], parts: np.ndarray | None = None
) -> np.ndarray:
    """Return chains of parts as `INTERVAL`s, by uses alone if None; offsets are 0."""
    first, last = _chain_ends(choice.parts(slack=0.0) if parts is None else parts)
    intervals = np.zeros(len(first), INTERVAL)
    intervals["bytes"] = choice.sequence.problem.object_bytes[first["object"]]
    for name, ends in (("start", first), ("end", last), ("arrives", first), ("leaves", last)):
        intervals[name] = ends[name]
    # When the place of each is occupied from, and free again, if no transfer waits.
    last, leaving = intervals["end"].astype(np.int64), intervals["leaves"] >= 0
    num_positions = len(choice.sequence.order)
    left = choice.replay.out_end[intervals["leaves"][leaving]].astype(np.int64)
    around = np.where(last[leaving] > num_positions, num_positions, 0)
    last[leaving] = np.maximum(last[leaving], np.minimum(left, 2 * num_positions) + around)
    intervals["from"] = _latest_starts(choice, intervals, rates)
    intervals["until"] = np.where(intervals["leaves"] == ALWAYS, np.inf, _seconds_at(choice, last))
    return intervals


def _latest_starts(
    choice: EvictionChoice, intervals: np.ndarray, rates: Sequence[LinkRates]
) -> np.ndarray:
    """Return the seconds at which intervals begin if transfers in start as late as links allow.

    An earlier transfer may wait for an address that is not free yet. Transfers of a link run in the
    order of their uses, so each has to end when the next one has to begin.
    """
    used = _seconds_at(choice, intervals["start"].astype(np.int64))
    due, holes = used.copy(), intervals["arrives"]
    arriving = np.flatnonzero(holes >= 0)
    arriving = arriving[np.argsort(intervals["start"][arriving], kind="stable")[::-1]]
    tiers = np.zeros(len(arriving)) if choice.tier is None else choice.tier[holes[arriving]]
    for tier, rate in enumerate(rates):
        own = arriving[tiers == tier]
        # The first transfers of the next step follow the last ones of this. From the last one on:
        #   due[i] = min(due[i - 1], used[i]) - seconds[i]
        # and so due[i] + total[i] is the least of used[j] + total[j - 1] of all j up to i.
        seconds = np.tile(intervals["bytes"][own] / rate.inward, 2)
        total = np.cumsum(seconds)
        latest = np.concatenate([used[own] + choice.replay.step_seconds, used[own]])
        latest = np.minimum.accumulate(latest + total - seconds) - total
        due[own] = latest[len(own) :]
    return due


def _seconds_at(choice: EvictionChoice, boundaries: np.ndarray) -> np.ndarray:
    """Return when boundaries, of any step, are reached, in seconds since the step began."""
    steps, positions = np.divmod(boundaries, len(choice.sequence.order))
    return steps * choice.replay.step_seconds + choice.replay.starts[positions]


def subtract_previous(seconds: np.ndarray) -> np.ndarray:
    """Subtract from each element the one before it."""
    differences = seconds.copy()
    differences[1:] -= seconds[:-1]
    return differences


class KeptReplays:
    """Times of a choice of evictions by offsets, kept where there are few intervals."""

    def __init__(self, choice: EvictionChoice, rates: Sequence[LinkRates]) -> None:
        self._choice, self._rates = choice, rates
        self._kept: dict[bytes, ReplayTimes] = {}

    def __call__(self, intervals: np.ndarray) -> ReplayTimes:
        """Time a step with the offsets of intervals, whose other fields never change."""
        choice, is_kept = self._choice, len(intervals) <= _FEW_INTERVALS
        key = intervals["offset"].tobytes() if is_kept else b""
        if is_kept and key in self._kept:
            return self._kept[key]
        replay = choice.sequence.replay(choice.evicted, intervals, self._rates, tier=choice.tier)
        if is_kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = replay
        return replay
