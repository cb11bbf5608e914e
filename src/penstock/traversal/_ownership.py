"""Owners of nodes: which rank has the list of a node, by a formula or a small table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.traversal._blocks import read_nodes
from penstock.traversal._exchange import Exchange
from penstock.traversal._graph import CSRGraph, open_uncached
from penstock.traversal._lists import INTEGERS, in_memory, narrow, read_entries
from penstock.unified import unify

Split = Literal["random", "contiguous", "cluster"]
SPLITS = ("random", "contiguous", "cluster")
MOST_RANKS = 2**15 - 1
_BLOCK_NODES = 2**16
_CLUSTER_NODES = 512  # that are placed at once
_LEAST_BLOCKS = 16  # for each rank
_NUM_PASSES = 3
_SLACK = 1.02  # of a rank's share
_NUM_COMPARED = 512  # entries of each list that ranks compare


class Ownership:
    """Owners of all nodes of a graph.

    "random" is a hash of a node's number, "contiguous" a range of numbers; neither takes memory. A
    table takes one or two bytes for each node, on every rank.

    Args:
        split: "random", "contiguous", or a table of owners of shape (num_nodes,).
        num_nodes: Nodes of the graph.
        num_ranks: Ranks.
        seed: Seed of the hash.
    """

    def __init__(self, split: str | Tensor, num_nodes: int, num_ranks: int, seed: int) -> None:
        self.split, self.num_nodes, self.num_ranks, self.seed = split, num_nodes, num_ranks, seed

    def owner_of(self, nodes: Tensor) -> Tensor:
        """Return the rank of each node, as int64."""
        if isinstance(self.split, Tensor):
            return self.split[nodes].long()
        if self.split == "contiguous":
            return nodes * self.num_ranks // max(self.num_nodes, 1)
        return _hash(nodes, self.seed) % self.num_ranks

    def nodes_of(self, rank: int) -> Tensor:
        """Return the nodes of a rank in rising order, as int32 where their number allows it."""
        found = [
            narrow(block[self.owner_of(block) == rank], self.num_nodes) for block in self._blocks()
        ]
        return (
            torch.cat(found)
            if found
            else narrow(torch.empty(0, dtype=torch.int64, device="cpu"), self.num_nodes)
        )

    def checksum(self) -> int:
        """Return a number that differs for different tables; zero where there is none."""
        table = self.split
        if not isinstance(table, Tensor):
            return 0
        return sum(int((table[block] * (block % 8191 + 1)).sum()) for block in self._blocks())

    def _blocks(self) -> Iterator[Tensor]:
        for begin in range(0, self.num_nodes, _BLOCK_NODES):
            yield torch.arange(begin, min(begin + _BLOCK_NODES, self.num_nodes), device="cpu")

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return self.split.nbytes if isinstance(self.split, Tensor) else 0


def find_ownership(graph: CSRGraph, split: Any, exchange: Exchange, seed: int) -> Ownership:
    """Return the owners for an argument `split` of `RankGraph`; clusters are found by one rank.

    Raises:
        TypeError: `split` is neither a name nor a tensor of integers.
        ValueError: It is another name, or a table that does not fit the graph or the ranks.
    """
    num_nodes, num_ranks = graph.num_nodes, exchange.num_ranks
    if isinstance(split, Tensor):
        return Ownership(_check_table(split, num_nodes, num_ranks), num_nodes, num_ranks, 0)
    if not isinstance(split, str):
        raise TypeError(f"split: expected a name or a tensor of owners, got {type(split).__name__}")
    if split not in SPLITS:
        raise ValueError(
            f"split={split!r}: expected one of {', '.join(map(repr, SPLITS))}, or a tensor of "
            "owners"
        )
    if split != "cluster":
        return Ownership(split, num_nodes, num_ranks, seed)
    table = torch.zeros(num_nodes, dtype=_narrowest(num_ranks), device="cpu")
    if exchange.rank == 0:
        table = find_clusters(graph, num_ranks)
    return Ownership(exchange.spread(table, "clusters"), num_nodes, num_ranks, seed)


def _check_table(table: Tensor, num_nodes: int, num_ranks: int) -> Tensor:
    if table.dtype not in INTEGERS:
        raise TypeError(f"split: expected integers, got {table.dtype}")
    if table.shape != (num_nodes,):
        raise ValueError(f"split: expected shape ({num_nodes},), got {tuple(table.shape)}")
    if num_nodes:
        low, high = (int(each) for each in table.aminmax())
        if low < 0 or high >= num_ranks:
            raise ValueError(
                f"split: names rank {low if low < 0 else high}, but there are {num_ranks} ranks"
            )
    return table.to("cpu", _narrowest(num_ranks))


def _narrowest(num_ranks: int) -> torch.dtype:
    return torch.int8 if num_ranks <= 127 else torch.int16


def _hash(nodes: Tensor, seed: int) -> Tensor:
    """Return numbers from 0 to 2^62 - 1 (SplitMix64's finaliser; Steele et al., OOPSLA 2014)."""
    mixed = nodes + (seed * 2654435769 + 2654435769) % 2**31
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))) & (2**62 - 1)


