"""The batches of an epoch: their number, their samples and their order.

A plan is a function of the costs, the seed, the epoch and the number of ranks alone. So every rank
makes the same plan without communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.batching._arrays import Floats, Integers
from penstock.batching._numbers import check_numbers, round_up_bytes
from penstock.batching.sampler._packing import (
    UNPLACED,
    SampleCosts,
    deal,
    divide,
    drop_empty,
    level,
    pack_lightest_first,
    pack_longest_first,
    place_rest,
    size_windows,
    split_largest,
)
from penstock.units import format_bytes

Split = Callable[[int, int], Sequence[tuple[Any, int]]]

_NO_LIMIT = 1 << 62
_TRIES = 4  # attempts of an epoch to fit into the number of batches that `len` gave
_TRIAL_EPOCHS = 3  # the largest number of batches of these is the number of every epoch
_MANY_SAMPLES = 50_000  # from here on one batch in `_SPARE` is added instead: that is faster
_SPARE = 500


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch: batch b has the items `items[starts[b]:starts[b + 1]]`."""

    items: Integers
    starts: Integers


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """The arguments of `BalancedBatchSampler` that decide how samples are packed."""

    batch_size: int | None
    max_bytes: int | None
    window: int
    shuffle: bool
    drop_last: bool
    seed: int
    oversize: Literal["error", "alone"] | Split


