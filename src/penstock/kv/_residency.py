"""Residency: the few slots of the device tier, and the records that are worth one.

A miss costs the same bytes with and without admission: the record is read either way. A slot is
therefore given to another record only if that is expected to save more than the one that it holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int64]

_NUM_CLASSES = 16  # two classes of frequency to an octave: up to 180 touches within a half-life
_LEAST_SAMPLE = 256  # slots that are compared at least; the quality of 8 per victim is that of all
_SAMPLE_PER_VICTIM = 8
_LEAST_FIT = 2048  # touches between two fits, which take about a millisecond
_PRIOR_TOUCHES = 1.0  # weight of the class below, and of no reuse below the lowest


def _age_edges() -> Ids:
    """Return first ages of the age classes: every one up to 4, then four to an octave."""
    edges = [1, 2, 3, 4]
    while edges[-1] < 1 << 18:
        edges.append(int(np.ceil(edges[-1] * 2**0.25)))
    return np.array(edges, dtype=np.int64)


_EDGES = _age_edges()
_WIDTHS = np.diff(np.append(_EDGES, 2 * _EDGES[-1])).astype(np.float64)


class ReuseModel:
    """Expected reuse of a record, learned from the touches of all records.

    The rate of a record is the Gittins index of its next touch: the best ratio, over the times that
    it may be kept for, of the chance of a touch to the expected time until the touch or the end:

        rate(c, a) = max over x of P(touched by age x | age a) / E[min(age of touch, x) - a | age a]

    `a` is the age, the number of steps since the last touch, and `c` the class of its frequency f
    before that, a sum over its touches that halves every `half_life` steps. Chances are the
    Kaplan-Meier estimate over touches of the latest 4 half-lives; touches without a successor yet
    count as censored. A cyclic scan has rate 1 / (steps until the next touch), a random walk a high
    rate at age 0 and a low one afterwards, and heavy hitters a high one in their classes, with no
    parameter that tells the three apart.

    Args:
        half_life: Steps after which a touch counts half as much for the frequency.
        num_records: Records to make room for; more are taken as they come.

    Source:
        Gittins, "Bandit processes and dynamic allocation indices", 1979, section 2 (the index);
        Beckmann, Chen, Cidon: LHD, NSDI 2018, section 3 (rates of hits by age and class in caches).
    """

    def __init__(self, half_life: float, num_records: int = 0) -> None:
        self._half_life = half_life
        self._now = 0
        self._last = np.full(num_records, -1, dtype=np.int64)  # step of the last touch
        self._frequency = np.zeros(num_records)  # as of the last touch
        self._class = np.zeros(num_records, dtype=np.int64)
        self._touched = np.zeros((_NUM_CLASSES, len(_EDGES)))  # reuses by class and age, decayed
        self._rates = np.zeros((_NUM_CLASSES, len(_EDGES)))
        self._num_since_fit = 0

    def grow(self, num_records: int) -> None:
        """Make room for records 0 to `num_records` - 1."""
        extra = num_records - len(self._last)
        self._last = np.pad(self._last, (0, extra), constant_values=-1)
        self._frequency = np.pad(self._frequency, (0, extra))
        self._class = np.pad(self._class, (0, extra))

    def touch(self, ids: Ids) -> None:
        """Begin a step that uses the records `ids`, int64 `(k,)`, distinct."""
        self._now += 1
        known = ids[self._last[ids] >= 0]
        age = self._now - self._last[known]
        self._touched *= 0.5 ** (0.25 / self._half_life)
        # A touch weighs what it would weigh now if it had been counted when its life began.
        weight = 0.5 ** (0.25 * age / self._half_life)
        np.add.at(self._touched, (self._class[known], _age_class(age)), weight)
        self._frequency[known] *= 0.5 ** (age / self._half_life)
        self._frequency[ids] += 1
        octaves = np.log2(self._frequency[ids])
        self._class[ids] = np.minimum(2 * octaves, _NUM_CLASSES - 1).astype(np.int64)
        self._last[ids] = self._now
        self._num_since_fit += len(ids)
        is_early = self._now & (self._now - 1) == 0
        if is_early or self._num_since_fit >= max(_LEAST_FIT, len(self._last) // 4):
            self._fit()

    def forget(self, ids: Ids) -> None:
        """Treat `ids` as records that were never touched."""
        self._last[ids] = -1
        self._frequency[ids] = 0
        self._class[ids] = 0

    def rate(self, ids: Ids) -> NDArray[np.float64]:
        """Return touches per step that a slot for each record is expected to save, `(k,)`."""
        # The earliest age at which a record can be touched is that of the next step.
        age = np.where(self._last[ids] >= 0, self._now - self._last[ids], 0) + 1
        return self._rates[self._class[ids], _age_class(age)]

    def _fit(self) -> None:
        """Estimate the rates of all classes and ages from the touches so far."""
        self._num_since_fit = 0
        known = np.flatnonzero(self._last >= 0)
        age = self._now - self._last[known]
        weight = 0.5 ** (0.25 * age / self._half_life)
        cell = self._class[known] * len(_EDGES) + _age_class(np.maximum(age, 1))
        censored = np.bincount(cell, weight, self._touched.size).reshape(self._touched.shape)
        # At risk in an age class: what lives to its beginning, censored lives to its middle.
        reached = np.cumsum((self._touched + censored)[:, ::-1], axis=1)[:, ::-1]
        at_risk = reached - 0.5 * censored
        chance = np.zeros_like(at_risk)
        below = np.zeros(len(_EDGES))  # a class with few touches behaves as the one below it
        for one, touched in enumerate(self._touched):
            weighted = touched + _PRIOR_TOUCHES * below
            below = chance[one] = np.clip(weighted / (at_risk[one] + _PRIOR_TOUCHES), 0, 1)
        alive = np.cumprod(1 - chance, axis=1)
        before = np.pad(alive[:, :-1], ((0, 0), (1, 0)), constant_values=1)
        # Sums of the index's numerator and denominator from birth; differences are those from a.
        touches = np.pad(np.cumsum(before * chance, axis=1), ((0, 0), (1, 0)))
        steps = np.pad(np.cumsum(_WIDTHS * (before + alive) / 2, axis=1), ((0, 0), (1, 0)))
        gain = touches[:, None, 1:] - touches[:, :-1, None]
        time = steps[:, None, 1:] - steps[:, :-1, None]
        later = np.triu(np.ones((len(_EDGES), len(_EDGES)), dtype=bool)) & (time > 1e-12)
        self._rates = np.where(later, gain / np.where(later, time, 1), 0).max(axis=2)


def _age_class(age: Ids) -> Ids:
    return np.searchsorted(_EDGES, age, side="right") - 1


class RecordResidency:
    """Map of records to a fixed number of slots, with admission and eviction by expected gain.

    A slot is worth the rate of touches that `ReuseModel` expects of its record times the cost of a
    miss of it. `admit` replaces the records worth least, and only by records worth more, so that a
    scan over more records than slots keeps a fixed set. Without evidence nothing is replaced.
    Measured against Belady's optimum on selections of a small trained model over English text (2368
    bytes and 1000 steps, blocks of 16, an eighth of them read), points fewer hits with slots for 1,
    2 and 4 times what a step reads: `Nosa` with half of its free blocks chosen by the query, whose
    steps share 0.77 of their blocks, 7, 6 and 4; with three quarters (0.58) 15, 13 and 7;
    `DoubleSparsity` (0.51) 19, 16 and 8. A half-life of 4 steps instead of 64 has 2 to 4 more with
    slots for one step and as many with more. Worth by the rank of a record in the query's scores,
    with chances learned for each rank, had 5 to 38 points fewer than this model for `Nosa`. On an
    earlier model's selections, those of windows and accumulated attention had the hits of the
    optimum, and a network trained on the same selections, without scores, to foresee the next step
    had at most 2 points more than this model.

    A step costs O(records named) on average: victims are sought among a window of slots that moves
    on, and rates are looked up; the model is fitted once every few thousand touches.

    Example:
        >>> residency = RecordResidency(2)
        >>> ids = np.array([7, 3, 5])
        >>> residency.touch(ids)
        >>> missing = ids[residency.look_up(ids) < 0]
        >>> admitted, slots, evicted = residency.admit(missing)
        >>> admitted, slots, evicted
        (array([7, 3]), array([0, 1]), array([], dtype=int64))
        >>> residency.look_up(ids)
        array([ 0,  1, -1])

    Args:
        num_slots: Records that fit the device tier.
        half_life: Steps (calls of `touch`) after which a touch counts half for the frequency of a
            record. A cache that calls once per layer and token multiplies it by its layers.
        num_records: Records to make room for; ids above grow the tables.
    """

    def __init__(self, num_slots: int, *, half_life: float = 64, num_records: int = 0) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots must be at least 0; got {num_slots}")
        if not half_life > 0:
            raise ValueError(f"half_life must be above 0 steps; got {half_life}")
        self._reuse = ReuseModel(half_life, num_records)
        self._cost = np.ones(num_records)
        self._slot = np.full(num_records, -1, dtype=np.int64)  # of a record
        self._num_pins = np.zeros(num_records, dtype=np.int64)  # of a record
        self._record = np.full(num_slots, -1, dtype=np.int64)  # in a slot
        self._free = np.arange(num_slots)[::-1].copy()  # a stack: its first _num_free entries
        self._num_free = num_slots
        self._num_retired = 0
        self._hand = 0

    @property
    def num_slots(self) -> int:
        """Number of slots, used and free."""
        return len(self._record) - self._num_retired

    @property
    def num_resident(self) -> int:
        """Number of records that have a slot."""
        return self.num_slots - self._num_free

    def look_up(self, ids: ArrayLike) -> Ids:
        """Return the slot of each record, int64 as `ids`; -1 where it has none."""
        ids = np.asarray(ids, dtype=np.int64)
        self._grow_for(ids)
        return self._slot[ids]

    def touch(self, ids: ArrayLike, costs: ArrayLike = 1.0) -> None:
        """Begin a step that uses records.

        Args:
            ids: Records, int64 `(k,)`, distinct and at least 0, resident or not.
            costs: Seconds, or any other unit, that a miss of each would cost, `(k,)` or one number.
        """
        ids = self._distinct(ids)
        self._cost[ids] = costs
        self._reuse.touch(ids)

    def admit(self, ids: ArrayLike) -> tuple[Ids, Ids, Ids]:
        """Give slots to those missing records that are expected to be worth more than others.

        Args:
            ids: Records without a slot, int64 `(k,)`, distinct; normally of this step.

        Returns:
            Records admitted (those worth most first), the slot of each, both int64 `(m,)`, and the
            records that lost their slots, at most as many. Pinned records lose none.

        Raises:
            ValueError: A record has a slot already, or is named twice.
        """
        ids = self._distinct(ids)
        if np.any(self._slot[ids] >= 0):
            wrong = ids[self._slot[ids] >= 0][:5].tolist()
            raise ValueError(f"ids must be of records without a slot; {wrong} have one")
        worth = self._worth(ids)
        order = np.argsort(-worth, kind="stable")
        ids, worth = ids[order], worth[order]
        num_free = min(len(ids), self._num_free)
        self._num_free -= num_free
        slots = self._free[self._num_free : self._num_free + num_free][::-1].copy()
        self._assign(ids[:num_free], slots)
        victims = self._victims(worth[num_free:])
        evicted = self._record[victims]
        slots = np.concatenate([slots, victims])
        admitted = ids[: len(slots)]
        self._slot[evicted] = -1
        self._assign(admitted, slots)
        return admitted, slots, evicted

    def shrink(self, num_slots: int) -> tuple[Ids, Ids]:
        """Take slots out of use for good: free ones, then those of the records worth least.

        Args:
            num_slots: How many; fewer are taken where the others are pinned.

        Returns:
            Records that lost their slots, and these slots, both int64 `(m,)`.
        """
        num_free = min(num_slots, self._num_free)
        self._num_free -= num_free
        slots = np.flatnonzero(self._record >= 0)
        slots = slots[self._num_pins[self._record[slots]] == 0]
        order = np.argsort(self._worth(self._record[slots]), kind="stable")
        slots = slots[order[: num_slots - num_free]]
        evicted = self._record[slots]
        self._slot[evicted] = -1
        self._record[slots] = -1
        self._num_retired += num_free + len(slots)
        return evicted, slots

    def cut(self, num_slots: int) -> tuple[Ids, Ids]:
        """Take the slots from number `num_slots` on out of use for good; none of them is pinned.

        Returns:
            Records that lost their slots, and these slots, both int64 `(m,)`.
        """
        slots = num_slots + np.flatnonzero(self._record[num_slots:] >= 0)
        evicted = self._record[slots]
        assert not self._num_pins[evicted].any(), "no step is under way"
        self._slot[evicted] = -1
        free = self._free[: self._num_free]
        free = free[free < num_slots]
        self._record = self._record[:num_slots].copy()
        self._num_free = len(free)
        self._free = np.pad(free, (0, len(self._record) - len(free)))
        self._hand %= max(1, len(self._record))
        return evicted, slots

    def pin(self, ids: ArrayLike) -> None:
        """Keep records in their slots until `release` is called as often, int64 `(k,)` distinct."""
        ids = self._distinct(ids)
        if np.any(self._slot[ids] < 0):
            wrong = ids[self._slot[ids] < 0][:5].tolist()
            raise ValueError(f"only records with a slot can be pinned; {wrong} have none")
        self._num_pins[ids] += 1

    def release(self, ids: ArrayLike) -> None:
        """Undo one `pin` of each record, int64 `(k,)` distinct."""
        ids = self._distinct(ids)
        if np.any(self._num_pins[ids] < 1):
            wrong = ids[self._num_pins[ids] < 1][:5].tolist()
            raise ValueError(f"only pinned records can be released; {wrong} are not")
        self._num_pins[ids] -= 1

    def drop(self, ids: ArrayLike) -> None:
        """Forget records, whose numbers may then be used for others; their slots become free.

        Raises:
            ValueError: A record is pinned.
        """
        ids = self._distinct(ids)
        if np.any(self._num_pins[ids] > 0):
            wrong = ids[self._num_pins[ids] > 0][:5].tolist()
            raise ValueError(f"pinned records cannot be dropped; release {wrong} first")
        slots = self._slot[ids]
        slots = slots[slots >= 0]
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        self._record[slots] = -1
        self._slot[ids] = -1
        self._reuse.forget(ids)

    def _assign(self, ids: Ids, slots: Ids) -> None:
        self._slot[ids] = slots
        self._record[slots] = ids

    def _worth(self, ids: Ids) -> NDArray[np.float64]:
        return self._cost[ids] * self._reuse.rate(ids)

    def _victims(self, worth: NDArray[np.float64]) -> Ids:
        """Return slots whose records are worth less than candidates; `worth` is descending."""
        if len(worth) == 0 or self._num_free or worth[0] <= 0:
            return np.empty(0, dtype=np.int64)
        total = len(self._record)
        num_seen = min(total, max(_LEAST_SAMPLE, _SAMPLE_PER_VICTIM * len(worth)))
        slots = (self._hand + np.arange(num_seen)) % max(total, 1)
        self._hand = (self._hand + num_seen) % max(total, 1)
        records = self._record[slots]
        is_open = (records >= 0) & (self._num_pins[records] == 0)
        slots, records = slots[is_open], records[is_open]
        loss = self._worth(records)
        order = np.argsort(loss, kind="stable")[: len(worth)]
        # Best candidate against worst resident, and so on: the gain falls along the pairs.
        return slots[order[worth[: len(order)] > loss[order] * (1 + 1e-6)]]

    def _distinct(self, ids: ArrayLike) -> Ids:
        ids = np.asarray(ids, dtype=np.int64)
        if ids.ndim != 1 or len(np.unique(ids)) < len(ids):
            raise ValueError(f"ids must be one-dimensional and distinct; got {ids.shape}: {ids}")
        self._grow_for(ids)
        return ids

    def _grow_for(self, ids: Ids) -> None:
        if ids.size == 0:
            return
        if ids.min() < 0:
            raise ValueError(f"ids must be at least 0; got {ids.min()}")
        if ids.max() >= len(self._slot):
            num_records = max(int(ids.max()) + 1, 2 * len(self._slot))
            extra = num_records - len(self._slot)
            self._cost = np.pad(self._cost, (0, extra), constant_values=1)
            self._slot = np.pad(self._slot, (0, extra), constant_values=-1)
            self._num_pins = np.pad(self._num_pins, (0, extra))
            self._reuse.grow(num_records)
