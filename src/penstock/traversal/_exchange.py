"""Exchanges between the ranks of a process group: the owner of a node gets what concerns it.

Every exchange is an `all_to_all_single`; the bytes that it moves to other ranks are counted. A
group of one rank moves nothing, and needs no process group.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from penstock.errors import RankError


class Exchange:
    """Exchanges between ranks, all of which make the same calls in the same order.

    Args:
        group: The ranks, with gloo; None for a single rank.

    Attributes:
        rank: Number of this rank.
        num_ranks: Ranks.
        sent_bytes: Bytes that this rank has sent to others, by the kind of message.
        num_messages: Rows that it has sent to others, likewise.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else distributed.get_rank(group)
        self.num_ranks = 1 if group is None else distributed.get_world_size(group)
        self.sent_bytes: collections.Counter[str] = collections.Counter()
        self.num_messages: collections.Counter[str] = collections.Counter()
        if group is not None and "gloo" not in str(distributed.get_backend(group)):
            raise ValueError(
                f"group: expected one with gloo, as graphs are in host memory, got "
                f"{distributed.get_backend(group)}; make one with "
                'torch.distributed.new_group(backend="gloo")'
            )

    def trade(self, rows: Tensor, sent: list[int], received: list[int], kind: str) -> Tensor:
        """Send consecutive parts of `rows` to the ranks in turn; return what they have sent here.

        Args:
            rows: Rows of any shape and dtype, as many as `sent` adds up to.
            sent: Rows for each rank.
            received: Rows from each rank.
            kind: Kind of message, under which its bytes are counted.

        Raises:
            RankError: A rank has ended, or does not answer.
        """
        if self._group is None:
            return rows
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        with self._watch(kind):
            distributed.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group)
        num_rows = len(rows) - sent[self.rank]
        row_bytes = rows.element_size() * (rows[:1].numel() if len(rows) else 1)
        self.num_messages[kind] += num_rows
        self.sent_bytes[kind] += num_rows * row_bytes
        return out

    def trade_counts(self, sent: list[int]) -> list[int]:
        """Tell each rank a number; return those that they tell this one."""
        if self._group is None:
            return sent
        ones = [1] * self.num_ranks
        return self.trade(torch.tensor(sent, device="cpu"), ones, ones, "counts").tolist()

    def spread(self, table: Tensor, kind: str) -> Tensor:
        """Return rank 0's table on all ranks; those of the others are written over."""
        if self._group is not None:
            with self._watch(kind):
                distributed.broadcast(table, group=self._group, group_src=0)
            if self.rank == 0:
                self.num_messages[kind] += len(table) * (self.num_ranks - 1)
                self.sent_bytes[kind] += table.nbytes * (self.num_ranks - 1)
        return table

    def sum(self, value: float) -> float:
        """Return the sum of a number over the ranks; the same bits on all of them."""
        return self._reduce(torch.tensor(value, dtype=torch.float64, device="cpu"), "sum").item()

    def largest(self, *values: int) -> list[int]:
        """Return the largest of each whole number over the ranks."""
        return self._reduce(torch.tensor(values, device="cpu"), "largest").tolist()

    def agree(self, *values: object) -> bool:
        """Return whether all ranks have given the same values, by their texts; all ranks call."""
        text = repr(values).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        least, most = self.largest(-digest, digest)
        return -least == most

    def total(self, value: int) -> int:
        """Return the sum of a whole number over the ranks."""
        return int(self._reduce(torch.tensor(value, device="cpu"), "sum"))

    def _reduce(self, value: Tensor, operation: str) -> Tensor:
        if self._group is not None:
            reduce = distributed.ReduceOp.SUM if operation == "sum" else distributed.ReduceOp.MAX
            with self._watch(operation):
                distributed.all_reduce(value, reduce, group=self._group)
        return value

    @contextlib.contextmanager
    def _watch(self, kind: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.num_ranks}: an exchange ({kind}) failed: another rank "
                "has ended, has raised an error, or has not made the same call within the group's "
                f"timeout; its own message says why. Start all ranks again. ({error})",
                rank=self.rank,
            ) from error


def find_group(group: distributed.ProcessGroup | None) -> distributed.ProcessGroup | None:
    """Return the group, or all ranks where none is given; None where there is a single process.

    Raises:
        ValueError: This process is not in the group.
    """
    is_there = distributed.is_available()
    if is_there and group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group: this process is none of its ranks (new_group(ranks) returns that to all "
            "others); make the RankGraph on the group's ranks only"
        )
    if group is not None:
        return group
    if is_there and distributed.is_initialized():
        return distributed.group.WORLD
    return None
