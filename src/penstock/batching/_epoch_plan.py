"""The batches of an epoch: how many there are, what is in each, and their order.

A plan is a function of the costs, the seed, the epoch and the number of ranks alone. So every rank
makes the same plan without asking the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.batching._costs import Floats, Integers, SampleCosts, numbers_of, whole_bytes
from penstock.batching._packing import (
    NOWHERE,
    deal,
    level,
    lightest_first,
    longest_first,
    place_rest,
    shares,
    split_largest,
    windows_of,
    without_empty,
)
from penstock.units import format_bytes

Split = Callable[[int, int], Sequence[tuple[Any, int]]]

_NO_LIMIT = 1 << 62
_TRIES = 4  # of an epoch to get along with the number of batches that was promised
_TRIAL_EPOCHS = 3  # whose largest number of batches is promised
_MANY_SAMPLES = 50_000  # from here on one batch in `_SPARE` is promised instead: that is faster
_SPARE = 500


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch: batch b has the items `items[starts[b]:starts[b + 1]]`."""

    items: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """The arguments of `BalancedBatchSampler` that decide which batches there are."""

    batch_size: int | None
    max_bytes: int | None
    window: int
    shuffle: bool
    drop_last: bool
    seed: int
    oversize: Literal["error", "alone"] | Split