class EpochPlanner:
    """A planner of epochs: batches below the cap or of a fixed count, each sample once."""

    def __init__(self, costs: Any, options: PackingOptions, num_replicas: int) -> None:
        self._options = options
        self.keys: list[Any] | None = None
        self._num_samples = 0
        self._alone = np.zeros(0, dtype=np.int64)
        self._take_costs(costs)
        self.share(num_replicas)

    def share(self, num_replicas: int) -> None:
        """Plan for another number of ranks from now on."""
        self.num_replicas = num_replicas
        num_items = len(self._packed) + len(self._alone)
        if num_items < num_replicas:
            raise ValueError(
                f"{num_items} samples cannot be shared by num_replicas={num_replicas} ranks: "
                "every rank needs a batch in every step; use fewer ranks"
            )
        self._plans: dict[int, EpochPlan] = {}
        self._trial: tuple[int, int, tuple[Integers, int]] | None = None
        self._first_wanted = 0  # the number of batches with which the first trial succeeded
        self.num_batches = self._count_batches()

    def plan(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch, over all ranks: batch `step * num_replicas + rank`."""
        plan = self._plans.get(epoch)
        if plan is None:
            plan = self._make_plan(epoch if self._options.shuffle else 0)
            self._plans = {epoch: plan}
        return plan

    # The samples to pack.

    def _take_costs(self, costs: Any) -> None:
        max_bytes, oversize = self._options.max_bytes, self._options.oversize
        if oversize not in ("error", "alone") and not callable(oversize):
            raise ValueError(
                f"oversize must be 'error', 'alone' or a function (index, cost) -> parts; "
                f"got {oversize!r}"
            )
        if max_bytes is None:
            if isinstance(costs, SampleCosts):
                if costs.padded_bytes:
                    raise ValueError(
                        "costs have padded bytes, and of a fixed count the longest sample alone "
                        "makes the largest batch: give max_bytes"
                    )
                costs = costs.summed_bytes
            self._costs: Any = check_numbers(costs, name="costs")
            self._packed = np.arange(len(self._costs))
        else:
            if not isinstance(costs, SampleCosts):
                costs = SampleCosts(summed_bytes=round_up_bytes(costs, name="costs"))
            self._costs = costs
            self._replace_oversize(max_bytes)
        self._num_samples = len(self._costs)
        if len(self._packed) + len(self._alone) == 0:
            raise ValueError(
                "oversize left out every sample, so that there is no batch: raise max_bytes"
            )

    def _replace_oversize(self, max_bytes: int) -> None:
        """Find samples above the cap, and replace them by parts if they can be split."""
        oversize, alone = self._options.oversize, self._costs.of_each()
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
        if self._costs.least_bytes > max_bytes:
            raise ValueError(
                f"max_bytes is {max_bytes}, but every batch costs {self._costs.least_bytes} bytes "
                "at least (least_bytes), into whatever parts oversize splits samples: raise "
                "max_bytes"
            )
        parts: list[tuple[Any, int]] = []
        for index in too_large.tolist():
            for key, num_bytes in _check_parts(index, oversize(index, int(alone[index]))):
                part = int(round_up_bytes([num_bytes], name=f"parts of sample {index}")[0])
                if part + self._costs.fixed_bytes > max_bytes:
                    raise ValueError(
                        f"oversize split sample {index} into parts of which {key!r} still costs "
                        f"{part} bytes, more than max_bytes={max_bytes}: make smaller parts"
                    )
                parts.append((key, part))
        self.keys = [*range(len(alone)), *(key for key, _ in parts)]
        self._costs = self._costs.extend([num_bytes for _, num_bytes in parts])
        self._packed = np.concatenate([fits, np.arange(len(alone), len(self._costs))])

    def read_denominators(self, given: Callable[[Any], float] | Sequence[float]) -> Floats:
        """Return the number of terms of each item's loss, from numbers or a function."""
        if callable(given):
            keys = range(self._num_samples) if self.keys is None else self.keys
            each = check_numbers([given(key) for key in keys], name="denominators")
            return each.astype(np.float64)
        if self.keys is not None:
            raise ValueError("denominators must be a function of the key where samples are split")
        each = check_numbers(given, name="denominators").astype(np.float64)
        if len(each) != self._num_samples:
            raise ValueError(
                f"denominators must have one number per sample, {self._num_samples}; "
                f"got {len(each)}"
            )
        return each

    # The plan of an epoch.

    def _count_batches(self) -> int:
        """Return the number of batches of every epoch, on all ranks together."""
        ranks = self.num_replicas
        if self._options.max_bytes is None:
            assert self._options.batch_size is not None
            per_step = self._options.batch_size * ranks
            steps = len(self._packed) // per_step if self._options.drop_last else 0
            if self._options.drop_last and steps == 0:
                raise ValueError(
                    f"drop_last leaves nothing of {len(self._packed)} samples: a step of "
                    f"{ranks} ranks takes {per_step}"
                )
            num_batches = (steps or -(-len(self._packed) // per_step)) * ranks
            if num_batches > len(self._packed):
                self._refuse_steps(num_batches)
            return num_batches
        num_alone = len(self._alone)
        wanted = self._bound_batches()
        is_large = len(self._packed) >= _MANY_SAMPLES
        if is_large:
            wanted += wanted // _SPARE
            wanted += -(wanted + num_alone) % ranks
        self._first_wanted = wanted
        for epoch in range(_TRIAL_EPOCHS if self._options.shuffle and not is_large else 1):
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

    def _bound_batches(self) -> int:
        """Return a lower bound of the number of batches, a multiple of the ranks if possible."""
        assert self._options.max_bytes is not None
        if len(self._packed) == 0:
            return 0
        room = max(self._options.max_bytes - self._costs.fixed_bytes, 1)
        fewest = -(-int(self._costs.summed_bytes[self._packed].sum()) // room)
        if self._options.batch_size is not None:
            fewest = max(fewest, -(-len(self._packed) // self._options.batch_size))
        fewest = max(fewest, 1)
        fewest += -(fewest + len(self._alone)) % self.num_replicas
        return min(fewest, len(self._packed))

    def _pack(self, epoch: int, attempt: int, wanted: int) -> tuple[Integers, int]:
        """Pack an epoch; return the batch of every item (`UNPLACED`: dropped), and their number."""
        random = self._make_generator(epoch, attempt)
        batch_of = np.full(self._num_samples, UNPLACED, dtype=np.int64)
        if len(self._packed) == 0:
            return batch_of, 0
        windows = size_windows(wanted, self._options.window)
        if self._options.max_bytes is None:
            items, packed = self._pack_count(windows, random, wanted)
            batch_of[items] = packed
            return batch_of, wanted
        items, packed, num_batches = self._pack_below_cap(windows, random, wanted)
        packed, num_batches = drop_empty(packed, num_batches)
        batch_of[items] = packed
        return batch_of, num_batches

    def _pack_count(
        self, windows: Integers, random: np.random.Generator | None, wanted: int
    ) -> tuple[Integers, Integers]:
        """Pack batches of a fixed count; return the items by window, and the batch of each."""
        items, batch_size = self._packed, self._options.batch_size
        num_kept = wanted * batch_size if self._options.drop_last and batch_size else len(items)
        if num_kept < len(items):
            kept = items if random is None else random.permutation(items)
            items = np.sort(kept[:num_kept])
        by_window, starts = deal(self._costs[items], windows, random)
        counts = zip(np.diff(starts).tolist(), windows.tolist(), strict=True)
        most = np.concatenate([divide(count, batches) for count, batches in counts])
        costs = self._costs[items][by_window]
        packed = pack_lightest_first(costs, starts, windows, most_samples=most)
        if random is not None:  # otherwise every window keeps its samples
            packed = level(costs, packed, wanted)
        return items[by_window], packed

    def _pack_below_cap(
        self, windows: Integers, random: np.random.Generator | None, wanted: int
    ) -> tuple[Integers, Integers, int]:
        """Pack batches below the cap; return items by window, their batches, and the number."""
        assert self._options.max_bytes is not None
        items, most_cost = self._packed, self._options.max_bytes
        most_samples = self._options.batch_size or _NO_LIMIT
        if self._costs.padded_bytes:
            lengths = sum(each[items] for each in self._costs.padded_bytes)
            by_window, starts = deal(np.asarray(lengths), windows, random)
            items = items[by_window]
            packed, num_batches = pack_longest_first(
                self._costs, items, starts, most_cost=most_cost, most_samples=most_samples
            )
            return items, packed, num_batches
        costs = self._costs.summed_bytes[items]
        by_window, starts = deal(costs, windows, random)
        costs, room = costs[by_window], most_cost - self._costs.fixed_bytes
        most = np.full(wanted, most_samples, dtype=np.int64)
        packed = pack_lightest_first(costs, starts, windows, most_samples=most, most_cost=room)
        packed, num_batches = place_rest(
            costs, packed, wanted, most_cost=room, most_samples=most_samples
        )
        return items[by_window], packed, num_batches

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
        batch_of = batch_of.copy()
        batch_of[self._packed] = split_largest(batch_of[self._packed], num_batches, num_packed)
        batch_of[self._alone] = num_packed + np.arange(len(self._alone))
        return self._order_batches(batch_of, self._make_generator(epoch, _TRIES))

    def _order_batches(self, batch_of: Integers, random: np.random.Generator | None) -> EpochPlan:
        """Choose the order of the batches: in each step those of similar cost, steps at random."""
        used = np.flatnonzero(batch_of != UNPLACED)
        by_batch = used[np.argsort(batch_of[used], kind="stable")]
        counts = np.bincount(batch_of[used], minlength=self.num_batches)
        starts = np.concatenate([[0], np.cumsum(counts)])
        order = np.arange(self.num_batches)
        ranks = self.num_replicas
        if ranks > 1:
            each = self._costs if self._options.max_bytes is None else self._costs.of_each()
            loads = np.add.reduceat(each[by_batch], starts[:-1])
            # Only among neighbours, so that the order of an epoch that is not shuffled stays.
            span = order // (ranks * self._options.window)
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

    def _make_generator(self, epoch: int, attempt: int) -> np.random.Generator | None:
        options = self._options
        return np.random.default_rng([options.seed, epoch, attempt]) if options.shuffle else None

    def compute_fingerprint(self) -> str:
        """Return a hash of all that decides how samples are packed."""
        digest = hashlib.sha256()
        options = self._options
        settings = (
            *(options.batch_size, options.max_bytes, options.window, options.shuffle),
            *(options.drop_last, self.num_replicas, options.seed),
            *(self._num_samples, self.num_batches),
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


def _check_parts(index: int, parts: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a split sample, checked to be `(key, bytes)` pairs."""
    is_list = isinstance(parts, Sequence) and not isinstance(parts, str)
    if not is_list or not all(isinstance(part, Sequence) and len(part) == 2 for part in parts):
        raise TypeError(
            f"oversize must return a list of (key, bytes) pairs, empty to leave a sample out; "
            f"for sample {index} it returned {parts!r}"
        )
    return [(key, num_bytes) for key, num_bytes in parts]
