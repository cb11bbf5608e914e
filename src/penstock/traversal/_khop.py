"""Closures: all nodes within some hops of seeds and all edges among them, under a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.tables import Report
from penstock.traversal._blocks import BLOCK_BYTES, BLOCK_ENTRIES
from penstock.traversal._budget import BudgetExceeded, SearchBudget
from penstock.traversal._collected import collect_lists
from penstock.traversal._graph import CSRGraph
from penstock.traversal._lists import check_seeds, read_entries
from penstock.traversal._rank_graph import RankGraph
from penstock.traversal._reverse import check_reverse
from penstock.traversal._search import NodeSearch, count_edges, write_edges
from penstock.units import format_bytes, parse_bytes, parse_count

NODE_BYTES, EDGE_BYTES, ID_BYTES = 8, 16, 8
"""Bytes of a node or a seed, of an edge, and of an edge's id, in a closure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClosureSize(Report, title="penstock.traversal.count_khop"):
    """The nodes, edges and bytes of a closure that was counted."""

    num_seeds: int
    """Seeds, each as often as it was given."""
    num_nodes: tuple[int, ...]
    """Nodes up to each hop, the seeds being hop 0, each once."""
    num_edges: int
    """Edges among all nodes."""
    frontier_edges: tuple[int, ...]
    """Edges of the nodes that are new at each hop, from the seeds on: what the next hop reads."""
    touched_edges: tuple[int, ...]
    """Entries that each hop looked at; fewer than `frontier_edges` where it pulled."""
    pulled: tuple[bool, ...]
    """For each hop, True if it pulled."""
    predicted_bytes: int
    """Bytes of the closure: its nodes, its edges and the positions of the seeds."""
    peak_bytes: int
    """Bytes of all that `khop` holds at once, the closure included: the least `max_bytes`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Closure:
    """All nodes within some hops of seeds, and all edges among them."""

    nodes: Tensor
    """Ids in the graph, int64 of shape (num_nodes,). The seeds come first, in the order in which
    each was first given, then one hop after the other, those of a hop in rising order."""
    edge_index: Tensor
    """Positions in `nodes` of each edge's source and its target, int64 of shape (2, num_edges).
    The edges of one list of neighbours stand together, in its order, list after list as `nodes`."""
    seed_positions: Tensor
    """Position in `nodes` of each seed that was given, int64 of shape (num_seeds,)."""
    edge_ids: Tensor | None
    """Ids of the edges, int64 of shape (num_edges,), where they were asked for."""
    seeds: slice
    """The part of the seeds that were given whose closure this is."""
    size: ClosureSize
    """Counts and bytes; `size.predicted_bytes` was known before the edges had memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        tensors = (self.nodes, self.edge_index, self.seed_positions, self.edge_ids)
        return sum(each.nbytes for each in tensors if each is not None)


def khop(
    graph: CSRGraph | RankGraph,
    seeds: Tensor,
    hops: int,
    *,
    max_bytes: int | str | None = None,
    edge_ids: bool = False,
    reverse: CSRGraph | None = None,
) -> Closure:
    """Return all nodes within some hops of seeds, and all edges among them.

    These are the nodes and the edges of `torch_geometric.utils.k_hop_subgraph`, for the graph's
    `flow` and with `directed=False`: also the edges between two nodes of the last hop.

    Example:
        >>> edges = torch.tensor([[1, 2, 3], [0, 1, 2]])  # 3 -> 2 -> 1 -> 0
        >>> closure = khop(CSRGraph.from_edges(edges, 4), torch.tensor([0]), 2)
        >>> closure.nodes.tolist(), closure.edge_index.tolist()
        ([0, 1, 2], [[1, 2], [0, 1]])

    Args:
        graph: The graph, in memory or in files; of lists in files only those of the closure's nodes
            are read, twice: to count edges and to write them. Or this rank's part of it: all ranks
            call with the same hops, each with seeds of its own, and each gets their closure, whose
            lists the owners send.
        seeds: Integers of shape (n,), on the CPU or a GPU, where the closure then is.
        hops: Hops from a node to its neighbours, 0 or more.
        max_bytes: Bytes that the call holds at once, its result included: an int, or a string such
            as "2GiB". What tables keep of their files for themselves is not in it. Each buffer is
            compared with it before it is allocated. None is any number.
        edge_ids: Whether the ids of edges are returned: those of the graph, or their places in
            `graph.indices`.
        reverse: The same edges as lists of the other direction, in memory, as `graph.reverse()`
            makes them; others are compared with the graph once, which reads all of both. A large
            frontier is then found from the nodes that it can reach, which looks at fewer edges; the
            result is the same.

    Raises:
        CapacityError: The closure needs more than `max_bytes`; the message says how much.
            To name it, the search goes on without its edges. `split_khop` splits the seeds.
        IndexError: A seed is no node of the graph.
        RankError: Another rank has ended, or does not answer.
        TypeError: `graph` is no `CSRGraph`, or `seeds` does not hold integers.
        ValueError: `seeds` has another shape, `hops` is below 0, `reverse` has other edges, or the
            graph is damaged. Or it is a rank's part, and `edge_ids` or `reverse` is given, or
            ranks were given different hops.
    """
    if isinstance(graph, RankGraph):
        return _find_over_ranks(graph, seeds, hops, max_bytes, edge_ids or reverse is not None)
    request = KhopRequest.of(graph, seeds, hops, edge_ids, reverse)
    limit = parse_limit(max_bytes)
    try:
        return request.find(0, len(request.seeds), limit)
    except BudgetExceeded:
        pass
    needed = request.count(0, len(request.seeds)).peak_bytes
    raise CapacityError(
        f"max_bytes={max_bytes!r}: the closure of {len(request.seeds)} seeds needs {needed} bytes "
        f"({format_bytes(needed)}) at once. Give as many, or split the seeds with split_khop."
    )


