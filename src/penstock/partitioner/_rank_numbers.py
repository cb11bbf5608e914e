"""Numbers of the ranks before a step is distributed: those of rank 0 count.

Tensors of planned bytes are broadcast one by one. Beside them a rank has step counts, state that it
has not made yet, and the numbers of the optimizer's groups, all of which ranks tell each other at
once: so they all know which broadcasts follow, and all refuse the same differences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed

from penstock.errors import GraphFileError
from penstock.graph.bindings import StateEntry, find_initial_fill
from penstock.graph.fsdp.shards import local_of
from penstock.graph.step_graph import StepGraph

_NUMBERS = (bool, int, float, str, type(None))


class RankNumbers(NamedTuple):
    """Numbers of one rank.

    Attributes:
        counts: Tensors of no planned bytes, by their names in the step.
        fills: The numbers that fill state which does not exist yet, by its names.
        groups: Numbers of the optimizer's groups, and tensors of such.
        constants: Numbers of the groups that the graph holds as constants, by name.
    """

    counts: dict[str, torch.Tensor]
    fills: dict[str, float]
    groups: list[dict[str, Any]]
    constants: dict[str, Any]


def share_numbers(
    graph: StepGraph, entries: list[StateEntry], optimizer: torch.optim.Optimizer
) -> RankNumbers:
    """Return the numbers of rank 0, and put those of its groups into this rank's optimizer.

    Raises:
        GraphFileError: Ranks have captured their steps with other constants; all of them raise it.
    """
    mine = _find_numbers(graph, entries, optimizer)
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, mine)
    first: RankNumbers = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        _compare_constants(first.constants, other.constants, rank)
    for group, given in zip(optimizer.param_groups, first.groups, strict=True):
        for key, value in given.items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                own.copy_(value)
            else:
                group[key] = value
    return first


def _find_numbers(
    graph: StepGraph, entries: list[StateEntry], optimizer: torch.optim.Optimizer
) -> RankNumbers:
    counts, fills = {}, {}
    for entry in entries:
        tensor = local_of(entry.get_whole())
        if tensor is None:
            fills[entry.name] = find_initial_fill(graph, entry.name)
        elif not graph.num_bytes(graph.tensors[entry.name].value):
            counts[entry.name] = tensor.detach().cpu()
    groups = [
        {
            key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and _holds_numbers(value)
        }
        for group in optimizer.param_groups
    ]
    return RankNumbers(counts, fills, groups, graph.metadata.get("hyper_parameters", {}))


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_holds_numbers, value))
    return isinstance(value, _NUMBERS) or type(value) is torch.Tensor


def _compare_constants(first: dict[str, Any], other: dict[str, Any], rank: int) -> None:
    for name in sorted(first.keys() | other.keys()):
        if first.get(name) != other.get(name):
            raise GraphFileError(
                f"{name} was {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank} "
                "when they captured their steps, of which it is a part: set it alike on all ranks "
                "before the step is captured"
            )
