"""Neighbour sampling over a graph that may be larger than the device, or than memory.

The graph is two tables: where each node's neighbours begin, and the neighbours. A batch reads the
rows that it needs from both, so the same code samples from memory, from a file and for a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from penstock.unified._tensor import UnifiedTensor
from penstock.unified._unify import unify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighborhood:
    """The nodes around a batch of seeds, and the edges that were sampled between them."""

    node_ids: torch.Tensor
    """Ids in the whole graph, int64 of shape (num_nodes,): the seeds first, then hop by hop."""
    edge_index: torch.Tensor
    """int64 of shape (2, num_edges): positions in `node_ids` of each edge's neighbour (row 0) and
    of the node whose neighbour it is (row 1). The edges of the first hop come first."""
    edge_ids: torch.Tensor
    """Places of the edges in the graph's list of neighbours, int64 of shape (num_edges,)."""
    num_nodes: tuple[int, ...]
    """Nodes up to each hop, the seeds being hop 0."""
    num_edges: tuple[int, ...]
    """Edges up to each hop, none of them at hop 0."""


class NeighborSampler:
    """Samples, for each node, some of its neighbours, uniformly, hop after hop.

    Example:
        >>> sampler = NeighborSampler([0, 2, 3, 3], [1, 2, 0], fanouts=[2, 2])
        >>> sampler.sample(torch.tensor([0])).node_ids.tolist()
        [0, 1, 2]

    Args:
        starts: a table or tensor of integers of shape (num_nodes + 1,); the neighbours of node n
            are `neighbors[starts[n]:starts[n + 1]]` (CSR).
        neighbors: a table or tensor of integers of shape (num_edges,).
        fanouts: neighbours per node at each hop; -1 takes all of them.
        replace: whether a neighbour may be taken more than once (as often as it comes up).
    """

    def __init__(
        self, starts: Any, neighbors: Any, *, fanouts: Sequence[int], replace: bool = False
    ) -> None:
        self._starts, self._neighbors = (
            _as_table(starts, "starts"),
            _as_table(neighbors, "neighbors"),
        )
        if not fanouts or any(fanout < -1 or fanout == 0 for fanout in fanouts):
            raise ValueError(f"fanouts={list(fanouts)}: expected numbers above zero, or -1 for all")
        if len(self._starts) == 0:
            raise ValueError("starts: expected shape (num_nodes + 1,), got no element")
        last = int(self._starts[torch.tensor([-1])])
        if last != len(self._neighbors):
            raise ValueError(
                f"starts ends with {last}, but there are {len(self._neighbors)} neighbors"
            )
        self._fanouts = tuple(fanouts)
        self._replace = replace

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return len(self._starts) - 1

    def sample(
        self, seeds: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> Neighborhood:
        """The neighbourhood of some nodes.

        Args:
            seeds: integers of shape (n,), none of them twice.
            generator: of the random numbers; by default PyTorch's.

        Raises:
            IndexError: a seed is no node of the graph.
            ValueError: a seed is given twice.
        """
        seeds = seeds.long()
        if len(torch.unique(seeds)) != len(seeds):
            raise ValueError("seeds: expected every node at most once")
        wrong = ((seeds < 0) | (seeds >= self.num_nodes)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise IndexError(
                f"seeds[{at}] is {int(seeds[at])}, but the graph has {self.num_nodes} nodes"
            )
        node_ids = frontier = seeds
        begin = 0  # of the frontier in `node_ids`
        edges, edge_ids, num_nodes, num_edges = [], [], [len(seeds)], [0]
        for fanout in self._fanouts:
            starts = self._starts.gather_rows(frontier).long()
            degrees = self._starts.gather_rows(frontier + 1).long() - starts
            owners, places = _choose(degrees, fanout, self._replace, generator)
            edge_ids.append(starts[owners] + places)
            found = self._neighbors.gather_rows(edge_ids[-1]).long()
            node_ids, local = _append_new(node_ids, found)
            edges.append(torch.stack([local, owners + begin]))
            begin = num_nodes[-1]
            frontier = node_ids[begin:]
            num_nodes.append(len(node_ids))
            num_edges.append(num_edges[-1] + len(owners))
        return Neighborhood(
            node_ids=node_ids,
            edge_index=torch.cat(edges, dim=1),
            edge_ids=torch.cat(edge_ids),
            num_nodes=tuple(num_nodes),
            num_edges=tuple(num_edges),
        )


def _as_table(source: Any, name: str) -> UnifiedTensor:
    if isinstance(source, Sequence) and not isinstance(source, str):
        source = torch.tensor(source, dtype=torch.int64)
    table = source if isinstance(source, UnifiedTensor) else unify(source)
    if table.dim() != 1 or table.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name}: expected int32 or int64 of one dimension, got {table.dtype} of shape "
            f"{tuple(table.shape)}"
        )
    return table


def _choose(
    degrees: torch.Tensor, fanout: int, replace: bool, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each chosen edge: the position of its node in `degrees`, and which of its neighbours."""
    if fanout == -1:
        return _all_of(torch.arange(len(degrees), device=degrees.device), degrees)
    if replace:
        owners = (degrees > 0).nonzero().flatten()
        places = _below(degrees[owners, None].expand(-1, fanout), generator)
        return owners.repeat_interleave(fanout), places.flatten()
    few, many = (degrees <= fanout).nonzero().flatten(), (degrees > fanout).nonzero().flatten()
    owners, places = _all_of(few, degrees[few])
    chosen = _distinct(degrees[many], fanout, generator)
    owners = torch.cat([owners, many.repeat_interleave(fanout)])
    places = torch.cat([places, chosen.flatten()])
    order = torch.argsort(owners, stable=True)  # the edges of a node side by side
    return owners[order], places[order]


def _all_of(owners: torch.Tensor, degrees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every neighbour of each owner."""
    ends = degrees.cumsum(0)
    begins = (ends - degrees).repeat_interleave(degrees)
    places = torch.arange(len(begins), device=degrees.device) - begins
    return owners.repeat_interleave(degrees), places


def _distinct(degrees: torch.Tensor, count: int, generator: torch.Generator | None) -> torch.Tensor:
    """`count` different numbers below each degree, every subset equally likely.

    Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), for all rows at once: the i-th draw is
    below degree - count + i + 1, and gives that bound's largest number if it was drawn before.
    """
    chosen = degrees.new_empty(len(degrees), count)
    for i in range(count):
        largest = degrees - count + i
        drawn = _below(largest + 1, generator)
        taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(taken, largest, drawn)
    return chosen


def _below(bounds: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Uniform integers from 0 to each bound, which is excluded."""
    drawn = torch.rand(bounds.shape, dtype=torch.float64, device=bounds.device, generator=generator)
    return (drawn * bounds).long().minimum(bounds - 1)


def _append_new(known: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`known` with what is new in `found` behind it, and where each of `found` is in that."""
    everything = torch.cat([known, found])
    values, inverse = torch.unique(everything, return_inverse=True)
    positions = torch.arange(len(everything), device=known.device)
    first = torch.full_like(values, len(everything))
    first.scatter_reduce_(0, inverse, positions, "amin")
    order = torch.argsort(first)  # of the values, by where they come first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=known.device)
    return values[order], rank[inverse[len(known) :]]
