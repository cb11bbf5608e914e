"""Expected reuse of records, learned from their touches: the worth of a slot on the device tier."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_LONG_CLASSES = 14  # two to an octave: up to 92, the most of a half-life of 64 steps
_SHORT_CLASSES = 4  # one to an octave
_SHORT_SHARE = 1 / 16  # of the half-life: that of the short frequency
_LEAST_FIT = 2048  # touches between two fits, and
_STEPS_OF_FIT = 8  # steps, after the first ones
_PRIOR_TOUCHES = 1.0  # weight of the class below, and of no reuse below the lowest
_PRIOR_OF_SHORT = 8.0  # weight of all records of a long class, for those of a short one


def _age_edges() -> Ids:
    """Return first ages of the age classes: every one up to 4, then two to an octave."""
    edges = [1, 2, 3, 4]
    while edges[-1] < 1 << 12:
        edges.append(int(np.ceil(edges[-1] * 2**0.5)))
    return np.array(edges, dtype=np.int64)


_EDGES = _age_edges()
_WIDTHS = np.diff(np.append(_EDGES, 2 * _EDGES[-1]))
_CLASS_OF_AGE = np.repeat(np.arange(len(_EDGES)), _WIDTHS)  # of age - 1
_IS_LATER = np.triu(np.ones((len(_EDGES), len(_EDGES)), dtype=bool))


class ReuseModel:
    """Expected reuse of a record, learned from the touches of all records.

    The rate of a record is the Gittins index of its next touch: the best ratio, over the times that
    it may be kept for, of the chance of a touch to the expected time until the touch or the end:

        rate(c, a) = max over x of P(touched by age x | age a) / E[min(age of touch, x) - a | age a]

    `a` is the age, the number of steps since the last touch, and `c` the class of two frequencies
    before that: sums over its touches that halve every `half_life` steps, and every sixteenth of
    that. The long one tells records that are wanted again and again, the short one a habit that has
    just begun. Chances are the Kaplan-Meier estimate over touches of the latest 4 half-lives;
    touches without a successor yet count as censored. A cyclic scan has rate 1 at all ages below
    its cycle, a random walk a high rate at age 0 and a low one afterwards, and heavy hitters a high
    one in their classes, with no parameter that tells the three apart.

    A step ends where a record is touched that the step has touched already. So it is one token, of
    however many layers with a call each, and a round of a scan. An age is a number of steps, by
    the mean number of calls of the latest ones.

    Args:
        half_life: Steps after which a touch counts half as much for the long frequency.
        num_records: Records to make room for; more are taken as they come.

    Source:
        Gittins, "Bandit processes and dynamic allocation indices", 1979, section 2 (the index);
        Beckmann, Chen, Cidon: LHD, NSDI 2018, section 3 (rates of hits by age and class in caches).
    """

    def __init__(self, half_life: float, num_records: int = 0) -> None:
        ages = np.arange(len(_CLASS_OF_AGE) + 1)
        self._long_decay = 0.5 ** (ages / half_life)
        self._short_decay = 0.5 ** (ages / max(1.0, _SHORT_SHARE * half_life))
        self._weight = 0.5 ** (0.25 * ages / half_life)  # of a touch that ended a life so long
        self._now = 0  # in calls
        self._step_start = 1
        self._num_steps = 0
        self._mean_calls = 1.0  # of a step
        self._last = np.full(num_records, -1, dtype=np.int64)  # call of the last touch
        self._long = np.zeros(num_records)  # frequency as of the last touch
        self._short = np.zeros(num_records)
        self._class = np.zeros(num_records, dtype=np.int64)
        shape = (_LONG_CLASSES * _SHORT_CLASSES, len(_EDGES))
        self._touched = np.zeros(shape)  # reuses by class and age, decayed
        self._rates = np.zeros(shape)
        self._num_since_fit = 0
        self._fitted_step = 0

    def grow(self, num_records: int) -> None:
        """Make room for records 0 to `num_records` - 1."""
        extra = max(0, num_records - len(self._last))
        last = np.pad(self._last, (0, extra), constant_values=-1)
        long, short = np.pad(self._long, (0, extra)), np.pad(self._short, (0, extra))
        classes = np.pad(self._class, (0, extra))
        # Together: an interrupt leaves tables that fit each other.
        self._last, self._long, self._short, self._class = last, long, short, classes

    def touch(self, ids: Ids) -> None:
        """Begin a call that uses the records `ids`, int64 `(k,)`, distinct."""
        self._now += 1
        last = self._last[ids]
        begins_step = last.max(initial=-1) >= self._step_start
        if begins_step:
            self._begin_step()
        period = self._calls_per_step
        age = (self._now - last + period // 2) // period
        age = np.minimum(np.maximum(age, 1), len(_CLASS_OF_AGE))  # `clip` asks for limits of int64
        # A touch weighs what it would weigh now if it had been counted when its life began.
        cells = self._class[ids] * len(_EDGES) + _age_class(age)
        added = np.bincount(cells, self._weight[age] * (last >= 0), self._touched.size)
        self._touched += added.reshape(self._touched.shape)
        self._long[ids] = long = self._long[ids] * self._long_decay[age] + 1
        self._short[ids] = short = self._short[ids] * self._short_decay[age] + 1
        long_class = np.minimum(2 * np.log2(long), _LONG_CLASSES - 1).astype(np.int64)
        short_class = np.minimum(np.log2(short), _SHORT_CLASSES - 1).astype(np.int64)
        self._class[ids] = long_class * _SHORT_CLASSES + short_class
        self._last[ids] = self._now
        self._num_since_fit += len(ids)
        if begins_step and self._is_fit_due():
            self._fit()

    def forget(self, ids: Ids) -> None:
        """Treat `ids` as records that were never touched."""
        self._last[ids] = -1
        self._long[ids] = self._short[ids] = 0
        self._class[ids] = 0

    def rate(self, ids: Ids) -> NDArray[np.float64]:
        """Return touches per step that a slot for each record is expected to save, `(k,)`."""
        calls = np.where(self._last[ids] >= 0, self._now - self._last[ids], 0)
        num_steps, num_calls = np.divmod(calls, self._calls_per_step)
        # The earliest age at which a record can be touched is that of the next step. It comes the
        # sooner the more of its calls are over; half of that counts, as steps are not all alike.
        sooner = 1 - 0.5 * num_calls / self._calls_per_step
        return self._rates[self._class[ids], _age_class(num_steps + 1)] / sooner

    @property
    def _calls_per_step(self) -> int:
        return max(1, round(self._mean_calls))

    def _begin_step(self) -> None:
        self._num_steps += 1
        num_calls = self._now - self._step_start
        self._mean_calls += (num_calls - self._mean_calls) / min(self._num_steps, 8)
        self._step_start = self._now
        self._touched *= self._weight[1]

    def _is_fit_due(self) -> bool:
        is_early = self._num_steps & (self._num_steps - 1) == 0
        has_touches = self._num_since_fit >= max(_LEAST_FIT, len(self._last) // 4)
        return is_early or (has_touches and self._num_steps >= self._fitted_step + _STEPS_OF_FIT)

    def _fit(self) -> None:
        """Estimate the rates of all classes and ages from the touches so far."""
        self._num_since_fit, self._fitted_step = 0, self._num_steps
        chance = self._chances()
        alive = np.cumprod(1 - chance, axis=1)
        before = np.pad(alive[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        # Sums of the index's numerator and denominator from birth; differences are those from a.
        touches = np.pad(np.cumsum(before * chance, axis=1), ((0, 0), (1, 0)))
        lived = _WIDTHS * np.where(_WIDTHS == 1, before, (before + alive) / 2)
        steps = np.pad(np.cumsum(lived, axis=1), ((0, 0), (1, 0)))
        gain = touches[:, None, 1:] - touches[:, :-1, None]
        time = steps[:, None, 1:] - steps[:, :-1, None]
        is_later = _IS_LATER & (time > 1e-12)
        self._rates = np.where(is_later, gain / np.where(is_later, time, 1), 0).max(axis=2)

    def _chances(self) -> NDArray[np.float64]:
        """Return the chance of a touch in each age class, of a record that reaches it."""
        waiting = np.flatnonzero(
            (self._last >= 0) & (self._last <= self._now - self._calls_per_step)
        )
        age = (self._now - self._last[waiting]) // self._calls_per_step
        age = np.minimum(age, len(_CLASS_OF_AGE))
        cell = self._class[waiting] * len(_EDGES) + _age_class(age)
        censored = np.bincount(cell, self._weight[age], self._touched.size)
        shape = (_LONG_CLASSES, _SHORT_CLASSES, len(_EDGES))
        touched, censored = self._touched.reshape(shape), censored.reshape(shape)
        # At risk in an age class: what lives to its beginning, censored lives to its middle.
        reached = np.cumsum((touched + censored)[..., ::-1], axis=2)[..., ::-1]
        at_risk = reached - 0.5 * censored
        of_long, below = np.zeros((_LONG_CLASSES, 1, len(_EDGES))), np.zeros(len(_EDGES))
        for one, (some, risk) in enumerate(zip(touched.sum(1), at_risk.sum(1), strict=True)):
            # A class with few touches behaves as the one below it.
            below = of_long[one, 0] = (some + _PRIOR_TOUCHES * below) / (risk + _PRIOR_TOUCHES)
        chance = (touched + _PRIOR_OF_SHORT * of_long) / (at_risk + _PRIOR_OF_SHORT)
        return np.clip(chance, 0, 1).reshape(self._touched.shape)


def _age_class(age: Ids) -> Ids:
    return _CLASS_OF_AGE[np.minimum(age, len(_CLASS_OF_AGE)) - 1]
