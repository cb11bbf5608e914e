"""Nodes within some hops of seeds, hop by hop: the bytes of a buffer are known before it is made.

A hop reads the lists of the frontier F, the nodes that the hop before has found. The sum of their
lengths is known first, from the offsets alone; it bounds the nodes that the hop can find, and with
them the memory for numbers ("just enough" memory: Pan, Wang, Wu, Yang and Owens, "Multi-GPU Graph
Analytics", IPDPS 2017, section VI-B):

    found <= min(sum_{v in F} degree(v), num_nodes - known)

With lists of the other direction a hop may pull instead: each node without a number looks for a
neighbour that has one, and stops at the first. A share of known / num_nodes has, so that this looks
at about unknown * num_nodes / known entries (section V-B there; Beamer, Asanovic and Patterson,
"Direction-optimizing breadth-first search", SC 2012).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.traversal import _native
from penstock.traversal._blocks import (
    BLOCK_BYTES,
    BLOCK_ENTRIES,
    NeighborLists,
    read_blocks,
    whole_lists,
)
from penstock.traversal._budget import SearchBudget
from penstock.traversal._graph import CSRGraph
from penstock.traversal._torch import TorchNumbers


class ListReader:
    """Lists of a graph, at once where C++ reads them in memory, else in blocks.

    Args:
        graph: The graph.
        device: Device of the search.
        budget: The account of the search.
    """

    def __init__(self, graph: CSRGraph, device: torch.device, budget: SearchBudget) -> None:
        self.graph, self._budget = graph, budget
        self.is_native = (
            device.type == "cpu"
            and graph.num_nodes <= _native.MOST_NODES
            and _native.is_available()
        )

    @property
    def is_whole(self) -> bool:
        """True if all lists are read where they stand."""
        return self.is_native and whole_lists(self.graph, None) is not None

    def sum_lengths(self, nodes: Tensor) -> int:
        """Return the entries of the lists of some nodes."""
        lists = whole_lists(self.graph, nodes) if self.is_native else None
        if lists is not None:
            return _native.sum_lengths(lists)
        with self._budget.temporary(BLOCK_BYTES):
            parts = nodes.split(BLOCK_ENTRIES)
            return sum(int(self.graph.read_lists(part)[1].sum()) for part in parts if len(part))

    def read(self, nodes: Tensor) -> Iterator[NeighborLists]:
        """Return the lists of some nodes, in their order."""
        lists = whole_lists(self.graph, nodes) if self.is_native else None
        if lists is not None:
            yield lists
            return
        with self._budget.temporary(BLOCK_BYTES):
            yield from read_blocks(self.graph, nodes)


@dataclasses.dataclass(eq=False)
class NodeSearch:
    """A search for the nodes within some hops of seeds; `run` makes all hops."""

    graph: CSRGraph
    seeds: Tensor
    hops: int
    reverse: CSRGraph | None
    budget: SearchBudget

    def __post_init__(self) -> None:
        device = self.seeds.device
        self.reader = ListReader(self.graph, device, self.budget)
        self.numbers: _native.NativeNumbers | TorchNumbers = (
            _native.NativeNumbers(self.graph.num_nodes, self.budget)
            if self.reader.is_native
            else TorchNumbers(self.graph.num_nodes, self.budget, device)
        )
        self.num_nodes: list[int] = []
        """Nodes up to each hop."""
        self.frontier_edges: list[int] = []
        """Entries of the lists of each hop's frontier."""
        self.touched_edges: list[int] = []
        """Entries that each hop looked at."""
        self.pulled: list[bool] = []
        """For each hop, True if it pulled."""
        self.nodes = self.positions = self.seeds[:0]

    def run(self, *, edge_bytes: int = 0) -> None:
        """Find the nodes: `nodes` are they, and `positions` those of the seeds among them.

        Args:
            edge_bytes: Bytes that each edge of the closure will need. All edges of a frontier are
                among them, so that a budget can be found to be too low before the next hop.
        """
        self._number_seeds()
        begin = num_edges = 0
        for hop in range(self.hops):
            if begin == len(self.nodes):
                self._end_search(self.hops - hop)
                return
            frontier, begin = self.nodes[begin:], len(self.nodes)
            total = self.reader.sum_lengths(frontier)
            num_edges += total
            self.frontier_edges.append(total)
            self.budget.check(edge_bytes * num_edges)
            if total:
                self._make_hop(frontier, total)
            else:
                self.touched_edges.append(0)
                self.pulled.append(False)
            self.num_nodes.append(len(self.nodes))

    def _end_search(self, num_hops: int) -> None:
        """Count hops that find nothing, as the one before them has not."""
        self.frontier_edges += [0] * num_hops
        self.touched_edges += [0] * num_hops
        self.pulled += [False] * num_hops
        self.num_nodes += [len(self.nodes)] * num_hops

    @property
    def block_bytes(self) -> int:
        """Bytes that are held while blocks of lists are written."""
        return BLOCK_BYTES + self.numbers.count_bytes(BLOCK_ENTRIES)

    @property
    def num_inner(self) -> int:
        """Nodes whose neighbours are all in the closure: those up to the last hop but one."""
        return self.num_nodes[-2] if self.hops else 0

    def _number_seeds(self) -> None:
        count = len(self.seeds)
        self.positions = self._empty(count)
        self.numbers.reserve(min(count, self.graph.num_nodes), self.nodes)
        found = self.numbers.number(self.seeds, self.positions)
        self.nodes = self._empty(found)
        self.nodes.scatter_(0, self.positions, self.seeds)
        self.num_nodes.append(found)

    def _make_hop(self, frontier: Tensor, total: int) -> None:
        known, unknown = len(self.nodes), self.graph.num_nodes - len(self.nodes)
        self.numbers.reserve(known + min(total, unknown), self.nodes)
        pulls = self._pays_to_pull(total)
        self.pulled.append(pulls)
        self.touched_edges.append(self._pull() if pulls else total)
        if not pulls:
            self._push(frontier)
        found = self.numbers.count_found()
        grown = self._empty(known + found)
        grown[:known].copy_(self.nodes)
        self.budget.release(self.nodes)
        self.nodes = grown
        self.numbers.number_found(known, grown[known:])

    def _pays_to_pull(self, total: int) -> bool:
        if self.reverse is None or not self.numbers.can_pull():
            return False
        known, num_nodes = len(self.nodes), self.graph.num_nodes
        # Each node without a number looks at 1 / (known / num_nodes) entries on average.
        return total > (num_nodes - known) * num_nodes / known

    def _pull(self) -> int:
        assert self.reverse is not None, "the search pulls with it only"
        lists = whole_lists(self.reverse, None)
        assert lists is not None, "it was compared when it was given"
        try:
            return self.numbers.pull(lists)
        except _native.DamagedList as error:
            raise self.reverse.damage(error.place) from None

    def _push(self, frontier: Tensor) -> None:
        try:
            for lists in self.reader.read(frontier):
                self.numbers.mark(lists)
        except _native.DamagedList as error:
            raise self.graph.damage(error.place) from None

    def _empty(self, count: int) -> Tensor:
        return self.budget.empty(count, dtype=torch.int64, device=self.seeds.device)


