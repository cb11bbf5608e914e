"""Collectives as operators of a step graph.

Each rank captures, plans and runs its own step. A collective is an operator like any other, only
that ranks must run them in one order, whatever their plans are: it counts as one that draws random
numbers, whose order a plan keeps, and as one that must not run twice (`schemas.COLLECTIVES`).
Results go to memory that exists already, at an address of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from penstock.errors import RankError


def _collective(changed: str) -> Callable[[Callable[..., None]], Any]:
    """Make an operator of a function that changes one of its arguments."""

    def register(function: Callable[..., None]) -> Any:
        name = f"penstock::{function.__name__}"
        tags = (torch.Tag.nondeterministic_seeded,)
        made = torch.library.custom_op(name, function, mutates_args=(changed,), tags=tags)
        made.register_fake(lambda *args, **kwargs: None)
        return made

    return register


@_collective("tensor")
def average_over_ranks_(tensor: torch.Tensor, group: str) -> None:
    """Average a tensor over the ranks of a process group, named as torch names it."""
    members = _members(group)
    # As DDP does it: every rank divides, then all are summed up, so that sums do not overflow.
    tensor.div_(members.size())
    distributed.all_reduce(tensor, group=members)


@_collective("tensor")
def sum_over_ranks_(tensor: torch.Tensor, group: str) -> None:
    """Sum a tensor up over the ranks."""
    distributed.all_reduce(tensor, group=_members(group))


@_collective("tensor")
def max_over_ranks_(tensor: torch.Tensor, group: str) -> None:
    """Take the maximum of each element over the ranks."""
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX, group=_members(group))


@_collective("full")
def all_gather_shards_(full: torch.Tensor, shard: torch.Tensor, group: str) -> None:
    """Fill `full` (n ranks x k elements, flat) with every rank's `shard` (k elements, flat)."""
    _all_gather(full, shard, group=_members(group))


@_collective("shard")
def reduce_scatter_mean_(shard: torch.Tensor, full: torch.Tensor, group: str) -> None:
    """Fill `shard` (k elements) with this rank's part of the mean of all ranks' `full` (n x k)."""
    # As FSDP2 does it: the backend averages.
    _reduce_scatter(shard, full, op=distributed.ReduceOp.AVG, group=_members(group))


def as_rank_error(error: BaseException) -> RankError | None:
    """Return the error of a collective in words; None of any other error."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "socket", "process group")
    is_known = isinstance(error, RuntimeError) and any(word in text for word in words)
    if not (is_known and distributed.is_available() and distributed.is_initialized()):
        return None
    rank = distributed.get_rank()
    return RankError(
        f"a collective of the step failed on rank {rank}: {error}; another rank may have ended: "
        "start all ranks again from the last checkpoint",
        rank=rank,
    )


def _gather(place: torch.Tensor, tensor: torch.Tensor, num_ranks: int, group: str) -> None:
    _all_gather(place, tensor, group=_members(group))


def _scatter(
    place: torch.Tensor, tensor: torch.Tensor, operation: str, num_ranks: int, group: str
) -> None:
    _reduce_scatter(place, tensor, op=_operation(operation), group=_members(group))


def _reduce(place: torch.Tensor, tensor: torch.Tensor, operation: str, group: str) -> None:
    place.copy_(tensor)
    distributed.all_reduce(place, op=_operation(operation), group=_members(group))


def _trade(
    place: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], group: str
) -> None:
    distributed.all_to_all_single(place, tensor, received, sent, group=_members(group))


def _wait(tensor: torch.Tensor) -> None:
    """Do nothing: collectives that write to a given place have ended when they return."""


def _operation(name: str) -> Any:
    return getattr(distributed.ReduceOp, name.upper())


def _members(group: str) -> distributed.ProcessGroup:
    return distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore


def _newest(*names: str) -> Callable[..., Any]:
    """Return the first function of these names, of which torch 2.13 has others than 2.11."""
    return getattr(distributed, next(name for name in names if hasattr(distributed, name)))


if distributed.is_available():
    _all_gather = _newest("all_gather_single", "all_gather_into_tensor")
    _reduce_scatter = _newest("reduce_scatter_single", "reduce_scatter_tensor")

TO_PLACES: dict[str, Callable[..., None]] = {
    "_c10d_functional.all_gather_into_tensor.default": _gather,
    "_c10d_functional.reduce_scatter_tensor.default": _scatter,
    "_c10d_functional.all_reduce.default": _reduce,
    "_c10d_functional.all_to_all_single.default": _trade,
    "_c10d_functional.wait_tensor.default": _wait,
}
"""torch's functional collectives, with the place of the result before the arguments."""
