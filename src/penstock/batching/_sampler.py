"""A batch sampler that balances batches of a fixed count, or fills a byte cap and never exceeds it.

The plan of an epoch is a function of the costs, the seed and the epoch alone. So every rank makes
the same plan without asking the others and takes its own share of each step, and an epoch that was
interrupted goes on with exactly the batches that were left.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

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
from penstock.units import format_bytes, parse_bytes

Split = Callable[[int, int], Sequence[tuple[Any, int]]]

_NO_LIMIT = 1 << 62
_TRIES = 4  # of an epoch to get along with the number of batches that was promised
_TRIAL_EPOCHS = 3  # whose largest number of batches is promised
_MANY_SAMPLES = 50_000  # from here on one batch in `_SPARE` is promised instead: that is faster
_SPARE = 500


@dataclass(frozen=True)
class _Plan:
    """The batches of an epoch: batch b has the items `items[starts[b]:starts[b + 1]]`."""

    items: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts) - 1


class BalancedBatchSampler(Sampler[list[Any]]):
    """Batches of equal cost: of a fixed count, or of as many samples as a byte cap has room for.

    It is what `torch.utils.data.DataLoader(batch_sampler=...)` takes, and PyG's and Transformers'
    loaders with it. With `batch_size` every batch has that many samples (one less where the data
    do not divide evenly) and the costs of the batches are as equal as possible. With `max_bytes`
    the batches are as few as possible, no batch ever costs more, and they are of similar cost.
    With both, both hold. `len()` is the same in every epoch. Every rank has the same number of
    batches, every sample comes exactly once an epoch, and nobody communicates.

    Unless `set_epoch` is called, every iteration that was finished is followed by the next epoch.

    Example:
        >>> sampler = BalancedBatchSampler([70, 10, 10, 10, 60, 40], max_bytes=100)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 1, 2, 3], [4, 5]]
        >>> len(sampler)
        2

    Args:
        costs: What each sample costs: a sequence, an array or a tensor of `[num_samples]` finite
            numbers >= 0, or what `ByteModel.costs` returns. With `max_bytes` they are bytes,
            rounded up to whole ones; with `batch_size` alone any unit does.
        batch_size: Samples per batch; with `max_bytes` the most of them.
        max_bytes: What no batch may exceed: bytes, or text such as "2GiB".
        window: Batches that are filled together. Fewer make the batches more random, more make
            them more equal.
        shuffle: Compose new batches in every epoch. Otherwise every epoch has the same batches.
        drop_last: Leave out samples (others in every epoch) so that every batch has exactly
            `batch_size`; only without `max_bytes`.
        num_replicas: Ranks; by default those of `torch.distributed`, or one.
        rank: Which of them this is; by default that of `torch.distributed`, or 0.
        seed: The same on all ranks.
        oversize: What happens to a sample that exceeds `max_bytes` by itself: `"error"`;
            `"alone"` makes it a batch of its own, the only kind that exceeds the cap; or a function
            `split(index, cost)` that returns its parts as `(key, bytes)` pairs. The keys take
            the place of the index in batches, and an empty list leaves the sample out.

    Attributes:
        epoch: The epoch whose batches come next.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, a sample exceeds the cap under `oversize="error"`,
            or there are fewer samples than ranks.
    """

    def __init__(
        self,
        costs: Any,
        *,
        batch_size: int | None = None,
        max_bytes: int | str | None = None,
        window: int = 16,
        shuffle: bool = True,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        oversize: Literal["error", "alone"] | Split = "error",
    ) -> None:
        if batch_size is None and max_bytes is None:
            raise ValueError("give batch_size, max_bytes or both")
        if drop_last and (max_bytes is not None or batch_size is None):
            raise ValueError(
                "drop_last needs batch_size without max_bytes: under a cap batches have no fixed "
                "count, and no sample has to be left out"
            )
        self.batch_size = None if batch_size is None else _at_least(1, batch_size, "batch_size")
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
        self.window = _at_least(1, window, "window")
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.num_replicas, self.rank = _ranks(num_replicas, rank)
        self.seed = _at_least(0, seed, "seed")
        self.epoch = 0
        self._next_batch = 0
        self._fresh = True  # nothing of this epoch has been handed out, or it is to be resumed
        self._keys: list[Any] | None = None
        self._num_samples = 0
        self._alone = np.zeros(0, dtype=np.int64)
        self._take_costs(costs, oversize)
        self._plans: dict[int, _Plan] = {}
        self._trial: tuple[int, int, tuple[Integers, int]] | None = None
        self._first_wanted = 0  # with so many, the first trial did not need more than was promised
        self._num_batches = self._count_batches()

    def __iter__(self) -> Iterator[list[Any]]:
        if not self._fresh and self._next_batch >= len(self):
            self.set_epoch(self.epoch + 1)
        elif not self._fresh:
            self._next_batch = 0  # the last iteration was given up: begin again
        self._fresh = False
        plan, epoch = self._plan(self.epoch), self.epoch
        for step in range(self._next_batch, len(self)):
            batch = step * self.num_replicas + self.rank
            items = plan.items[plan.starts[batch] : plan.starts[batch + 1]].tolist()
            if self.epoch == epoch:  # otherwise somebody else is iterating already
                self._next_batch = step + 1
            yield items if self._keys is None else [self._keys[item] for item in items]

    def __len__(self) -> int:
        return self._num_batches // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; what `load_state_dict` restored stays if it is that epoch already.

        Args:
            epoch: Number >= 0, the same on all ranks.
        """
        epoch = _at_least(0, epoch, "epoch")
        if epoch != self.epoch or not self._fresh:
            self.epoch, self._next_batch, self._fresh = epoch, 0, True

    def loss_weights(
        self, denominators: Callable[[Any], float] | Sequence[float] | None = None
    ) -> list[float]:
        """Return what to multiply each batch's mean loss with, so that all samples count alike.

        A batch of fewer samples weighs less: its own count over the mean count of all batches on
        all ranks. The mean over an epoch is 1, and where DDP averages the gradients of the ranks
        the result is that of the mean over all samples.

        Example:
            >>> sampler = BalancedBatchSampler([90, 30, 30, 30], max_bytes=100)
            >>> sorted(sampler.loss_weights())
            [0.5, 1.5]
            >>> for batch, weight in zip(sampler, sampler.loss_weights(), strict=True):
            ...     pass  # (weight * loss(batch)).backward()

        Args:
            denominators: Where the loss of a batch is not a mean over its samples: over how many
                terms each sample's loss is (its tokens, say), by index, or as a function of the
                index or key. By default 1 each.

        Returns:
            A weight for each batch that this rank still has to see in this epoch, in their order.
        """
        plan = self._plan(self.epoch)
        if denominators is None:
            terms = np.diff(plan.starts).astype(np.float64)
        else:
            each = self._denominators(denominators)
            terms = np.add.reduceat(each[plan.items], plan.starts[:-1])
        weights = terms / terms.mean() if terms.any() else np.ones(len(terms))
        begin = self._next_batch if self._fresh or self._next_batch < len(self) else len(self)
        return weights[self.rank :: self.num_replicas][begin:].tolist()

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return where this sampler is, as JSON values.

        Args:
            num_batches: Batches of this epoch that training has used. By default those that were
                handed out, which are more where a loader with workers reads ahead.

        Returns:
            The state for `load_state_dict`.
        """
        done = self._next_batch if num_batches is None else num_batches
        if not 0 <= done <= len(self):
            raise ValueError(f"num_batches must be between 0 and {len(self)}; got {num_batches}")
        return {"epoch": self.epoch, "num_batches": done, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler was: the next iteration has the batches that were left.

        Args:
            state: What `state_dict` returned, from a sampler with the same arguments.

        Raises:
            ValueError: it was another data set, seed or number of ranks, or no such state.
        """
        if set(state) != {"epoch", "num_batches", "fingerprint"}:
            raise ValueError(
                "state must be what BalancedBatchSampler.state_dict() returned; "
                f"got the keys {sorted(map(str, state))}"
            )
        if state["fingerprint"] != self._fingerprint():
            raise ValueError(
                "state is that of a sampler with other costs or arguments (batch_size, max_bytes, "
                "window, shuffle, drop_last, num_replicas, seed, oversize); its batches cannot be "
                "continued: make the sampler as it was, or begin a new epoch with set_epoch"
            )
        self.epoch, self._next_batch, self._fresh = state["epoch"], state["num_batches"], True
        if self._next_batch >= len(self):
            self.epoch, self._next_batch = self.epoch + 1, 0

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
        num_items = len(self._packed) + len(self._alone)
        if num_items < self.num_replicas:
            raise ValueError(
                f"{num_items} samples cannot be shared by num_replicas={self.num_replicas} ranks: "
                "every rank needs a batch in every step; use fewer ranks"
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
            for key, num_bytes in oversize(index, int(alone[index])):
                part = int(whole_bytes([num_bytes], name=f"parts of sample {index}")[0])
                if part + self._costs.fixed_bytes > max_bytes:
                    raise ValueError(
                        f"oversize split sample {index} into parts of which {key!r} still costs "
                        f"{part} bytes, more than max_bytes={max_bytes}: make smaller parts"
                    )
                parts.append((key, part))
        self._keys = [*range(len(alone)), *(key for key, _ in parts)]
        self._costs = self._costs.extended([num_bytes for _, num_bytes in parts])
        self._packed = np.concatenate([fits, np.arange(len(alone), len(self._costs))])

    def _denominators(self, given: Callable[[Any], float] | Sequence[float]) -> Floats:
        if callable(given):
            keys = range(self._num_samples) if self._keys is None else self._keys
            return np.array([given(key) for key in keys], dtype=np.float64)
        if self._keys is not None:
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

    def _plan(self, epoch: int) -> _Plan:
        if epoch not in self._plans:
            self._plans = {epoch: self._make_plan(epoch if self.shuffle else 0)}
        return self._plans[epoch]

    def _make_plan(self, epoch: int) -> _Plan:
        num_packed = self._num_batches - len(self._alone)
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

    def _in_order(self, batch_of: Integers, random: np.random.Generator | None) -> _Plan:
        """Choose the order of the batches: in each step those of similar cost, steps at random."""
        used = np.flatnonzero(batch_of != NOWHERE)
        by_batch = used[np.argsort(batch_of[used], kind="stable")]
        counts = np.bincount(batch_of[used], minlength=self._num_batches)
        starts = np.concatenate([[0], np.cumsum(counts)])
        order = np.arange(self._num_batches)
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
        return _Plan(by_batch[places], np.concatenate([[0], ends]))

    def _random(self, epoch: int, attempt: int) -> np.random.Generator | None:
        return np.random.default_rng([self.seed, epoch, attempt]) if self.shuffle else None

    def _fingerprint(self) -> str:
        """A hash of all that decides which batches there are."""
        digest = hashlib.sha256()
        settings = (
            *(self.batch_size, self.max_bytes, self.window, self.shuffle, self.drop_last),
            *(self.num_replicas, self.seed, self._num_samples, self._num_batches),
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


def _ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    from torch import distributed

    running = distributed.is_available() and distributed.is_initialized()
    if num_replicas is None:
        num_replicas = distributed.get_world_size() if running else 1
    if rank is None:
        rank = distributed.get_rank() if running else 0
    num_replicas = _at_least(1, num_replicas, "num_replicas")
    rank = _at_least(0, rank, "rank")
    if rank >= num_replicas:
        raise ValueError(f"rank must be below num_replicas={num_replicas}; got {rank}")
    return num_replicas, rank


def _at_least(least: int, value: Hashable, name: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number; got {value!r} of type {type(value)}")
    number = operator.index(value)  # pyright: ignore[reportArgumentType]
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number
