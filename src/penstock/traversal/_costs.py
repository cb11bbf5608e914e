"""Costs of seeds: the bytes of each one's closure, for batches that keep to a budget.

Closures overlap, and edges may lead from one into another that neither has by itself. So the bytes
of a batch are not the sum of its closures' bytes, but they are bounded by a sum: with C(s) the
nodes within some hops of seed s,

    nodes(B) <= sum_{s in B} |C(s)|        edges(B) <= sum_{s in B} sum_{v in C(s)} degree(v)
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock.batching import SampleCosts
from penstock.traversal import _native
from penstock.traversal._blocks import BLOCK_BYTES, whole_lists
from penstock.traversal._budget import SearchBudget
from penstock.traversal._graph import CSRGraph
from penstock.traversal._khop import EDGE_BYTES, ID_BYTES, NODE_BYTES, KhopRequest
from penstock.traversal._search import ListReader

_NATIVE_NODE_BYTES, _TORCH_NODE_BYTES = 16, 64
"""Bytes of a node while the nodes of a hop are added to those before, with counts of edges."""
_TORCH_SEED_BYTES = 72


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KhopCosts:
    """Nodes, edges and bytes of the closure of each seed by itself."""

    num_nodes: Tensor
    """Nodes of each closure, int64 of shape (num_seeds,)."""
    num_edges: Tensor
    """Edges of each closure, int64 of shape (num_seeds,)."""
    num_entries: Tensor
    """Entries of the lists of each closure's nodes, int64 of shape (num_seeds,). They are its
    edges, and those that lead out of it."""
    closure_bytes: Tensor
    """Bytes of each closure, int64 of shape (num_seeds,). They are costs for batches of equal work,
    as `BalancedBatchSampler(costs.closure_bytes, batch_size=...)` makes them."""
    batch_costs: SampleCosts
    """Costs for batches under a cap. `khop` of a batch of seeds holds at most
    `batch_costs.of_batch(batch)` bytes at once, so that batches of
    `BalancedBatchSampler(costs.batch_costs, max_bytes=cap)` are within the cap."""


def khop_costs(graph: CSRGraph, seeds: Tensor, hops: int, *, edge_ids: bool = False) -> KhopCosts:
    """Return the costs of seeds for `penstock.batching`: the bytes of each one's closure.

    Each seed is searched by itself, in C++ where the graph is in memory.

    Example:
        >>> graph = CSRGraph([0, 1, 2, 3], [1, 2, 0])
        >>> khop_costs(graph, torch.tensor([0, 1]), 1).closure_bytes.tolist()
        [40, 40]

    Args:
        graph: The graph.
        seeds: Integers of shape (n,), on the CPU: samples of a data set, by their number.
        hops: Hops from a node to its neighbours, 0 or more.
        edge_ids: Whether `khop` will return the ids of edges.

    Raises:
        Exception: As `khop`.
    """
    request = KhopRequest.of(graph, seeds, hops, edge_ids, None)
    lists = whole_lists(graph, None)
    reader = ListReader(graph, request.seeds.device, SearchBudget(None))
    if lists is not None and reader.is_native:
        try:
            counts = _native.count_closures(lists, request.seeds, request.hops)
        except _native.DamagedList as error:
            raise graph.damage(error.place) from None
    else:
        each = [_count_closure(request, i) for i in range(len(request.seeds))]
        counts = torch.tensor(each, dtype=torch.int64, device="cpu").view(-1, 3).T
    num_nodes, num_entries, num_edges = counts
    edge_bytes = EDGE_BYTES + (ID_BYTES if edge_ids else 0)
    return KhopCosts(
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_entries=num_entries,
        closure_bytes=NODE_BYTES * (num_nodes + 1) + edge_bytes * num_edges,
        batch_costs=_bound_batches(reader, num_nodes, num_entries, request),
    )


def _count_closure(request: KhopRequest, position: int) -> tuple[int, int, int]:
    """Return nodes, entries of their lists and edges of one closure."""
    search, num_edges, _ = request.search(position, position + 1, SearchBudget(None))
    return len(search.nodes), search.reader.sum_lengths(search.nodes), num_edges


def _bound_batches(
    reader: ListReader, num_nodes: Tensor, num_entries: Tensor, request: KhopRequest
) -> SampleCosts:
    """Return costs whose sum bounds what `khop` holds for a batch, beside the numbers of nodes."""
    all_nodes = reader.graph.num_nodes
    node_bytes, seed_bytes = _NATIVE_NODE_BYTES, NODE_BYTES
    fixed_bytes = 4 * all_nodes + 2 * NODE_BYTES
    if not reader.is_native:
        node_bytes, seed_bytes = _TORCH_NODE_BYTES, _TORCH_SEED_BYTES
        fixed_bytes = (4 if all_nodes <= _native.MOST_NODES else 8) * all_nodes + all_nodes
    if not reader.is_whole or request.edge_ids:
        fixed_bytes += 2 * BLOCK_BYTES
    seed_bytes += NODE_BYTES  # of a copy, where seeds are not int64
    summed = node_bytes * num_nodes + seed_bytes + request.edge_bytes * num_entries
    return SampleCosts(fixed_bytes=fixed_bytes, summed_bytes=summed.numpy())
