"""Rows over ranks: each rank multiplies its rows by whole vectors, and keeps its part of all.

Sums over ranks are those of small Gram matrices; the vectors of a product are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RankError
from penstock.spectral._operator import LinearOperator


def rank_of(group: Any) -> int:
    """Return the rank of this process in a group; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


@contextlib.contextmanager
def watch(group: Any) -> Iterator[None]:
    """Raise RankError where a collective call fails."""
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        raise RankError(
            f"rank {rank} of {num_ranks}: a sum or an exchange of vectors failed: another rank has "
            "ended, has raised an error, or has not made the same call within the group's timeout; "
            f"its own message says why. Start all ranks again. ({error})",
            rank=rank,
        ) from error


def reduce_over(group: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over ranks, in place; without a group it returns it."""
    if group is None:
        return lambda tensor: tensor

    def reduce(tensor: Tensor) -> Tensor:
        summed = tensor.contiguous()
        with watch(group):
            dist.all_reduce(summed, group=group)
        return summed

    return reduce


def count_rows(operator: Any, group: Any) -> int:
    """Return the sum over ranks of the rows of an operator's part.

    Raises:
        TypeError: It is no matrix.
    """
    shape = getattr(operator, "shape", None)
    if shape is None or len(shape) != 2:
        raise TypeError(
            f"operator: with group= it must be a matrix, the rows of this rank; got "
            f"{type(operator).__name__}"
        )
    total = torch.tensor([int(shape[0])], device="cpu")
    with watch(group):
        dist.all_reduce(total, group=group)
    return int(total)


class RowsOfRanks(LinearOperator):
    """A matrix whose rows are split over ranks in their order.

    Attributes:
        exchanged_bytes: Bytes that this rank has received to gather vectors.
    """

    def __init__(self, rows: LinearOperator, group: Any) -> None:
        super().__init__(
            rows.length,
            rows.dtype,
            rows.device,
        )
        self._rows, self._group = rows, group
        counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device="cpu")
        counts[dist.get_rank(group)] = rows.length
        # What ranks decide by must be the same on all.
        most = torch.tensor([rows.sweep_bytes, rows.length, -rows.block], device="cpu")
        with watch(group):
            dist.all_reduce(counts, group=group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        self._counts, self.num_ranks = counts.tolist(), len(counts)
        self.sweep_bytes, self.most_length = most[:2].tolist()
        self.block = -int(most[2])
        self.exchanged_bytes = 0

    @property
    def global_length(self) -> int:
        """Elements of a vector over all ranks."""
        return sum(self._counts)

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        self._rows.apply(self._gather(x), out, alpha=alpha, z=z, gamma=gamma, beta=beta)

    def _gather(self, x: Tensor) -> Tensor:
        """Return whole vectors, (b, n)."""
        most = max(self._counts)
        padded = x.new_zeros(len(x), most)
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in self._counts]
        with watch(self._group):
            dist.all_gather(parts, padded, group=self._group)
        self.exchanged_bytes += (len(parts) - 1) * padded.numel() * padded.element_size()
        return torch.cat([p[:, :c] for p, c in zip(parts, self._counts, strict=True)], 1)

    def close(self) -> None:
        """Give back what the operator holds; see `LinearOperator`."""
        self._rows.close()
