"""Neighbour sampling over a graph that may be larger than the device, or than memory.

The graph is two tables in CSR form: the start of each node's list of neighbours, and the
neighbours. A batch reads the rows that it needs from both, so the same code samples from memory,
from a file and for a GPU.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch

from penstock.traversal._graph import CSRGraph
from penstock.traversal._lists import check_seeds, read_entries
from penstock.unified import UnifiedTensor, unify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighborhood:
    """The nodes around a batch of seeds, and the edges that were sampled between them."""

    node_ids: torch.Tensor
    """Ids in the whole graph, int64 of shape (num_nodes,), the seeds first, then hop by hop."""
    edge_index: torch.Tensor
    """Positions in `node_ids`, int64 of shape (2, num_edges), of each edge's neighbour (row 0) and
    of the node that has this neighbour (row 1). The edges of the first hop come first."""
    edge_ids: torch.Tensor
    """Ids of the edges in the whole graph, int64 of shape (num_edges,), their places in its list of
    neighbours, where they have no other ids."""
    num_nodes: tuple[int, ...]
    """Nodes up to each hop, the seeds being hop 0."""
    num_edges: tuple[int, ...]
    """Edges up to each hop, none of them at hop 0."""


class NeighborSampler:
    """A sampler of some neighbours of each node, uniformly, hop after hop.

    A node that is found again is in the neighbourhood once; its neighbours are sampled once, at the
    hop that found it first. The same seeds and generator give the same neighbourhood.

    Example:
        >>> sampler = NeighborSampler([0, 2, 3, 3], [1, 2, 0], fanouts=[2, 2])
        >>> sampler.sample(torch.tensor([0])).node_ids.tolist()
        [0, 1, 2]

    Args:
        starts: Integers of shape (num_nodes + 1,), int32 or int64: a table, a tensor, or another
            source of `penstock.unify`, such as the path of a file. The neighbours of node n are
            `neighbors[starts[n]:starts[n + 1]]` (CSR).
        neighbors: Integers of shape (num_edges,), given in the same ways.
        fanouts: Neighbours per node at each hop; -1 takes all of them.
        replace: Whether a neighbour may be taken more than once. A node that has any neighbour then
            gives as many as the fanout says.
        edge_ids: Integers of shape (num_edges,), given in the same ways: ids of the edges, where
            those are not their places in `neighbors`.

    Raises:
        TypeError: the graph does not consist of int32 or int64 of one dimension.
        ValueError: the parts of the graph do not fit together, or `fanouts` makes no sense.
    """

    def __init__(
        self,
        starts: Any,
        neighbors: Any,
        *,
        fanouts: Sequence[int],
        replace: bool = False,
        edge_ids: Any = None,
    ) -> None:
        self._starts = _make_table(starts, "starts")
        self._neighbors = _make_table(neighbors, "neighbors")
        self._edge_ids = None if edge_ids is None else _make_table(edge_ids, "edge_ids")
        self._fanouts, self._replace = _parse_fanouts(fanouts), replace
        if len(self._starts) == 0:
            raise ValueError("starts: expected shape (num_nodes + 1,), got no element")
        first, last = self._starts[torch.tensor([0, -1], device="cpu")].tolist()
        if first != 0 or last != len(self._neighbors):
            raise ValueError(
                f"starts: expected to begin with 0 and to end with the number of neighbors, "
                f"{len(self._neighbors)}; got {first} and {last}"
            )
        if self._edge_ids is not None and len(self._edge_ids) != len(self._neighbors):
            raise ValueError(
                f"edge_ids: expected one for each of {len(self._neighbors)} neighbors, got "
                f"{len(self._edge_ids)}"
            )

    @classmethod
    def from_edges(
        cls,
        edge_index: torch.Tensor,
        num_nodes: int,
        *,
        fanouts: Sequence[int],
        replace: bool = False,
    ) -> NeighborSampler:
        """Return a sampler of a graph that is given as pairs of nodes, as in PyTorch Geometric.

        Example:
            >>> edges = torch.tensor([[1, 2, 0], [0, 0, 1]])  # 1 -> 0, 2 -> 0, 0 -> 1
            >>> sampler = NeighborSampler.from_edges(edges, 3, fanouts=[-1])
            >>> sampler.sample(torch.tensor([0])).node_ids.tolist()
            [0, 1, 2]

        Args:
            edge_index: Integers of shape (2, num_edges); column e is an edge from node
                `edge_index[0, e]` to node `edge_index[1, e]`. The neighbours of a node are those
                from which an edge leads to it, and `e` is the id of the edge.
            num_nodes: Nodes of the graph.
            fanouts: Neighbours per node at each hop; -1 takes all of them.
            replace: Whether a neighbour may be taken more than once.

        Raises:
            TypeError: `edge_index` does not hold integers.
            ValueError: `edge_index` has another shape, or a node that the graph does not have.
        """
        graph = CSRGraph.from_edges(edge_index, num_nodes, edge_ids=True)
        return cls.from_graph(graph, fanouts=fanouts, replace=replace)

    @classmethod
    def from_graph(
        cls, graph: CSRGraph, *, fanouts: Sequence[int], replace: bool = False
    ) -> NeighborSampler:
        """Return a sampler of a graph, whose tables are shared and whose tensors are copied.

        Args:
            graph: The graph.
            fanouts: Neighbours per node at each hop; -1 takes all of them.
            replace: Whether a neighbour may be taken more than once.

        Raises:
            TypeError: `graph` is no `CSRGraph`.
            ValueError: `fanouts` makes no sense.
        """
        if not isinstance(graph, CSRGraph):
            raise TypeError(f"graph: expected a CSRGraph, got {type(graph).__name__}")
        return cls(
            graph.indptr,
            graph.indices,
            fanouts=fanouts,
            replace=replace,
            edge_ids=graph.edge_ids,
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return len(self._starts) - 1

    @property
    def num_edges(self) -> int:
        """Edges of the whole graph."""
        return len(self._neighbors)

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours per node at each hop; -1 stands for all of them."""
        return self._fanouts

    def sample(
        self, seeds: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> Neighborhood:
        """Sample the neighbourhood of some nodes.

        Args:
            seeds: Integers of shape (n,), on whose device the neighbourhood is computed. One that
                is given several times is in it as often, each time with neighbours of its own;
                where it is a neighbour itself, its first place stands for it.
            generator: Generator of the random numbers, on the device of `seeds`; by default
                PyTorch's.

        Raises:
            IndexError: A seed is no node of the graph.
            TypeError: `seeds` does not hold integers.
            ValueError: `seeds` has another shape, or the graph is damaged.
        """
        seeds = check_seeds(seeds, self.num_nodes)
        node_ids = frontier = seeds
        begin = 0  # of the frontier in `node_ids`
        edges, edge_ids, num_nodes, num_edges = [], [], [len(seeds)], [0]
        for fanout in self._fanouts:
            starts, degrees = self._read_lists(frontier)
            owners, places = _choose(degrees, fanout, self._replace, generator)
            places += starts[owners]
            found = self._read_neighbors(places)
            edge_ids.append(
                places if self._edge_ids is None else read_entries(self._edge_ids, places)
            )
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

    def _read_lists(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the start of the list of some nodes' neighbours, and its length."""
        both = read_entries(self._starts, torch.stack([nodes, nodes + 1]))
        starts, degrees = both[0], both[1] - both[0]
        if len(degrees) and int(degrees.min()) < 0:
            node = int(nodes[degrees.argmin()])
            raise ValueError(f"starts falls from node {node} to node {node + 1}; it must not")
        return starts, degrees

    def _read_neighbors(self, places: torch.Tensor) -> torch.Tensor:
        """Return the neighbours at some places of the list; raise for one that is no node."""
        found = read_entries(self._neighbors, places)
        wrong = ((found < 0) | (found >= self.num_nodes)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"neighbors[{int(places[at])}] is {int(found[at])}, but the graph has "
                f"{self.num_nodes} nodes"
            )
        return found


def _parse_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    try:
        numbers = tuple(operator.index(each) for each in fanouts)
    except TypeError:
        numbers = ()
    if not numbers or any(each < -1 or each == 0 for each in numbers):
        raise ValueError(
            f"fanouts={fanouts!r}: expected numbers above zero, or -1 for all, such as [10, 5]"
        )
    return numbers


def _make_table(source: Any, name: str) -> UnifiedTensor:
    if isinstance(source, Sequence) and not isinstance(source, str):
        source = torch.tensor(source, dtype=torch.int64, device="cpu")
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
    """Return, for each chosen edge, its node's position in `degrees` and its place in the list."""
    if fanout == -1:
        return _take_all(torch.arange(len(degrees), device=degrees.device), degrees)
    if replace:
        owners = (degrees > 0).nonzero().flatten()
        places = _draw_below(degrees[owners, None].expand(-1, fanout), generator)
        return owners.repeat_interleave(fanout), places.flatten()
    few, many = (degrees <= fanout).nonzero().flatten(), (degrees > fanout).nonzero().flatten()
    owners, places = _take_all(few, degrees[few])
    chosen = _draw_unique(degrees[many], fanout, generator)
    owners = torch.cat([owners, many.repeat_interleave(fanout)])
    places = torch.cat([places, chosen.flatten()])
    order = torch.argsort(owners, stable=True)  # the edges of a node side by side
    return owners[order], places[order]


def _take_all(owners: torch.Tensor, degrees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every neighbour of each owner."""
    ends = degrees.cumsum(0)
    begins = (ends - degrees).repeat_interleave(degrees)
    places = torch.arange(len(begins), device=degrees.device) - begins
    return owners.repeat_interleave(degrees), places


def _draw_unique(
    degrees: torch.Tensor, count: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw `count` different numbers below each degree, every subset equally likely.

    Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), for all rows at once: the i-th draw is
    below degree - count + i + 1, and gives that bound's largest number if it was drawn before.
    """
    chosen = degrees.new_empty(len(degrees), count)
    for i in range(count if len(degrees) else 0):
        largest = degrees - count + i
        drawn = _draw_below(largest + 1, generator)
        taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(taken, largest, drawn)
    return chosen


def _draw_below(bounds: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw uniform integers from 0 to each bound, which is excluded."""
    drawn = torch.rand(bounds.shape, dtype=torch.float64, device=bounds.device, generator=generator)
    return (drawn * bounds).long().minimum(bounds - 1)


def _append_new(known: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `known` followed by the new values of `found`, and the place of each of `found` there.

    Duplicates in `known` stay; the first place stands for them.
    """
    everything = torch.cat([known, found])
    values, inverse = torch.unique(everything, return_inverse=True)
    positions = torch.arange(len(everything), device=known.device)
    first = torch.full_like(values, len(everything))
    first.scatter_reduce_(0, inverse, positions, "amin")
    new = first[first >= len(known)].sort().values  # where each new value comes first
    place = positions  # in the result, by the place in `everything`
    place[new] = len(known) + torch.arange(len(new), device=known.device)
    return torch.cat([known, everything[new]]), place[first[inverse[len(known) :]]]