def find_clusters(graph: CSRGraph, num_ranks: int) -> Tensor:
    """Return owners that keep neighbours together, of shape (num_nodes,).

    Nodes come in their order, a few hundred at a time, and go where most of their neighbours are,
    less where there is little room (linear deterministic greedy; Stanton and Kliot, KDD 2012), the
    weight of a node being its entries and itself:

        argmax_r  |N(v) and V_r| (1 - W_r / C)

    Several passes follow each other, which see where the one before has put the neighbours.
    """
    dtype = _narrowest(num_ranks)
    owners = torch.full((graph.num_nodes,), num_ranks, dtype=dtype, device="cpu")  # nowhere yet
    if num_ranks == 1 or not graph.num_nodes:
        return owners.zero_()
    capacity = _SLACK * (graph.num_nodes + graph.num_edges) / num_ranks
    loads = torch.zeros(num_ranks + 1, dtype=torch.float64, device="cpu")
    graph = open_uncached(graph)  # a copy in memory would be that of a whole file, on one rank
    for _ in range(_NUM_PASSES):
        for nodes, degrees, neighbors in _read_blocks(graph, num_ranks):
            before = owners[nodes].long()
            weights = degrees.double() + 1
            loads.index_add_(0, before, -weights)
            row = torch.arange(len(nodes), device="cpu").repeat_interleave(degrees)
            cells = row * (num_ranks + 1) + owners.index_select(0, neighbors)
            counts = torch.bincount(cells, minlength=len(nodes) * (num_ranks + 1))
            near = counts.view(len(nodes), -1)[:, :num_ranks]
            chosen = _place(near, weights, loads[:num_ranks], capacity)
            owners[nodes] = chosen.to(dtype)
            loads.index_add_(0, chosen, weights)
    return owners


def _place(near: Tensor, weights: Tensor, loads: Tensor, capacity: float) -> Tensor:
    """Return a rank for each node of a block, none of which gets more than its capacity.

    Args:
        near: Neighbours of each node on each rank, of shape (num_nodes, num_ranks).
        weights: Weights of the nodes.
        loads: Weights that the ranks have.
        capacity: Weight that a rank may have.
    """
    room = (1 - loads / capacity).clamp(min=0)
    score = near * room + 1e-9 * room  # without neighbours: where there is most room
    chosen, loads = score.argmax(1), loads.clone()
    is_over = torch.zeros(len(chosen), dtype=torch.bool, device="cpu")
    for rank in range(len(loads)):
        mine = (chosen == rank).nonzero().flatten()
        fits = loads[rank] + weights[mine].cumsum(0) <= capacity
        is_over[mine[~fits]] = True
        loads[rank] += weights[mine[fits]].sum()
    # What has no room goes, in its order, where there is some: the most of it first.
    order = loads.argsort()
    ends = (capacity - loads[order]).clamp(min=0).cumsum(0)
    places = torch.searchsorted(ends, weights[is_over].cumsum(0)).clamp(max=len(loads) - 1)
    chosen[is_over] = order[places]
    return chosen


def _read_blocks(graph: CSRGraph, num_ranks: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield nodes, the lengths of their lists, and the entries of these."""
    count = max(min(_CLUSTER_NODES, graph.num_nodes // (_LEAST_BLOCKS * num_ranks)), 1)
    for begin in range(0, graph.num_nodes, count):
        nodes = torch.arange(begin, min(begin + count, graph.num_nodes), device="cpu")
        starts, degrees = graph.read_lists(nodes)
        places = torch.arange(int(starts[0]), int(starts[-1] + degrees[-1]), device="cpu")
        yield nodes, degrees, read_nodes(graph, places)


def compare_ranks(graph: CSRGraph, exchange: Exchange, owners: Ownership) -> None:
    """Raise on all ranks if they were given different graphs or splits.

    Of the lists some entries are compared, evenly spread: the files are not read through.
    """
    kind = owners.split if isinstance(owners.split, str) else "table"
    own = [
        graph.num_nodes,
        graph.num_edges,
        int(graph.flow == "source_to_target"),
        ("random", "contiguous", "table").index(kind),
        owners.seed,
        owners.checksum(),
        *(_sample_list(each) for each in (graph.indptr, graph.indices)),
    ]
    if not exchange.agree(*own):
        raise ValueError(
            f"graph: ranks were given different graphs, splits or seeds; rank {exchange.rank} has "
            f"{graph}, split {kind!r} and seed {owners.seed}"
        )


def _sample_list(values: Tensor) -> list[int]:
    """Return some entries of a list, evenly spread."""
    if in_memory(values) is None:
        values = unify(values, cache=0)  # these reads say nothing of those of batches
    num_entries = min(len(values), _NUM_COMPARED)
    places = torch.arange(num_entries, device="cpu") * len(values) // max(num_entries, 1)
    return read_entries(values, places).tolist()