def count_edges(search: NodeSearch) -> tuple[int, Tensor | None]:
    """Return the edges among the nodes of a search, and in memory their counts for each block.

    All entries of the inner nodes' lists are in the closure; only the lists of the last hop are
    read.
    """
    reader, numbers, inner = search.reader, search.numbers, search.num_inner
    if reader.is_whole:
        counts = numbers.make_counts(len(search.nodes))
        try:
            (lists,) = reader.read(search.nodes)
            return numbers.count_edges(lists, inner, counts), counts
        except _native.DamagedList as error:
            raise search.graph.damage(error.place) from None
    total = sum(search.frontier_edges)
    counts = numbers.make_counts(BLOCK_ENTRIES)
    for lists in reader.read(search.nodes[inner:]):
        total += numbers.count_edges(lists, 0, counts)
    search.budget.release(counts)
    return total, None


def write_edges(
    search: NodeSearch,
    counts: Tensor | None,
    neighbors: Tensor,
    owners: Tensor,
    places: Tensor | None,
) -> None:
    """Write the edges among the nodes of a search, and their places in the graph.

    Args:
        search: The search, whose edges were counted.
        counts: As `count_edges` has returned them.
        neighbors: int64 of shape (num_edges,): positions of neighbours.
        owners: int64 of shape (num_edges,): positions of the nodes that have these neighbours.
        places: int64 of shape (num_edges,), or None.
    """
    reader, numbers = search.reader, search.numbers
    if counts is not None:
        (lists,) = reader.read(search.nodes)
        numbers.write_edges(lists, counts, neighbors, owners, places)
        return
    begin, counts = 0, numbers.make_counts(BLOCK_ENTRIES)
    for lists in reader.read(search.nodes):
        end = begin + numbers.count_edges(lists, 0, counts)
        if end > len(neighbors):
            break
        part = None if places is None else places[begin:end]
        numbers.write_edges(lists, counts, neighbors[begin:end], owners[begin:end], part)
        begin = end
    search.budget.release(counts)
    if begin != len(neighbors):
        raise ValueError("indptr or indices: were changed while they were read")
