"""Offsets for the finalists of a search, and the fastest of them once they have some."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from penstock.errors import InfeasibleError
from penstock.planner.search._auto import SearchCandidate
from penstock.planner.search._offsets import (
    Addressed,
    KeptReplays,
    assign_offsets,
    better_failure,
    engine_intervals,
    pack_offsets,
    subtract_previous,
    sufficient_bytes,
)
from penstock.planner.search._place_search import PlaceSearch
from penstock.planner.search._problem import ALWAYS
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch
from penstock.planner.search._sequence import PRIORITY_STRATEGIES

# Steps so short are packed as well: where the packer fits tightly, fewer transfers may wait.
_FEW_POSITIONS = 500
# Shares of the arena for which evictions are chosen, when they get offsets.
_ARENA_SHARES = (0.99, 0.97, 0.95, 0.92, 0.85, 0.7, 0.4, 0.0)
_FINALIST_SHARE = 0.3  # of the time that is left, for the fastest of the finalists left
_FIRST_SHARE = 0.35  # of the time, for the first offsets of each; the rest improves the best
_AS_GOOD = 1.001  # offsets that make no finalist slower are not improved
_ENGINE_SHARE = 0.6  # of a finalist's time, as long as it has no offsets
_NUM_QUICK = 5  # choices for smaller arenas that have few tries before the first has many
_NUM_LATE_TRIES = 3  # choices for which the engine is asked even if there is no time
_WORTH_IT = 0.998  # of the best time: smaller gains are not searched for
# A wait, as a share of the step, from which on an interval gets a higher priority.
_LONG_WAIT = 1e-4
_AGAIN_CHANCES = (0.1, 0.3, 1.0)  # that an interval which waits gets it
_WORTH_A_TRY = 0.999  # of the best time: choices that take longer in bytes alone are skipped
# Shares of the arena for which choices are made; so many are tried once before the best of them are
# tried again, then some now and then.
_SURVEYED_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.98, 0.94, 0.9, 0.8)
_NUM_SURVEYED, _SHARE_OF_UNTRIED, _MAX_FAILURES = 6, 0.15, 1000
_PRIORITY_SHARE = 0.3  # of the time for priorities; the rest is for places one by one
# Offsets that are placed anew, so many at once; the next ones where one has not become better.
_NUM_PLACED, _NUM_PLACED_AT_ONCE, _MAX_PLACE_FAILURES = 5, 2, 600
# Few intervals have few other offsets: the most failures for each interval.
_FAILURES_OF_INTERVAL, _PLACE_FAILURES_OF_INTERVAL = 40, 20


def offsets_of_fastest(
    finalists: Sequence[SearchCandidate],
    arena: Arena,
    *,
    deadline: float,
    seed: int,
    tighter: Sequence[SearchCandidate] = (),
) -> Addressed:
    """Return the finalist that is the fastest once it has offsets.

    Finalists come the fastest first, and each has its share of the time; `tighter` were found
    for smaller arenas.

    Raises:
        InfeasibleError: None of them has offsets.
    """
    best: Addressed | None = None
    failure: InfeasibleError | None = None
    began, last = time.monotonic(), deadline
    for index, candidate in enumerate(finalists):
        now = time.monotonic()
        # Without second runs a choice for a smaller arena is worth more than other priorities.
        deadline = last
        if best is not None and candidate.dropped:
            deadline = began + max(0.0, last - began) * _FIRST_SHARE
        if best is not None and (candidate.seconds >= best[0].seconds or now > deadline):
            continue
        share = max(_FINALIST_SHARE, 1 / (len(finalists) - index))
        try:
            best = find_offsets(
                candidate.choice,
                arena,
                best=best,
                deadline=now + max(0.0, deadline - now) * share,
                seed=seed,
            )
        except InfeasibleError as error:
            failure = better_failure(failure, error)
    if best is None:
        assert failure is not None
        raise failure
    if arena.lower is None or best[0].seconds <= finalists[0].seconds * _AS_GOOD:
        return best
    near = {id(c.choice): c.choice for c in (*tighter, *finalists[:1])}
    near = [choice for choice in near.values() if choice.seconds < best[0].seconds]
    return improve_offsets(best, near, arena, deadline=last, seed=seed)


def find_offsets(
    choice: EvictionChoice,
    arena: Arena,
    *,
    best: Addressed | None = None,
    deadline: float,
    seed: int,
) -> Addressed:
    """Find offsets for a choice, or for one for a smaller arena where these cost less time.

    `best` has offsets already, and is returned where this is not faster.
    """
    # Where the engine's strategies find nothing, the packer needs its part of the time.
    now = time.monotonic()
    halfway = now + max(0.0, deadline - now) * _ENGINE_SHARE
    if best is None:  # a plan for a smaller arena soon, rather than many tries for the whole
        best = _find_quickly(choice, arena, deadline=halfway)
    for number, smaller in enumerate(_for_smaller_arenas(choice, arena)):
        until = halfway if best is None else deadline
        # A late choice has a cheap try nevertheless: one for a much smaller arena costs more.
        if time.monotonic() > until and (best is not None or number >= _NUM_LATE_TRIES):
            break
        worth = best[0].seconds * _WORTH_IT if best is not None else np.inf
        best = assign_offsets(smaller, arena, worth=worth, deadline=until) or best
    if best is None:
        return _pack_smaller(choice, arena, deadline=deadline, seed=seed)
    if len(choice.sequence.order) <= _FEW_POSITIONS:
        with contextlib.suppress(InfeasibleError):
            other = pack_offsets(choice, arena, deadline=deadline, seed=seed)
            return min(best, other, key=lambda found: found[0].seconds)
    return best


def _find_quickly(choice: EvictionChoice, arena: Arena, *, deadline: float) -> Addressed | None:
    """Return the first offsets that few tries find, for smaller and smaller arenas."""
    for smaller in itertools.islice(_for_smaller_arenas(choice, arena), _NUM_QUICK):
        found = assign_offsets(smaller, arena, worth=np.inf, deadline=deadline, quick=True)
        if found is not None or time.monotonic() > deadline:
            return found
    return None


def _pack_smaller(choice: EvictionChoice, arena: Arena, *, deadline: float, seed: int) -> Addressed:
    """Pack choices for smaller and smaller arenas until one fits."""
    failure: InfeasibleError | None = None
    choices = list(_for_smaller_arenas(choice, arena))
    while choices:
        # Late, the choice for the smallest arena first: it is the most likely to fit.
        smaller = choices.pop(-1 if time.monotonic() > deadline else 0)
        try:
            return pack_offsets(smaller, arena, deadline=deadline, seed=seed)
        except InfeasibleError as error:
            failure = better_failure(failure, error)
    assert failure is not None
    given, enough = (
        num_bytes + arena.workspace_bytes
        for num_bytes in (arena.capacity, sufficient_bytes(failure))
    )
    raise InfeasibleError(
        f"device_memory={given} bytes: what the operators need fits, "
        f"but no addresses were found that do; {enough} bytes suffice for a plan that was found: "
        "raise device_memory= or time_limit=",
        sufficient_device_bytes=enough,
    )


def _for_smaller_arenas(choice: EvictionChoice, arena: Arena) -> Iterator[EvictionChoice]:
    """Yield the choice itself, then choices for smaller and smaller arenas."""
    yield choice
    if arena.lower is None:
        return
    sequence = choice.sequence
    least = int(sequence.working_set.max(initial=0))
    seen = {choice.replay.in_start.tobytes()}
    # First with its own profile; then with nothing kept that an operator does not use.
    for shares in (choice.shares, np.zeros_like(choice.shares)):
        for share in _ARENA_SHARES:
            smaller = dataclasses.replace(arena, capacity=max(least, int(arena.capacity * share)))
            found = ResidencySearch(sequence, smaller).at(shares)
            if found is not None and (key := found.replay.in_start.tobytes()) not in seen:
                seen.add(key)
                yield found
    smallest = dataclasses.replace(arena, capacity=least)
    found = ResidencySearch(sequence, smallest).at(choice.shares * 0, prefetch_distance=0)
    if found is not None:
        yield found


class PrioritySearch:
    """A search for the priorities by which the engine assigns the offsets of a choice.

    Intervals without a place at the last try, or that wait for theirs, have a higher priority at
    the next: the squeaky wheel gets the oil (Joslin and Clements 1999). Priorities that led to more
    waiting than the best ones are forgotten.

    Attributes:
        seconds: Of a step with the best priorities so far; infinite if none gave all a place.
        floor: Seconds of a step for which bytes alone are counted.
    """

    def __init__(
        self, choice: EvictionChoice, arena: Arena, strategy: int, random: np.random.Generator
    ) -> None:
        assert arena.lower is not None
        self.seconds, self.floor = np.inf, choice.seconds
        self._choice, self._strategy, self._random = choice, strategy, random
        self._rates = arena.lower.rates
        self._capacity = arena.capacity - arena.capacity % choice.sequence.problem.alignment
        self._intervals = engine_intervals(choice, self._rates)
        self._replay = KeptReplays(choice, self._rates)
        self._starts = self._intervals["start"] % len(choice.sequence.order)
        self._is_movable = self._intervals["arrives"] != ALWAYS
        self._priority = np.zeros(len(self._intervals))
        self._best_priority = self._priority.copy()

    @property
    def num_intervals(self) -> int:
        """Number of intervals that have an offset."""
        return len(self._intervals)

    def try_priorities(self) -> Addressed | None:
        """Try the next priorities; return what they give if that is faster than all before."""
        choice, intervals, random = self._choice, self._intervals, self._random
        missing = choice.sequence.assign_offsets(
            intervals,
            self._capacity,
            step_seconds=choice.replay.step_seconds,
            strategy=self._strategy,
            priority=self._priority,
        )
        if missing.any():
            lacking = intervals["offset"] < 0
            self._priority[lacking] += random.uniform(0.02, 0.3, int(lacking.sum()))
            return None
        replay = self._replay(intervals)
        found: Addressed | None = None
        seconds = replay.step_seconds + choice.interference_seconds
        if replay.overflow <= 0 and seconds < self.seconds:
            found = dataclasses.replace(choice, replay=replay), intervals["offset"].tolist()
            self.seconds, self._best_priority = found[0].seconds, self._priority.copy()
        else:
            self._priority = self._best_priority.copy()
        waits = subtract_previous(replay.starts - choice.replay.starts)[self._starts]
        is_waiting = (waits > _LONG_WAIT * choice.seconds) & self._is_movable
        waiting = is_waiting.nonzero()[0]
        chances = random.random(len(waiting))
        waiting = waiting[chances < _AGAIN_CHANCES[random.integers(len(_AGAIN_CHANCES))]]
        self._priority[waiting] += random.uniform(0.0, 0.2)
        if random.random() < 0.3:
            self._priority += random.uniform(0.0, 0.05) * random.random(len(self._priority))
        return found


_Search = TypeVar("_Search", PrioritySearch, PlaceSearch)


def improve_offsets(
    best: Addressed,
    choices: Sequence[EvictionChoice],
    arena: Arena,
    *,
    deadline: float,
    seed: int,
) -> Addressed:
    """Improve offsets, and the choice that they are for, while it helps.

    First by `PrioritySearch`, for the given choices, and the same for smaller and smaller arenas;
    the fastest searches have most of the time. Then by `PlaceSearch`.

    Choices have times for which bytes alone were counted; the arena has a lower tier.
    """
    random = np.random.default_rng(seed)
    now = time.monotonic()
    until = now + max(0.0, deadline - now) * _PRIORITY_SHARE
    found = _improve_priorities(best, choices, arena, deadline=until, random=random)
    waiting = [PlaceSearch(each, arena, random) for each in found[:_NUM_PLACED]]
    places, waiting = waiting[:_NUM_PLACED_AT_ONCE], waiting[_NUM_PLACED_AT_ONCE:]
    longest = 0.0  # the longest time of a try
    while places and (now := time.monotonic()) + longest < deadline:
        search = _choose_fast(places, random)
        most = min(_MAX_PLACE_FAILURES, _PLACE_FAILURES_OF_INTERVAL * search.num_intervals)
        if not search.try_places() and search.failures >= most:
            places = [each for each in places if each is not search] + waiting[:1]
            waiting = waiting[1:]
        best = min(best, search.best, key=lambda one: one[0].seconds)
        longest = max(longest, time.monotonic() - now)
    return best


def _improve_priorities(
    best: Addressed,
    choices: Sequence[EvictionChoice],
    arena: Arena,
    *,
    deadline: float,
    random: np.random.Generator,
) -> list[Addressed]:
    """Return the best of each search, and the given one, the fastest first."""
    given = best
    tried: list[PrioritySearch] = []
    best_of: dict[PrioritySearch, Addressed] = {}
    untried = _searches(choices, arena, random)
    longest, failures = 0.0, 0  # the longest time of a try; tries since the last improvement
    most = _MAX_FAILURES
    while failures < most and (now := time.monotonic()) + longest < deadline:
        search = None
        if len(tried) < _NUM_SURVEYED or random.random() < _SHARE_OF_UNTRIED:
            search = next(
                (new for new in untried if new.floor < best[0].seconds * _WORTH_A_TRY), None
            )
        if search is not None:
            tried.append(search)
        else:
            tried = [one for one in tried if one.floor < best[0].seconds * _WORTH_A_TRY]
            if not tried:
                break
            search = _choose_fast(tried, random)
        most = min(_MAX_FAILURES, _FAILURES_OF_INTERVAL * search.num_intervals)
        found = search.try_priorities()
        if found is not None:
            best_of[search] = found
        if found is not None and found[0].seconds < best[0].seconds:
            best, failures = found, 0
        else:
            failures += 1
        longest = max(longest, time.monotonic() - now)
    return sorted([given, *best_of.values()], key=lambda one: one[0].seconds)


def _choose_fast(tried: Sequence[_Search], random: np.random.Generator) -> _Search:
    """Choose one of the fastest searches, mostly the first."""
    by_time = sorted(tried, key=lambda one: (one.seconds, -one.floor))
    return by_time[min(int(random.exponential(0.7)), len(by_time) - 1)]


def _searches(
    choices: Sequence[EvictionChoice], arena: Arena, random: np.random.Generator
) -> Iterator[PrioritySearch]:
    """Yield a search for each strategy, each choice, and smaller and smaller arenas."""
    for share in _SURVEYED_SHARES:
        for choice in choices:
            smaller = ResidencySearch(choice.sequence, arena).at(choice.shares * share)
            if smaller is not None:
                for strategy in PRIORITY_STRATEGIES:
                    yield PrioritySearch(smaller, arena, strategy, random)
