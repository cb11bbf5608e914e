"""Packing: samples are dealt to windows by their costs, and the batches of each window are filled.

The cost of a batch b is

    max(least, fixed + sum_{i in b} summed_i + |b| * sum_k max_{i in b} padded_ki)

so every padded cost counts as the largest of the batch for each of its samples.

A window is a group of batches that are filled together. Samples are dealt to the windows by size,
so that every window gets its share of the large ones, and at random among those of one size, so
that every epoch composes its batches anew. Within a window the largest sample comes first and goes
into the lightest batch (longest processing time first, Graham 1969).

All functions take arrays and a seeded generator: no ranks, no epochs, no data loaders.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.batching._arrays import Floats, Integers
from penstock.batching._numbers import read_samples, round_up_bytes
from penstock.units import parse_count

UNPLACED = -1
"""The batch of a sample that fits into none."""

# From so many windows on, a step for all of them at once is faster than one step of a heap each.
_MANY_WINDOWS = 24
_SWAPS_PER_BATCH, _MOST_SWAPS = 8, 1000
_JITTER = 0.1  # relative, of the sizes by which a single window is sorted


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """Bytes that the samples of a data set need, as `ByteModel.costs` predicts them.

    Example:
        >>> costs = SampleCosts(
        ...     fixed_bytes=100,
        ...     summed_bytes=np.array([10, 20, 30]),
        ...     padded_bytes=(np.array([4, 1, 2]),),
        ... )
        >>> costs.of_batch([1, 2])  # 100 + (20 + 30) + 2 * max(1, 2)
        154
    """

    fixed_bytes: int = 0
    """Bytes of every batch, even of an empty one."""
    least_bytes: int = 0
    """Bytes of the smallest batch, which peaks at another moment of the step: the optimizer's."""
    summed_bytes: Integers
    """Bytes that a sample adds to any batch: int64 of shape `[num_samples]`."""
    padded_bytes: tuple[Integers, ...] = field(default=())
    """Bytes that every sample of a batch needs if this sample is the longest of them: any number of
    int64 arrays of shape `[num_samples]`, each with a maximum of its own."""

    def __post_init__(self) -> None:
        """Make whole bytes of 64 bits of all numbers, rounded up.

        Raises:
            TypeError: One is no number.
            ValueError: One is negative or not finite, or arrays differ in length.
        """
        for name in ("fixed_bytes", "least_bytes"):
            object.__setattr__(self, name, parse_count(getattr(self, name), name=name))
        summed = round_up_bytes(self.summed_bytes, name="summed_bytes")
        padded = tuple(
            round_up_bytes(each, name=f"padded_bytes[{number}]")
            for number, each in enumerate(self.padded_bytes)
        )
        lengths = [len(summed), *map(len, padded)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"summed_bytes and each of padded_bytes must have one number per sample; got "
                f"lengths {lengths}"
            )
        object.__setattr__(self, "summed_bytes", summed)
        object.__setattr__(self, "padded_bytes", padded)

    def __len__(self) -> int:
        return len(self.summed_bytes)

    def of_batch(self, samples: Sequence[int] | Integers) -> int:
        """Return the bytes of one batch, given by the numbers of its samples.

        Raises:
            TypeError: They are no whole numbers.
            ValueError: There is no such sample.
        """
        chosen = read_samples(samples, len(self), name="samples")
        if len(chosen) == 0:
            return max(self.fixed_bytes, self.least_bytes)
        padded = sum(int(each[chosen].max()) for each in self.padded_bytes)
        total = self.fixed_bytes + int(self.summed_bytes[chosen].sum()) + len(chosen) * padded
        return max(total, self.least_bytes)

    def of_each(self) -> Integers:
        """Return the bytes of every sample as a batch of its own: int64 of `[num_samples]`."""
        total = self.summed_bytes + self.fixed_bytes
        for each in self.padded_bytes:
            total = total + each
        return np.maximum(total, self.least_bytes)

    def extend(self, more_bytes: Sequence[int]) -> SampleCosts:
        """Return these costs with further samples, which are not padded."""
        added = np.asarray(more_bytes, dtype=np.int64)
        return replace(
            self,
            summed_bytes=np.concatenate([self.summed_bytes, added]),
            padded_bytes=tuple(
                np.concatenate([each, np.zeros_like(added)]) for each in self.padded_bytes
            ),
        )


def divide(total: int, parts: int) -> Integers:
    """Divide `total` into whole parts that differ by at most one, the larger ones first."""
    base, rest = divmod(total, parts)
    return np.full(parts, base, dtype=np.int64) + (np.arange(parts) < rest)