class EpochPlanner:
    """Plans epochs: batches below the cap or of a fixed count, each sample once.

    Args:
        costs: As of `BalancedBatchSampler`.
        options: Its arguments.
        num_replicas: Ranks that share the batches of a step.
    """

    def __init__(self, costs: Any, options: PackingOptions, num_replicas: int) -> None:
        self.batch_size, self.max_bytes = options.batch_size, options.max_bytes
        self.window, self.shuffle = options.window, options.shuffle
        self.drop_last, self.seed = options.drop_last, options.seed
        self.keys: list[Any] | None = None
        self._num_samples = 0
        self._alone = np.zeros(0, dtype=np.int64)
        self._take_costs(costs, options.oversize)
        self.share(num_replicas)

    def share(self, num_replicas: int) -> None:
        """Plan for so many ranks from now on."""
        self.num_replicas = num_replicas
        num_items = len(self._packed) + len(self._alone)
        if num_items < num_replicas:
            raise ValueError(
                f"{num_items} samples cannot be shared by num_replicas={num_replicas} ranks: "
                "every rank needs a batch in every step; use fewer ranks"
            )
        self._plans: dict[int, EpochPlan] = {}
        self._trial: tuple[int, int, tuple[Integers, int]] | None = None
        self._first_wanted = 0  # with so many, the first trial did not need more than was promised
        self.num_batches = self._count_batches()

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch, over all ranks: batch `step * num_replicas + rank`."""
        if epoch not in self._plans:
            self._plans = {epoch: self._make_plan(epoch if self.shuffle else 0)}
        return self._plans[epoch]

    # What there is to pack.

    def _take_costs(self, costs: Any, oversize: Literal["error", "alone"] | Split) -> None:
        if oversize not in ("error", "alone") and not callable(oversize):
            raise ValueError(
                f"oversize must be 'error', 'alone' or a function (index, cost) -> parts; "
                f"got {oversize!r}"
            )
        if self.max_bytes is None:
            if isinstance(costs, SampleCosts):
                if costs.padded_bytes:
                    raise ValueError(
                        "costs have padded bytes, and of a fixed count the longest sample alone "
                        "makes the largest batch: give max_bytes"
                    )
                costs = costs.summed_bytes
            self._costs: Any = numbers_of(costs, name="costs")
            self._packed = np.arange(len(self._costs))
        else:
            if not isinstance(costs, SampleCosts):
                costs = SampleCosts(summed_bytes=whole_bytes(costs, name="costs"))
            self._costs = costs
            self._part_oversize(self.max_bytes, oversize)
        self._num_samples = len(self._costs)
        if len(self._packed) + len(self._alone) == 0:
            raise ValueError(
                "oversize left out every sample, so that there is no batch: raise max_bytes"
            )

    def _part_oversize(self, max_bytes: int, oversize: Literal["error", "alone"] | Split) -> None:
        """Find what exceeds the cap by itself, and replace it by parts where it can be split."""
        alone = self._costs.alone()
        too_large = np.flatnonzero(alone > max_bytes)
        fits = np.flatnonzero(alone <= max_bytes)
        self._packed, self._alone = fits, too_large[:0]
        if len(too_large) == 0:
            return
        if oversize == "alone":
            self._alone = too_large
            return
        if oversize == "error":
            largest = int(alone.argmax())
            raise ValueError(
                f"{len(too_large)} of {len(alone)} samples cost more than "
                f"max_bytes={max_bytes} ({format_bytes(max_bytes)}) by themselves; the largest is "
                f"sample {largest} with {int(alone[largest])} bytes: raise max_bytes, or give "
                "oversize='alone' or a function that splits it"
            )
        assert callable(oversize)
        parts: list[tuple[Any, int]] = []
        for index in too_large.tolist():
            for key, num_bytes in _parts_of(index, oversize(index, int(alone[index]))):
                part = int(whole_bytes([num_bytes], name=f"parts of sample {index}")[0])
                if part + self._costs.fixed_bytes > max_bytes:
                    raise ValueError(
                        f"oversize split sample {index} into parts of which {key!r} still costs "
                        f"{part} bytes, more than max_bytes={max_bytes}: make smaller parts"
                    )
                parts.append((key, part))
        self.keys = [*range(len(alone)), *(key for key, _ in parts)]
        self._costs = self._costs.extended([num_bytes for _, num_bytes in parts])
        self._packed = np.concatenate([fits, np.arange(len(alone), len(self._costs))])

    def denominators(self, given: Callable[[Any], float] | Sequence[float]) -> Floats:
        """Return the number of terms of each item's loss, from numbers or a function."""
        if callable(given):
            keys = range(self._num_samples) if self.keys is None else self.keys
            each = numbers_of([given(key) for key in keys], name="denominators")
            return each.astype(np.float64)
        if self.keys is not None:
            raise ValueError("denominators must be a function of the key where samples are split")
        each = numbers_of(given, name="denominators").astype(np.float64)
        if len(each) != self._num_samples:
            raise ValueError(
                f"denominators must have one number per sample, {self._num_samples}; "
                f"got {len(each)}"
            )
        return each

    # The plan of an epoch.

    def _count_batches(self) -> int:
        """How many batches every epoch has, on all ranks together."""
        ranks = self.num_replicas
        if self.max_bytes is None:
            assert self.batch_size is not None
            per_step = self.batch_size * ranks
            steps = len(self._packed) // per_step if self.drop_last else 0
            if self.drop_last and steps == 0:
                raise ValueError(
                    f"drop_last leaves nothing of {len(self._packed)} samples: a step of "
                    f"{ranks} ranks takes {per_step}"
                )
            num_batches = (steps or -(-len(self._packed) // per_step)) * ranks
            if num_batches > len(self._packed):
                self._refuse_steps(num_batches)
            return num_batches
        num_alone = len(self._alone)
        wanted = self._fewest_batches()
        is_large = len(self._packed) >= _MANY_SAMPLES
        if is_large:
            wanted += wanted // _SPARE
            wanted += -(wanted + num_alone) % ranks
        self._first_wanted = wanted
        for epoch in range(_TRIAL_EPOCHS if self.shuffle and not is_large else 1):
            packed = self._pack(epoch, 0, wanted)
            self._trial = (epoch, wanted, packed)
            wanted = max(wanted, packed[1])
        wanted += -(wanted + num_alone) % ranks
        if wanted > len(self._packed):
            self._refuse_steps(wanted + num_alone)
        return wanted + num_alone

    def _refuse_steps(self, num_batches: int) -> None:
        raise ValueError(
            f"{len(self._packed) + len(self._alone)} samples are too few for the {num_batches} "
            f"batches that num_replicas={self.num_replicas} ranks need to have equally many: "
            "raise batch_size or max_bytes, use fewer ranks, or leave samples out with drop_last"
        )

    def _fewest_batches(self) -> int:
        """A number of batches below which none can be, as a multiple of the ranks where it may."""
        assert self.max_bytes is not None
        if len(self._packed) == 0:
            return 0
        room = max(self.max_bytes - self._costs.fixed_bytes, 1)
        fewest = -(-int(self._costs.summed_bytes[self._packed].sum()) // room)
        if self.batch_size is not None:
            fewest = max(fewest, -(-len(self._packed) // self.batch_size))
        fewest = max(fewest, 1)
        fewest += -(fewest + len(self._alone)) % self.num_replicas
        return min(fewest, len(self._packed))

    def _pack(self, epoch: int, attempt: int, wanted: int) -> tuple[Integers, int]:
        """Pack an epoch: the batch of every item (`NOWHERE`: dropped), and how many there are."""
        random = self._random(epoch, attempt)
        items = self._packed
        batch_of = np.full(self._num_samples, NOWHERE, dtype=np.int64)
        if len(items) == 0:
            return batch_of, 0
        windows = windows_of(wanted, self.window)
        if self.max_bytes is None:
            num_kept = (
                wanted * self.batch_size if self.drop_last and self.batch_size else len(items)
            )
            if num_kept < len(items):
                kept = items if random is None else random.permutation(items)
                items = np.sort(kept[:num_kept])
            by_window, starts = deal(self._costs[items], windows, random)
            counts = zip(np.diff(starts).tolist(), windows.tolist(), strict=True)
            most = np.concatenate([shares(count, batches) for count, batches in counts])
            costs = self._costs[items][by_window]
            packed = lightest_first(costs, starts, windows, most_samples=most)
            if random is not None:  # otherwise windows stay what they are
                packed = level(costs, packed, wanted)
            batch_of[items[by_window]] = packed
            return batch_of, wanted
        most_samples = self.batch_size or _NO_LIMIT
        if self._costs.padded_bytes:
            lengths = sum(each[items] for each in self._costs.padded_bytes)
            by_window, starts = deal(np.asarray(lengths), windows, random)
            packed, num_batches = longest_first(
                self._costs,
                items[by_window],
                starts,
                most_cost=self.max_bytes,
                most_samples=most_samples,
            )
        else:
            costs = self._costs.summed_bytes[items]
            by_window, starts = deal(costs, windows, random)
            room = self.max_bytes - self._costs.fixed_bytes
            packed = lightest_first(
                costs[by_window],
                starts,
                windows,
                most_samples=np.full(wanted, most_samples, dtype=np.int64),
                most_cost=room,
            )
            packed, num_batches = place_rest(
                costs[by_window], packed, wanted, most_cost=room, most_samples=most_samples
            )
        packed, num_batches = without_empty(packed, num_batches)
        batch_of[items[by_window]] = packed
        return batch_of, num_batches

    def _make_plan(self, epoch: int) -> EpochPlan:
        num_packed = self.num_batches - len(self._alone)
        if self._trial is not None and self._trial[:2] == (epoch, num_packed):
            batch_of, num_batches = self._trial[2]
        else:
            batch_of, num_batches = self._pack(epoch, 0, num_packed)
        self._trial = None
        attempt = 1
        while num_batches > num_packed and attempt < _TRIES:
            batch_of, num_batches = self._pack(epoch, attempt, num_packed)
            attempt += 1
        if num_batches > num_packed:  # the batches of the first trial, in an order of this one's
            batch_of, num_batches = self._pack(0, 0, self._first_wanted)
        batch_of = split_packed(batch_of, self._packed, num_batches, num_packed)
        batch_of[self._alone] = num_packed + np.arange(len(self._alone))
        return self._in_order(batch_of, self._random(epoch, _TRIES))

    def _in_order(self, batch_of: Integers, random: np.random.Generator | None) -> EpochPlan:
        """Choose the order of the batches: in each step those of similar cost, steps at random."""
        used = np.flatnonzero(batch_of != NOWHERE)
        by_batch = used[np.argsort(batch_of[used], kind="stable")]
        counts = np.bincount(batch_of[used], minlength=self.num_batches)
        starts = np.concatenate([[0], np.cumsum(counts)])
        order = np.arange(self.num_batches)
        ranks = self.num_replicas
        if ranks > 1:
            each = self._costs if self.max_bytes is None else self._costs.alone()
            loads = np.add.reduceat(each[by_batch], starts[:-1])
            # Only among neighbours, so that the order of an epoch that is not shuffled stays.
            span = order // (ranks * self.window)
            order = np.lexsort((-loads, span))
        if random is not None:
            steps = order.reshape(-1, ranks)
            steps = random.permuted(steps[random.permutation(len(steps))], axis=1)
            order = steps.ravel()
        lengths = counts[order]
        ends = np.cumsum(lengths)
        places = np.arange(len(by_batch)) + np.repeat(
            starts[:-1][order] - (ends - lengths), lengths
        )
        return EpochPlan(by_batch[places], np.concatenate([[0], ends]))

    def _random(self, epoch: int, attempt: int) -> np.random.Generator | None:
        return np.random.default_rng([self.seed, epoch, attempt]) if self.shuffle else None

    def fingerprint(self) -> str:
        """A hash of all that decides which batches there are."""
        digest = hashlib.sha256()
        settings = (
            *(self.batch_size, self.max_bytes, self.window, self.shuffle, self.drop_last),
            *(self.num_replicas, self.seed, self._num_samples, self.num_batches),
        )
        digest.update(repr(settings).encode())
        costs = self._costs
        if isinstance(costs, SampleCosts):
            arrays = [costs.summed_bytes, *costs.padded_bytes]
            digest.update(f"{costs.fixed_bytes} {costs.least_bytes}".encode())
        else:
            arrays = [costs]
        for array in [*arrays, self._packed, self._alone]:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def split_packed(batch_of: Integers, packed: Integers, num_batches: int, wanted: int) -> Integers:
    """Split batches of the packed items until there are `wanted`; the others stay as they are."""
    batch_of = batch_of.copy()
    if num_batches < wanted:
        batch_of[packed] = split_largest(batch_of[packed], num_batches, wanted)
    return batch_of


def _parts_of(index: int, parts: Any) -> list[tuple[Any, Any]]:
    """Return what a function split a sample into, checked to be `(key, bytes)` pairs."""
    is_list = isinstance(parts, Sequence) and not isinstance(parts, str)
    if not is_list or not all(isinstance(part, Sequence) and len(part) == 2 for part in parts):
        raise TypeError(
            f"oversize must return a list of (key, bytes) pairs, empty to leave a sample out; "
            f"for sample {index} it returned {parts!r}"
        )
    return [(key, num_bytes) for key, num_bytes in parts]
