"""A batch sampler that balances batches of a fixed count, or fills a byte cap and never exceeds it.

Every rank makes the same plan of an epoch (`_epoch_plan.py`) and takes its own share of each step;
an epoch that was interrupted goes on with exactly the batches that were left. This file holds the
position in an epoch, and the share of a rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal

import numpy as np
from torch.utils.data import Sampler

from penstock.batching.sampler._epoch_plan import EpochPlanner, PackingOptions, Split
from penstock.units import parse_bytes, parse_count

logger = logging.getLogger(__name__)


class BalancedBatchSampler(Sampler[list[Any]]):
    """Batches of equal cost: of a fixed count, or of as many samples as a byte cap has room for.

    `torch.utils.data.DataLoader(batch_sampler=...)` takes it, and so do PyG's and Transformers'
    loaders. With `batch_size` no batch has more samples, their counts differ by at most one
    (33 samples in batches of at most 32 are 17 and 16), and the costs of the batches are as equal
    as possible. With `max_bytes` the batches are as few as possible, no batch ever costs more, and
    they are of similar cost. With both, both hold. `len()` is the same in every epoch. Every rank
    has the same number of batches, every sample comes exactly once an epoch, and no rank
    communicates with another.

    Unless `set_epoch` is called, every iteration that was finished is followed by the next epoch.

    Example:
        >>> sampler = BalancedBatchSampler([70, 10, 10, 10, 60, 40], max_bytes=100)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 1, 2, 3], [4, 5]]
        >>> len(sampler)
        2

    Args:
        costs: The cost of each sample: a sequence, an array or a tensor of `[num_samples]` finite
            numbers >= 0, or the `SampleCosts` of `ByteModel.costs`. With `max_bytes` they are
            bytes, rounded up to whole ones; with `batch_size` alone any unit does.
        batch_size: Samples per batch; with `max_bytes` the largest number of them.
        max_bytes: The cap of every batch: bytes, or text such as "2GiB".
        window: Batches that are filled together. Fewer make the batches more random, more make
            them more equal.
        shuffle: Compose new batches in every epoch. Otherwise every epoch has the same batches.
        drop_last: Leave out samples (others in every epoch) so that every batch has exactly
            `batch_size`; only without `max_bytes`.
        num_replicas: Ranks; by default those of `torch.distributed` once it is initialised, and
            one before. Inside of Accelerate's `BatchSamplerShard`, which takes one rank's share
            of all batches itself, the ranks are always its.
        rank: The rank of this process; by default that of `torch.distributed`, or 0.
        seed: Seed of the batches, the same on all ranks.
        oversize: The treatment of a sample that exceeds `max_bytes` by itself: `"error"`;
            `"alone"` makes it a batch of its own, the only kind that exceeds the cap; or a function
            `split(index, cost)` that returns its parts as `(key, bytes)` pairs. The keys take
            the place of the index in batches, and an empty list leaves the sample out.

    Attributes:
        epoch: The epoch of the next batch.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, a sample exceeds the cap under `oversize="error"`,
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
        self.max_bytes = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
        options = PackingOptions(
            # Not as an attribute: if Accelerate finds one it drops batches of fewer samples.
            batch_size=None
            if batch_size is None
            else parse_count(batch_size, name="batch_size", least=1),
            max_bytes=self.max_bytes,
            window=parse_count(window, name="window", least=1),
            shuffle=bool(shuffle),
            drop_last=bool(drop_last),
            seed=parse_count(seed, name="seed"),
            oversize=oversize,
        )
        self._rank_arguments = (num_replicas, rank)
        self._sharded: tuple[int, int] | None = None
        self._weighed_ranks: tuple[int, int] | None = None
        self.num_replicas, self.rank = _find_ranks(num_replicas, rank)
        self.epoch = 0
        self._next_batch = 0
        self._restored = False
        self._fresh = True  # no batch of this epoch was returned, or the epoch is to be resumed
        self._planner = EpochPlanner(costs, options, self.num_replicas)

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator itself: the caller's frame shows whether Accelerate shards the batches.
        shard = _find_accelerate_shard(self, sys._getframe(1))
        self._update_ranks(shard)
        return self._iterate(all_ranks=shard is not None)

    def _iterate(self, *, all_ranks: bool) -> Iterator[list[Any]]:
        # Iterations of several threads may begin at once, and each goes on from its own begin.
        epoch, first_step = self.epoch, self._next_batch = self._find_next()
        self._fresh = self._restored = False
        plan, keys = self._planner.plan(epoch), self._planner.keys
        num_ranks, num_steps = self.num_replicas, self._planner.num_batches // self.num_replicas
        ranks = range(num_ranks) if all_ranks else (self.rank,)
        for step in range(first_step, num_steps):
            for rank in ranks:
                batch = step * num_ranks + rank
                items = plan.items[plan.starts[batch] : plan.starts[batch + 1]].tolist()
                if self.epoch == epoch:  # otherwise another iteration has begun
                    self._next_batch = step + 1
                yield items if keys is None else [keys[item] for item in items]

    def _find_next(self) -> tuple[int, int]:
        """Return the epoch and the batch at which the next iteration begins."""
        if self._fresh:
            return self.epoch, self._next_batch
        if self._next_batch >= self._planner.num_batches // self.num_replicas:
            return self.epoch + 1, 0
        return self.epoch, 0  # the last iteration was abandoned: begin again

    def __len__(self) -> int:
        shard = _find_accelerate_shard(self, sys._getframe(1))
        self._update_ranks(shard)
        return self._planner.num_batches // (1 if shard is not None else self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position that `load_state_dict` restored stays if it is in that epoch.

        Args:
            epoch: Number >= 0, the same on all ranks.
        """
        epoch = parse_count(epoch, name="epoch")
        if self._fresh and self._restored and epoch != self.epoch:
            logger.warning(
                "set_epoch(%d) discards the restored position, epoch %d after %d batches: a loop "
                "that counts epochs itself has to begin with that epoch",
                *(epoch, self.epoch, self._next_batch),
            )
        self._restored = False
        if epoch != self.epoch or not self._fresh:
            self.epoch, self._next_batch, self._fresh = epoch, 0, True

    def loss_weights(
        self, denominators: Callable[[Any], float] | Sequence[float] | None = None
    ) -> list[float]:
        """Return a factor for each batch's mean loss with which all samples count alike.

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
            denominators: For a loss that is not a mean over samples: the number of terms of each
                sample's loss (its tokens, say), by index, or as a function of the index or key.
                By default 1 each.

        Returns:
            A weight for each batch of this rank in the next iteration, in their order. So call it
            before the loop: `zip(loader, sampler.loss_weights())` does.
        """
        self._weighed_ranks = None
        self._update_ranks(None)
        self._weighed_ranks = self.num_replicas, self.rank
        epoch, begin = self._find_next()
        plan = self._planner.plan(epoch)
        if denominators is None:
            terms = np.diff(plan.starts).astype(np.float64)
        else:
            each = self._planner.read_denominators(denominators)
            terms = np.add.reduceat(each[plan.items], plan.starts[:-1])
        weights = terms / terms.mean() if terms.any() else np.ones(len(terms))
        return weights[self.rank :: self.num_replicas][begin:].tolist()

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the position of this sampler, as JSON values.

        Args:
            num_batches: Batches of this epoch that training has used. By default those that were
                returned, which are more if a loader with workers reads ahead.

        Returns:
            The state for `load_state_dict`.
        """
        done = self._next_batch if num_batches is None else num_batches
        done = parse_count(done, name="num_batches")
        if done > len(self):
            raise ValueError(f"num_batches must be between 0 and {len(self)}; got {num_batches}")
        fingerprint = self._planner.compute_fingerprint()
        return {"epoch": self.epoch, "num_batches": done, "fingerprint": fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position of another sampler, with the batches that remain.

        Args:
            state: The result of `state_dict` of a sampler with the same arguments.

        Raises:
            ValueError: The state is of another data set, seed or number of ranks, or no state.
        """
        if not isinstance(state, dict) or set(state) != {"epoch", "num_batches", "fingerprint"}:
            got = f"the keys {sorted(map(str, state))}" if isinstance(state, dict) else repr(state)
            raise ValueError(
                f"state must be what BalancedBatchSampler.state_dict() returned; got {got}"
            )
        epoch = parse_count(state["epoch"], name="the state's epoch")
        done = parse_count(state["num_batches"], name="the state's num_batches")
        self._update_ranks(None)
        if state["fingerprint"] != self._planner.compute_fingerprint():
            raise ValueError(
                "state is that of a sampler with other costs or arguments (batch_size, max_bytes, "
                "window, shuffle, drop_last, num_replicas, seed, oversize); its batches cannot be "
                "continued: make the sampler as it was, or begin a new epoch with set_epoch"
            )
        if done > len(self):
            raise ValueError(f"the state's num_batches must be at most {len(self)}; got {done}")
        self.epoch, self._next_batch = (epoch, done) if done < len(self) else (epoch + 1, 0)
        self._fresh = self._restored = True

    def _update_ranks(self, shard: Any) -> None:
        """Plan for the current ranks: a process group may appear after the constructor."""
        num_replicas, _ = self._rank_arguments
        if shard is not None:
            if num_replicas not in (None, 1, shard.num_processes):
                raise ValueError(
                    f"num_replicas is {num_replicas}, but Accelerate shares the batches among "
                    f"{shard.num_processes} processes: leave num_replicas and rank out"
                )
            self._sharded = shard.num_processes, shard.process_index
        if self._sharded is not None:
            ranks = self._sharded
        elif num_replicas is None and not _is_distributed():
            return  # unchanged: no process group yet, or no longer
        else:
            ranks = _find_ranks(*self._rank_arguments)
        if ranks[0] != self._planner.num_replicas:
            self._planner.share(ranks[0])
        self.num_replicas, self.rank = ranks
        if self._weighed_ranks not in (None, ranks):
            raise ValueError(
                f"loss_weights() was called for rank {self._weighed_ranks[1]} of "
                f"{self._weighed_ranks[0]}, but the batches are those of rank {ranks[1]} of "
                f"{ranks[0]}: leave num_replicas and rank out, and make the sampler, or call "
                "loss_weights(), once the process group exists"
            )


def _find_accelerate_shard(sampler: BalancedBatchSampler, frame: FrameType | None) -> Any:
    """Return the `BatchSamplerShard` of Accelerate that calls a sampler, if any.

    It takes every n-th batch of any batch sampler. Only the calling frames tell it from a loader
    that takes them all.
    """
    accelerate = sys.modules.get("accelerate.data_loader")
    while accelerate is not None and frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, accelerate.BatchSamplerShard) and _wraps(caller, sampler):
            return caller
        if isinstance(caller, accelerate.DataLoaderDispatcher) and _wraps(caller, sampler):
            raise ValueError(
                "Accelerate's dispatch_batches=True puts batches together and cuts them anew, so "
                "that they are no longer below max_bytes nor of equal cost: use "
                "dispatch_batches=False"
            )
        frame = frame.f_back
    return None


def _wraps(wrapper: Any, sampler: BalancedBatchSampler) -> bool:
    while wrapper is not None and wrapper is not sampler:
        wrapper = getattr(wrapper, "batch_sampler", None)
    return wrapper is sampler


def _is_distributed() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def _find_ranks(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    from torch import distributed

    running = _is_distributed()
    if num_replicas is None:
        num_replicas = distributed.get_world_size() if running else 1
    if rank is None:
        rank = distributed.get_rank() if running else 0
    num_replicas = parse_count(num_replicas, name="num_replicas", least=1)
    rank = parse_count(rank, name="rank")
    if rank >= num_replicas:
        raise ValueError(f"rank must be below num_replicas={num_replicas}; got {rank}")
    return num_replicas, rank