def size_windows(num_batches: int, window: int) -> Integers:
    """Return the batches of each window: about `window`, and two windows where possible.

    With a single window the same large samples would meet in every epoch.
    """
    num_windows = max(-(-num_batches // window), min(2, num_batches // 2), 1)
    return divide(num_batches, num_windows)


def deal(
    sizes: Floats | Integers, batches_of: Integers, random: np.random.Generator | None
) -> tuple[Integers, Integers]:
    """Deal samples to windows by size, as many as each window has batches.

    The windows' batches differ by at most one, the larger ones first. Without a generator a window
    gets consecutive samples. Returns the samples by window, the largest of a window first,
    `[num_samples]`, and the first place of each window, `[num_windows + 1]`.
    """
    num_samples, num_windows = len(sizes), len(batches_of)
    num_batches = int(batches_of.sum())
    base, rest = divmod(num_samples, num_batches)
    if random is None:
        counts = base * batches_of + np.diff(np.minimum(np.cumsum([0, *batches_of]), rest))
        window = np.repeat(np.arange(num_windows), counts)
        by_window = np.lexsort((-sizes, window))
        return by_window, np.concatenate([[0], np.cumsum(counts)])
    keys = -np.asarray(sizes, dtype=np.float64)
    if num_windows == 1:
        keys = keys * (1 + _JITTER * random.standard_normal(num_samples))
    shuffled = random.permutation(num_samples)
    largest_first = shuffled[np.argsort(keys[shuffled], kind="stable")]
    # In each round every window gets one sample, in random order; in the last of `rounds` rounds
    # only those that have a batch more. `base` times that, every batch has `base` samples.
    rounds = int(batches_of.min())
    num_larger = int((batches_of > rounds).sum())
    full_rounds = random.random((base * rounds, num_windows)).argsort(axis=1)
    larger = random.random((base, num_larger)).argsort(axis=1)
    turns = np.concatenate([full_rounds.reshape(base, -1), larger], axis=1).ravel()
    last = random.permutation(np.repeat(np.arange(num_windows), batches_of))[:rest]
    window = np.concatenate([turns, last])
    counts = np.bincount(window, minlength=num_windows)
    by_window = largest_first[np.argsort(window, kind="stable")]
    return by_window, np.concatenate([[0], np.cumsum(counts)])


def pack_lightest_first(
    costs: Floats | Integers,
    starts: Integers,
    batches_of: Integers,
    *,
    most_samples: Integers,
    most_cost: int | None = None,
) -> Integers:
    """Put the samples of each window, in their order, into its lightest batch that has room.

    `starts` has the first sample of each window, `batches_of` its batches. Returns the batch of
    each sample, or `UNPLACED`, `[num_samples]`.
    """
    first_batch = np.concatenate([[0], np.cumsum(batches_of)])
    pack = _pack_together if len(batches_of) >= _MANY_WINDOWS else _pack_one_by_one
    return pack(costs, starts, first_batch, most_samples, most_cost)


def _pack_together(
    costs: Any, starts: Integers, first_batch: Integers, most: Integers, most_cost: int | None
) -> Integers:
    """Pack all windows in step: their first samples, their second samples, and so on."""
    num_windows = len(starts) - 1
    width = int(np.diff(first_batch).max())
    room = np.zeros((num_windows, width), dtype=np.int64)
    exists = np.arange(width) < np.diff(first_batch)[:, None]
    room[exists] = most
    never = np.iinfo(np.int64).max if costs.dtype.kind == "i" else np.inf
    loads = np.where(room > 0, np.zeros((), costs.dtype), never)
    batches = np.full(len(costs), UNPLACED, dtype=np.int64)
    windows = np.arange(num_windows)
    for step in range(int(np.diff(starts).max())):
        windows = windows[starts[windows] + step < starts[windows + 1]]
        samples = starts[windows] + step
        lightest = loads[windows].argmin(axis=1)
        cost, load = costs[samples], loads[windows, lightest]
        fits = load < never
        if most_cost is not None:
            fits &= load <= most_cost - cost
        chosen, lightest = windows[fits], lightest[fits]
        room[chosen, lightest] -= 1
        left = room[chosen, lightest] > 0
        loads[chosen, lightest] = np.where(left, load[fits] + cost[fits], never)
        batches[samples[fits]] = first_batch[chosen] + lightest
    return batches


def _pack_one_by_one(
    costs: Any, starts: Integers, first_batch: Integers, most: Integers, most_cost: int | None
) -> Integers:
    """Pack one window after the other, with its batches in a heap by cost."""
    batches = []
    room = most.tolist()
    limit = float("inf") if most_cost is None else most_cost
    for window in range(len(starts) - 1):
        window_batches = range(int(first_batch[window]), int(first_batch[window + 1]))
        heap = [(0, batch) for batch in window_batches if room[batch] > 0]
        for cost in costs[starts[window] : starts[window + 1]].tolist():
            if not heap or heap[0][0] + cost > limit:
                batches.append(UNPLACED)
                continue
            load, batch = heap[0]
            batches.append(batch)
            room[batch] -= 1
            if room[batch] > 0:
                heapq.heapreplace(heap, (load + cost, batch))
            else:
                heapq.heappop(heap)
    return np.array(batches, dtype=np.int64)


def place_rest(
    costs: Integers, batches: Integers, num_batches: int, *, most_cost: int, most_samples: int
) -> tuple[Integers, int]:
    """Put unplaced samples into the fullest batch of any window that has room, or into new ones.

    No sample costs more than `most_cost`. Returns the batch of each sample, and their number.
    """
    unplaced = np.flatnonzero(batches == UNPLACED)
    if len(unplaced) == 0:
        return batches, num_batches
    batches, placed = batches.copy(), batches != UNPLACED
    loads = np.zeros(num_batches, dtype=np.int64)
    np.add.at(loads, batches[placed], costs[placed])
    counts = np.bincount(batches[placed], minlength=num_batches)
    has_room = np.flatnonzero(counts < most_samples)
    fullest = has_room[np.argsort(-loads[has_room], kind="stable")]
    slack = list(zip((most_cost - loads[fullest]).tolist(), fullest.tolist(), strict=True))
    counts = counts.tolist()
    for sample in unplaced[np.argsort(-costs[unplaced], kind="stable")].tolist():
        cost = int(costs[sample])
        place = bisect_left(slack, (cost, -1))
        if place < len(slack):
            free, batch = slack.pop(place)
        else:
            free, batch = most_cost, num_batches
            num_batches += 1
            counts.append(0)
        batches[sample] = batch
        counts[batch] += 1
        if counts[batch] < most_samples:
            insort(slack, (free - cost, batch))
    return batches, num_batches


def drop_empty(batches: Integers, num_batches: int) -> tuple[Integers, int]:
    """Number the batches anew without empty ones, which arise if samples cost nothing."""
    used = np.bincount(batches, minlength=num_batches) > 0
    if used.all():
        return batches, num_batches
    return (np.cumsum(used) - 1)[batches], int(used.sum())


def level(costs: Floats | Integers, batches: Integers, num_batches: int) -> Integers:
    """Swap samples of the heaviest batch and the lightest one while the heaviest gets lighter.

    Returns the batch of each sample; every batch has as many samples as before.
    """
    batches = batches.copy()
    by_batch = np.argsort(batches, kind="stable")
    members = np.split(by_batch, np.cumsum(np.bincount(batches, minlength=num_batches))[:-1])
    loads = np.array([costs[each].sum() for each in members])
    for _ in range(min(_SWAPS_PER_BATCH * num_batches, _MOST_SWAPS)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = loads[heavy] - loads[light]
        light_ones = members[light][np.argsort(costs[members[light]], kind="stable")]
        heavy_costs = costs[members[heavy]]
        # For each sample of the heavy batch the one of the light batch that halves the gap best.
        places = np.searchsorted(costs[light_ones], heavy_costs - gap / 2)
        places = places.clip(0, len(light_ones) - 1)
        gains = heavy_costs - costs[light_ones[places]]
        gains = np.where((gains > 0) & (gains < gap), np.minimum(gains, gap - gains), 0)
        best = int(gains.argmax())
        if gains[best] <= 0:
            break
        given, taken = members[heavy][best], light_ones[places[best]]
        members[heavy][best] = taken
        light_ones[places[best]] = given
        members[light] = light_ones
        loads[heavy] += costs[taken] - costs[given]
        loads[light] += costs[given] - costs[taken]
    for batch, each in enumerate(members):
        batches[each] = batch
    return batches


def pack_longest_first(
    costs: SampleCosts, by_window: Integers, starts: Integers, *, most_cost: int, most_samples: int
) -> tuple[Integers, int]:
    """Fill batches with samples of similar length, one after the other, if padding counts.

    `by_window` has the longest samples of each window first. `most_cost` includes padding and fixed
    bytes. Returns the batch of each entry of `by_window`, and the number of batches.
    """
    batches: list[int] = []
    batch = -1
    window_starts = set(starts.tolist())
    summed = costs.summed_bytes[by_window].tolist()
    padded = list(zip(*(each[by_window].tolist() for each in costs.padded_bytes), strict=True))
    total, count, longest = 0, 0, padded[0]
    for place, (cost, lengths) in enumerate(zip(summed, padded, strict=True)):
        longer = tuple(map(max, longest, lengths))
        needed = costs.fixed_bytes + total + cost + (count + 1) * sum(longer)
        if place in window_starts or count == most_samples or needed > most_cost:
            batch, total, count, longer = batch + 1, 0, 0, lengths
        batches.append(batch)
        total, count, longest = total + cost, count + 1, longer
    return np.array(batches, dtype=np.int64), batch + 1


def split_largest(batches: Integers, num_batches: int, wanted: int) -> Integers:
    """Halve batches, those of the most samples first, until there are `wanted` of them."""
    if num_batches >= wanted:
        return batches
    batches = batches.copy()
    by_batch = np.argsort(batches, kind="stable")
    ends = np.cumsum(np.bincount(batches, minlength=num_batches))
    heap = [(-(end - start), start, end) for start, end in zip([0, *ends], ends, strict=False)]
    heapq.heapify(heap)
    for batch in range(num_batches, wanted):
        _, start, end = heapq.heappop(heap)
        middle = (start + end) // 2
        batches[by_batch[middle:end]] = batch
        heapq.heappush(heap, (-(middle - start), start, middle))
        heapq.heappush(heap, (-(end - middle), middle, end))
    return batches