def _find_over_ranks(
    part: RankGraph, seeds: Any, hops: Any, max_bytes: int | str | None, has_more: bool
) -> Closure:
    """Collect the lists of the seeds' closure from the ranks, and find it in these."""
    if has_more:
        raise ValueError(
            "edge_ids, reverse: a rank's part of a graph has no ids of edges and no lists of the "
            "other direction; leave both out"
        )
    limit = parse_limit(max_bytes)
    nodes = check_seeds(seeds, part.num_nodes).contiguous()
    collected = collect_lists(part, nodes.cpu(), parse_count(hops, name="hops"), limit)
    rest = None if limit is None else max(limit - collected.num_bytes, 1)
    numbers = torch.searchsorted(collected.ids, nodes.cpu()).to(nodes.device)
    closure = khop(collected.graph, numbers, hops, max_bytes=rest)
    ids = collected.ids.to(nodes.device)[closure.nodes]
    return dataclasses.replace(closure, nodes=ids)


def split_khop(
    graph: CSRGraph,
    seeds: Tensor,
    hops: int,
    *,
    max_bytes: int | str,
    edge_ids: bool = False,
    reverse: CSRGraph | None = None,
) -> Iterator[Closure]:
    """Yield the closures of consecutive parts of the seeds, each within a budget.

    A part that does not fit is halved before its edges have memory; after one that fits, the next
    may have twice as many seeds. The budget is that of each part by itself: a loop that ends with
    `del part` has one at a time.

    Example:
        >>> graph = CSRGraph([0, 1, 2, 3], [1, 2, 0])
        >>> for part in split_khop(graph, torch.tensor([0, 1, 2]), 1, max_bytes=100):
        ...     print(part.seeds, part.nodes.tolist())
        ...     del part
        slice(0, 1, None) [0, 1]
        slice(1, 2, None) [1, 2]
        slice(2, 3, None) [2, 0]

    Args:
        graph: The graph; see `khop` for this and what follows.
        seeds: Integers of shape (n,).
        hops: Hops from a node to its neighbours, 0 or more.
        max_bytes: Bytes that each part needs at most, its workspace included.
        edge_ids: Whether the ids of edges are returned.
        reverse: The same edges as lists of the other direction.

    Yields:
        Closures; `closure.seeds` is the part of the seeds.

    Raises:
        CapacityError: One seed alone needs more than `max_bytes`; the message names it, and the
            least budget for it.
        Exception: As `khop`, before the first part.
    """
    request = KhopRequest.of(graph, seeds, hops, edge_ids, reverse)
    limit = parse_limit(max_bytes)
    if limit is None:
        raise TypeError('max_bytes: expected bytes, or a string such as "2GiB", got None')
    return _split(request, limit)


def count_khop(
    graph: CSRGraph,
    seeds: Tensor,
    hops: int,
    *,
    edge_ids: bool = False,
    reverse: CSRGraph | None = None,
) -> ClosureSize:
    """Return the nodes, the edges and the bytes of a closure, which is not built.

    Example:
        >>> graph = CSRGraph([0, 1, 2, 3], [1, 2, 0])
        >>> count_khop(graph, torch.tensor([0]), 1).predicted_bytes  # 2 nodes, 1 edge, 1 seed
        40

    Args:
        graph: The graph; see `khop` for this and what follows.
        seeds: Integers of shape (n,).
        hops: Hops from a node to its neighbours, 0 or more.
        edge_ids: Whether ids of edges would be returned.
        reverse: The same edges as lists of the other direction.

    Raises:
        Exception: As `khop`.
    """
    request = KhopRequest.of(graph, seeds, hops, edge_ids, reverse)
    return request.count(0, len(request.seeds))


def _split(request: KhopRequest, limit: int) -> Iterator[Closure]:
    begin, most = 0, len(request.seeds)
    while begin < len(request.seeds):
        count = min(most, len(request.seeds) - begin)
        try:
            part = request.find(begin, begin + count, limit)
        except BudgetExceeded:
            if count == 1:
                raise _error_of_seed(request, begin, limit) from None
            most = count // 2
            continue
        yield part
        del part
        begin, most = begin + count, 2 * count


