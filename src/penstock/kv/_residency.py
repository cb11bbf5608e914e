"""Residency: the few slots of the device tier, and the records that are worth one.

A miss costs the same bytes with and without admission: the record is read either way. A slot is
therefore given to another record only if that is expected to save more than the one that it holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.kv._reuse import Ids, ReuseModel

_LEAST_SAMPLE = 256  # slots that are compared at least; the quality of 8 per victim is that of all
_SAMPLE_PER_VICTIM = 8


class RecordResidency:
    """Map of records to a fixed number of slots, with admission and eviction by expected gain.

    A slot is worth the rate of touches that `ReuseModel` expects of its record times the cost of a
    miss of it. `admit` replaces the records worth least, and only by records worth more, so that a
    scan over more records than slots keeps a fixed set. Without evidence nothing is replaced.
    Its distance to Belady's optimum, and how much of that any policy without knowledge of the
    future could win, is measured in docs/kv.md.

    A call costs O(records named) on average: victims are sought among a window of slots that moves
    on, and rates are looked up; the model is fitted once every 8 steps, or more seldom.

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
        half_life: Steps after which a touch counts half for the frequency of a record; a step is
            as many calls of `touch` as name different records (see `ReuseModel`).
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
        """Begin a call that uses records.

        Args:
            ids: Records, int64 `(k,)`, distinct and at least 0, resident or not.
            costs: Seconds, or any other unit, that a miss of each would cost, `(k,)` or one number.
        """
        ids = self._distinct(ids)
        self._cost[ids] = costs
        self._reuse.touch(ids)

    def admit(self, ids: ArrayLike, most_free: int | None = None) -> tuple[Ids, Ids, Ids]:
        """Give slots to those missing records that are expected to be worth more than others.

        Args:
            ids: Records without a slot, int64 `(k,)`, distinct; normally of this call.
            most_free: The most free slots that are used; the others stay free. None: all.

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
        usable = self._num_free if most_free is None else min(most_free, self._num_free)
        num_free = min(len(ids), usable)
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
        if len(worth) == 0 or worth[0] <= 0:
            return np.empty(0, dtype=np.int64)
        total = len(self._record)
        num_seen = min(total, max(_LEAST_SAMPLE, _SAMPLE_PER_VICTIM * len(worth)))
        slots = self._hand + np.arange(num_seen)
        slots[slots >= total] -= total
        self._hand = (self._hand + num_seen) % max(total, 1)
        records = self._record[slots]
        is_open = (records >= 0) & (self._num_pins[records] == 0)
        slots, records = slots[is_open], records[is_open]
        loss = self._worth(records)
        order = np.arange(len(loss))
        if len(worth) < len(loss):
            order = np.argpartition(loss, len(worth))[: len(worth)]
        order = order[np.argsort(loss[order], kind="stable")]
        # Best candidate against worst resident, and so on: the gain falls along the pairs.
        return slots[order[worth[: len(order)] > loss[order] * (1 + 1e-6)]]

    def _distinct(self, ids: ArrayLike) -> Ids:
        ids = np.asarray(ids, dtype=np.int64)
        if ids.ndim != 1 or not (_ascends(ids) or _ascends(np.sort(ids))):
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
            cost = np.pad(self._cost, (0, extra), constant_values=1)
            slot = np.pad(self._slot, (0, extra), constant_values=-1)
            num_pins = np.pad(self._num_pins, (0, extra))
            self._reuse.grow(num_records)
            # Together, and last: an interrupt leaves tables that fit each other.
            self._cost, self._slot, self._num_pins = cost, slot, num_pins


def _ascends(ids: Ids) -> bool:
    return bool((ids[1:] > ids[:-1]).all())
