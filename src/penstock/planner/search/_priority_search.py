"""Improvement of offsets by other priorities of the intervals, for shorter waits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.planner.search._library import ALWAYS
from penstock.planner.search._offsets import Addressed, engine_intervals
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch
from penstock.planner.search._sequence import PRIORITY_STRATEGIES

# A wait, as a share of the step, from which on an interval gets a higher priority.
_LONG_WAIT = 1e-4
_WORTH_IT = 0.999  # of the best time: choices that take longer in bytes alone are skipped
# Shares of the arena for which choices are made; so many are tried once before the best of them are
# tried again, then some now and then.
_ARENA_SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.98, 0.94, 0.9, 0.8)
_NUM_SURVEYED, _SHARE_OF_UNTRIED, _MAX_FAILURES = 6, 0.15, 1000


class PrioritySearch:
    """A search for the priorities by which the engine assigns the offsets of a choice.

    Intervals without a place at the last try, or that wait for theirs, have a higher priority at
    the next: the squeaky wheel gets the oil (Joslin and Clements 1999). Priorities that led to more
    waiting than the best ones are forgotten.

    Args:
        choice: The choice, with times for which bytes alone were counted.
        arena: The arena; it has a lower tier.
        strategy: One of `PRIORITY_STRATEGIES`.
        random: Generator of the changes of priorities.

    Attributes:
        seconds: Of a step with the best priorities so far; infinite if none gave all a place.
    """

    def __init__(
        self, choice: EvictionChoice, arena: Arena, strategy: int, random: np.random.Generator
    ) -> None:
        assert arena.lower is not None
        self.seconds = np.inf
        self._choice, self._strategy, self._random = choice, strategy, random
        self._rates = arena.lower.rates
        self._capacity = arena.capacity - arena.capacity % choice.sequence.problem.alignment
        self._intervals = engine_intervals(choice, self._rates)
        self._starts = self._intervals["start"] % len(choice.sequence.order)
        self._priority = np.zeros(len(self._intervals))
        self._best_priority = self._priority.copy()

    @property
    def floor(self) -> float:
        """Seconds of a step for which bytes alone are counted."""
        return self._choice.seconds

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
        replay = choice.sequence.replay(choice.evicted, intervals, self._rates, tier=choice.tier)
        found: Addressed | None = None
        seconds = replay.step_seconds + choice.interference_seconds
        if replay.overflow <= 0 and seconds < self.seconds:
            found = dataclasses.replace(choice, replay=replay), intervals["offset"].tolist()
            self.seconds, self._best_priority = found[0].seconds, self._priority.copy()
        else:
            self._priority = self._best_priority.copy()
        waits = np.diff(replay.starts - choice.replay.starts, prepend=0.0)[self._starts]
        is_waiting = (waits > _LONG_WAIT * choice.seconds) & (intervals["arrives"] != ALWAYS)
        waiting = np.flatnonzero(is_waiting)
        waiting = waiting[random.random(len(waiting)) < random.choice((0.1, 0.3, 1.0))]
        self._priority[waiting] += random.uniform(0.0, 0.2)
        if random.random() < 0.3:
            self._priority += random.uniform(0.0, 0.05) * random.random(len(self._priority))
        return found


def improve_offsets(
    best: Addressed,
    choices: Sequence[EvictionChoice],
    arena: Arena,
    *,
    deadline: float,
    seed: int,
) -> Addressed:
    """Improve offsets, and the choice that they are for, by `PrioritySearch` while it helps.

    Choices are the given ones, and the same for smaller and smaller arenas. The fastest searches
    have most of the time.

    Args:
        best: The choice with offsets that is to be beaten.
        choices: Choices with times for which bytes alone were counted.
        arena: The arena; it has a lower tier.
        deadline: Time by `time.monotonic`.
        seed: Of random numbers.
    """
    random = np.random.default_rng(seed)
    tried: list[PrioritySearch] = []
    untried = _searches(choices, arena, random)
    longest, failures = 0.0, 0  # the longest time of a try; tries since the last improvement
    while failures < _MAX_FAILURES and (now := time.monotonic()) + longest < deadline:
        search = None
        if len(tried) < _NUM_SURVEYED or random.random() < _SHARE_OF_UNTRIED:
            search = next((new for new in untried if new.floor < best[0].seconds * _WORTH_IT), None)
        if search is not None:
            tried.append(search)
        else:
            tried = [one for one in tried if one.floor < best[0].seconds * _WORTH_IT]
            if not tried:
                break
            search = _choose_fast(tried, random)
        found = search.try_priorities()
        if found is not None and found[0].seconds < best[0].seconds:
            best, failures = found, 0
        else:
            failures += 1
        longest = max(longest, time.monotonic() - now)
    return best


def _choose_fast(tried: Sequence[PrioritySearch], random: np.random.Generator) -> PrioritySearch:
    """Choose one of the fastest searches, mostly the first."""
    by_time = sorted(tried, key=lambda one: (one.seconds, -one.floor))
    return by_time[min(int(random.exponential(0.7)), len(by_time) - 1)]


def _searches(
    choices: Sequence[EvictionChoice], arena: Arena, random: np.random.Generator
) -> Iterator[PrioritySearch]:
    """Yield a search for each strategy, each choice, and smaller and smaller arenas."""
    for share in _ARENA_SHARES:
        for choice in choices:
            smaller = ResidencySearch(choice.sequence, arena).at(choice.shares * share)
            if smaller is not None:
                for strategy in PRIORITY_STRATEGIES:
                    yield PrioritySearch(smaller, arena, strategy, random)