def _error_of_seed(request: KhopRequest, position: int, limit: int) -> CapacityError:
    needed = request.count(position, position + 1).peak_bytes
    return CapacityError(
        f"max_bytes={limit}: seeds[{position}], node {int(request.seeds[position])}, alone needs "
        f"{needed} bytes ({format_bytes(needed)}). Give at least as many, or take fewer hops."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class KhopRequest:
    """The arguments of a call, compared with each other."""

    graph: CSRGraph
    seeds: Tensor
    seed_copy_bytes: int
    """Bytes of each seed's copy as int64, where it was given as another integer."""
    hops: int
    edge_ids: bool
    reverse: CSRGraph | None

    @classmethod
    def of(
        cls, graph: Any, seeds: Any, hops: Any, edge_ids: bool, reverse: CSRGraph | None
    ) -> KhopRequest:
        """Return the arguments of a call; raise for those that make no sense."""
        if not isinstance(graph, CSRGraph):
            raise TypeError(f"graph: expected a CSRGraph, got {type(graph).__name__}")
        nodes = check_seeds(seeds, graph.num_nodes).contiguous()
        num_hops = parse_count(hops, name="hops")
        check_reverse(graph, reverse)
        copy_bytes = 0 if nodes.data_ptr() == seeds.data_ptr() else NODE_BYTES
        return cls(graph, nodes, copy_bytes, num_hops, bool(edge_ids), reverse)

    def search(self, begin: int, end: int, budget: SearchBudget) -> tuple[NodeSearch, int, Any]:
        """Return the search for the nodes of a part of the seeds, its edges, and their counts."""
        search = self._make_search(self.seeds[begin:end], budget)
        search.run(edge_bytes=self.edge_bytes)
        return search, *count_edges(search)

    def search_nodes(self, budget: SearchBudget) -> NodeSearch:
        """Return the search for the nodes of all seeds."""
        search = self._make_search(self.seeds, budget)
        search.run()
        return search

    def _make_search(self, seeds: Tensor, budget: SearchBudget) -> NodeSearch:
        budget.hold(self.seed_copy_bytes * len(self.seeds))
        return NodeSearch(self.graph, seeds, self.hops, self.reverse, budget)

    def count(self, begin: int, end: int) -> ClosureSize:
        """Return the size of the closure of a part of the seeds."""
        search, num_edges, _ = self.search(begin, end, SearchBudget(None))
        return self._measure(search, num_edges)

    def find(self, begin: int, end: int, limit: int | None) -> Closure:
        """Return the closure of a part of the seeds.

        Raises:
            BudgetExceeded: It needs more bytes than `limit`.
        """
        budget, device = SearchBudget(limit), self.seeds.device
        search, num_edges, counts = self.search(begin, end, budget)
        size = self._measure(search, num_edges)
        if limit is not None and size.peak_bytes > limit:
            raise BudgetExceeded
        edge_index = budget.empty(2, num_edges, dtype=torch.int64, device=device)
        ids = None
        if self.edge_ids:
            ids = budget.empty(num_edges, dtype=torch.int64, device=device)
        # The neighbour is the source of an edge, or its target.
        neighbors, owners = edge_index if self._is_forward else (edge_index[1], edge_index[0])
        write_edges(search, counts, neighbors, owners, ids)
        if ids is not None:
            self._name_edges(ids, budget)
        assert budget.peak_bytes == size.peak_bytes, "what is allocated is what was predicted"
        return Closure(
            nodes=search.nodes,
            edge_index=edge_index,
            seed_positions=search.positions,
            edge_ids=ids,
            seeds=slice(begin, end),
            size=size,
        )

    @property
    def edge_bytes(self) -> int:
        """Bytes of an edge of the closure."""
        return EDGE_BYTES + (ID_BYTES if self.edge_ids else 0)

    @property
    def _is_forward(self) -> bool:
        return self.graph.flow == "source_to_target"

    def _measure(self, search: NodeSearch, num_edges: int) -> ClosureSize:
        """Return the size of a closure whose edges are counted, while its search is held."""
        edge_bytes = self.edge_bytes * num_edges
        num_nodes, budget = len(search.nodes), search.budget
        temporary = 0 if search.reader.is_whole else search.block_bytes
        if self.edge_ids and self.graph.edge_ids is not None:
            temporary = max(temporary, BLOCK_BYTES)
        return ClosureSize(
            num_seeds=len(search.seeds),
            num_nodes=tuple(search.num_nodes),
            num_edges=num_edges,
            frontier_edges=tuple(search.frontier_edges),
            touched_edges=tuple(search.touched_edges),
            pulled=tuple(search.pulled),
            predicted_bytes=NODE_BYTES * (num_nodes + len(search.seeds)) + edge_bytes,
            peak_bytes=max(budget.peak_bytes, budget.held_bytes + edge_bytes + temporary),
        )

    def _name_edges(self, places: Tensor, budget: SearchBudget) -> None:
        """Replace places of edges by their ids."""
        if self.graph.edge_ids is None:
            return
        with budget.temporary(BLOCK_BYTES):
            for part in places.split(BLOCK_ENTRIES):
                part.copy_(read_entries(self.graph.edge_ids, part))


def parse_limit(max_bytes: int | str | None) -> int | None:
    """Return a budget in bytes; None for any number."""
    return None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
