"""Ranks as threads of one process, whose collectives meet: any mesh, without processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from penstock.graph import StepGraph, reference
from penstock.partitioner import Partition
from penstock.partitioner._layout import cut_tensor
from penstock.partitioner._mesh import PARTIAL, REPLICATED
from penstock.partitioner._rank import RankStep, write_rank
from penstock.partitioner.axes import find_axes


class Meetings:
    """Collectives of the groups of a mesh.

    Args:
        sizes: Ranks of each level.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.ranks = [*itertools.product(*map(range, sizes))]
        self.local = threading.local()
        names = {name for rank in self.ranks for name in self.names(rank)}
        self.barriers = {
            name: threading.Barrier(sizes[int(name.partition(":")[0])]) for name in names
        }
        self.boards: dict[str, dict[int, torch.Tensor]] = {name: {} for name in names}

    def names(self, rank: tuple[int, ...]) -> tuple[str, ...]:
        """The names of a rank's groups."""
        return tuple(f"{level}:{(*rank[:level], *rank[level + 1 :])}" for level in range(len(rank)))

    def exchange(self, name: str, tensor: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """The place of this rank in its group, and what all ranks of it have brought."""
        place = self.local.rank[int(name.partition(":")[0])]
        board, barrier = self.boards[name], self.barriers[name]
        board[place] = tensor.clone()
        barrier.wait(60)
        found = [board[each] for each in range(len(board))]
        barrier.wait(60)
        return place, found

    def resolve(self, target: str, real: Callable[[str], Any]) -> Any:
        """An operator, or its meeting."""
        name = target.split(".")[1]
        if not target.startswith("_c10d_functional."):
            return real(target)
        return getattr(self, name)

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_into_tensor(self, tensor: torch.Tensor, num: int, name: str) -> torch.Tensor:
        return torch.cat(self.exchange(name, tensor)[1])

    def all_reduce(self, tensor: torch.Tensor, operation: str, name: str) -> torch.Tensor:
        return torch.stack(self.exchange(name, tensor)[1]).sum(0)

    def reduce_scatter_tensor(
        self, tensor: torch.Tensor, operation: str, num: int, name: str
    ) -> torch.Tensor:
        place, found = self.exchange(name, tensor)
        return torch.stack(found).sum(0).chunk(num)[place].clone()

    def all_to_all_single(
        self, tensor: torch.Tensor, given: list[int], taken: list[int], name: str
    ) -> torch.Tensor:
        place, found = self.exchange(name, tensor)
        return torch.cat([each.chunk(len(given))[place] for each in found])


def run_ranks(
    graph: StepGraph,
    partition: Partition,
    tensors: dict[str, torch.Tensor],
    numbers: dict[int, float],
) -> tuple[list[RankStep], list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Run a step on all ranks; return their steps, losses, and pieces of what the step changes."""
    meetings, cuts = Meetings(partition.mesh), find_axes(graph).cuts
    steps = [write_rank(graph, partition, rank, meetings.names(rank)) for rank in meetings.ranks]

    def cut(name: str, tensor: torch.Tensor, place: int) -> torch.Tensor:
        storage = graph.storage_of_value[graph.tensors[name].value]
        if not graph.storages[storage].num_bytes:
            return tensor.clone()
        placement = tuple(
            cuts[storage].index(s) if s > 0 else PARTIAL if s else REPLICATED
            for s in partition.placements[storage]
        )
        part = steps[place].graph.tensors[name]
        return cut_tensor(
            tensor,
            graph.tensors[name],
            part,
            cuts[storage],
            placement,
            partition.mesh,
            meetings.ranks[place],
        )

    pieces = [
        {name: cut(name, each, place) for name, each in tensors.items()}
        for place in range(len(steps))
    ]
    losses: list[Any] = [None] * len(steps)

    def work(place: int) -> None:
        meetings.local.rank = meetings.ranks[place]
        own = steps[place].graph
        own_numbers = {
            own.tensors[name].value: numbers[view.value]
            for name, view in graph.tensors.items()
            if view.value in numbers
        }
        losses[place] = reference.ReferenceRun(own, pieces[place], own_numbers).run()

    real = reference.resolve
    with mock.patch.object(reference, "resolve", lambda each: meetings.resolve(each, real)):
        threads = [threading.Thread(target=work, args=(each,)) for each in range(len(steps))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    reference.ReferenceRun(graph, tensors, numbers).run()
    wanted = [
        {name: cut(name, each, place) for name, each in tensors.items()}
        for place in range(len(steps))
    ]
    for own, expected in zip(pieces, wanted, strict=True):
        for name, tensor in expected.items():
            expected[name] = own[name] - tensor
    return steps, losses, wanted
