"""A search that places a few intervals anew: a large neighbourhood search of offsets.

Offsets in the order of priorities change all at once. Where one operator waits for an address it is
enough to move what lies around it, while all else keeps its place.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from penstock.planner.search._offsets import (
    Addressed,
    KeptReplays,
    engine_intervals,
    subtract_previous,
)
from penstock.planner.search._problem import ALWAYS
from penstock.planner.search._residency import Arena
from penstock.planner.search._sequence import AGAIN

_LONG_WAIT = 1e-4  # share of the step from which on a wait counts
# Widths of the addresses that are cleared, in bytes of what waits; how long before it they are, in
# shares of a step; the most intervals that are placed anew.
_WIDTHS, _AHEAD, _MOST_MOVED = (1, 2, 4, 8), (0.0, 0.02, 0.1), 40
_TINY = 1 / 64  # of what waits: smaller intervals stay
_NEAR, _FIRST = 0.5, 0.6  # shares of the tries around its place, and with it first


class PlaceSearch:
    """A search for offsets of one choice of evictions, from some that it has.

    A try takes the offsets of what an operator waits for, and of what lies in a range of addresses
    meanwhile, and places them again in another order; it is kept where the step takes no longer
    (Shaw 1998, large neighbourhood search).

    Attributes:
        best: The choice with its offsets.
        floor: Seconds of a step for which bytes alone are counted.
        num_intervals: Number of intervals that may be placed anew.
        failures: Tries since the last one that made the step shorter.
    """

    def __init__(self, best: Addressed, arena: Arena, random: np.random.Generator) -> None:
        assert arena.lower is not None
        self.best, self._random = best, random
        self.failures = 0
        self._rates = arena.lower.rates
        choice, self._sequence = best[0], best[0].sequence
        self._capacity = arena.capacity - arena.capacity % self._sequence.problem.alignment
        replay = self._sequence.replay(
            choice.evicted, arena.capacity, self._rates, tier=choice.tier
        )
        self._step_seconds = replay.step_seconds
        self.floor = replay.step_seconds + choice.interference_seconds
        self._seconds = self._sequence.problem.operator_seconds[self._sequence.order]
        self._elapsed = np.cumsum(self._seconds)
        self._intervals = engine_intervals(dataclasses.replace(choice, replay=replay), self._rates)
        self._intervals["offset"] = best[1]
        self._starts = self._intervals["start"] % len(self._sequence.order)
        self._is_movable = self._intervals["arrives"] != ALWAYS
        self.num_intervals = int(self._is_movable.sum())
        self._bytes_alone = self._stalls(replay.starts)
        self._cumulated_waits = self._cumulate_waits()
        self._replay = KeptReplays(choice, self._rates)

    @property
    def seconds(self) -> float:
        """Seconds of a step with the best offsets."""
        return self.best[0].seconds

    def _stalls(self, starts: np.ndarray) -> np.ndarray:
        """Return per position the seconds between the end of the operator before and its start."""
        return subtract_previous(starts - self._elapsed + self._seconds)

    def try_places(self) -> bool:
        """Place some intervals anew; return whether that is faster."""
        before = self.seconds
        self._place_anew()
        is_faster = self.seconds < before * (1 - 1e-6)
        self.failures = 0 if is_faster else self.failures + 1
        return is_faster

    def _cumulate_waits(self) -> np.ndarray | None:
        """Return the parts of all waits that lie up to each position; None if none is long."""
        choice = self.best[0]
        waits = self._stalls(choice.replay.starts) - self._bytes_alone
        waits[waits < _LONG_WAIT * choice.seconds] = 0.0
        if not waits.any():
            return None
        cumulated = (waits / waits.sum()).cumsum()
        return cumulated / cumulated[-1]

    def _place_anew(self) -> None:
        if self._cumulated_waits is None:
            return
        position = self._cumulated_waits.searchsorted(self._random.random(), side="right")
        waiting = ((self._starts == position) & self._is_movable).nonzero()[0]
        if not len(waiting):
            return
        is_moved = np.zeros(len(self._intervals), bool)
        is_moved[waiting] = is_moved[self._choose_around(waiting)] = True
        moved = is_moved.nonzero()[0]
        intervals = self._intervals.copy()
        intervals["offset"][moved] = -1
        missing = self._sequence.assign_offsets(
            intervals,
            self._capacity,
            step_seconds=self._step_seconds,
            strategy=AGAIN,
            priority=self._priorities(moved, waiting),
        )
        if missing.any():
            return
        choice, replay = self.best[0], self._replay(intervals)
        before = choice.replay.step_seconds
        if replay.overflow > 0 or replay.step_seconds > before * (1 + 1e-9):
            return
        self._intervals = intervals
        self.best = dataclasses.replace(choice, replay=replay), intervals["offset"].tolist()
        self._cumulated_waits = self._cumulate_waits()

    def _choose_around(self, waiting: np.ndarray) -> np.ndarray:
        """Choose intervals that are there with those that wait, in a range of addresses."""
        random, intervals, step = self._random, self._intervals, self._step_seconds
        sizes, starts, ends = (intervals[name] for name in ("bytes", "from", "until"))
        largest = waiting[sizes[waiting].argmax()]
        num_bytes = int(sizes[largest])
        begin = starts[largest] - _AHEAD[random.integers(len(_AHEAD))] * step
        end = min(ends[largest], begin + step)
        width = num_bytes * _WIDTHS[random.integers(len(_WIDTHS))]
        offsets = intervals["offset"]
        low = random.uniform(-num_bytes, self._capacity)
        if random.random() < _NEAR:
            low = offsets[largest] - random.uniform(0, width)
        inside = (offsets < low + width) & (offsets + sizes > low) & self._is_movable
        inside &= sizes > num_bytes * _TINY
        meets = (starts < end) & (ends > begin)
        for shift in (-step, step):
            meets |= (starts + shift < end) & (ends + shift > begin)
        around = (inside & meets).nonzero()[0]
        if len(around) > _MOST_MOVED:
            around = random.choice(around, _MOST_MOVED, replace=False)
        return around

    def _priorities(self, moved: np.ndarray, waiting: np.ndarray) -> np.ndarray:
        """Return priorities by bytes, by time or by chance."""
        random, num_bytes = self._random, self._intervals["bytes"][moved]
        orders = (
            num_bytes,
            num_bytes * random.uniform(0.3, 1.0, len(moved)),
            -self._intervals["from"][moved],
            random.random(len(moved)),
        )
        priority = np.zeros(len(self._intervals))
        priority[moved] = orders[random.integers(len(orders))]
        if random.random() < _FIRST:
            priority[waiting] = np.inf
        return priority
