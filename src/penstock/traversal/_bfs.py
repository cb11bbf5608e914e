"""Breadth-first search: hops from some nodes to all others, along the lists of neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.memory.pages import trim_heap
from penstock.traversal._graph import CSRGraph
from penstock.traversal._lists import check_seeds
from penstock.traversal._rank_graph import RankGraph, as_rank_graph

UNREACHED = -1
_TRIM_LEVELS = 8


def bfs(graph: CSRGraph | RankGraph, sources: Tensor) -> Tensor:
    """Return the hops from the nearest source to each node, from a node to those in its list.

    Over ranks each searches its own part of the frontier, and tells an owner once of each node that
    it meets, in 4 bytes.

    Example:
        >>> edges = torch.tensor([[1, 2, 3], [0, 1, 2]])  # 3 -> 2 -> 1 -> 0
        >>> bfs(CSRGraph.from_edges(edges, 5), torch.tensor([0])).tolist()
        [0, 1, 2, 3, -1]

    Args:
        graph: The graph, or this rank's part of it; all ranks call. With the flow
            "source_to_target" the hops go against the edges, from a node to those that send it
            messages, as in `khop`; with "target_to_source" along them.
        sources: Integers of shape (n,), ids in the whole graph. Over ranks the sources of all ranks
            are taken together; the same ones may be given on each.

    Returns:
        int32 of shape (num_nodes,), for a `RankGraph` of shape (num_own,) in the order of
        `graph.nodes`; -1 for a node that no source reaches.

    Raises:
        IndexError: A source is no node of the graph.
        RankError: Another rank has ended, or does not answer.
        TypeError: `graph` is something else, or `sources` does not hold integers.
        ValueError: `sources` has another shape, or the graph is damaged.
    """
    part = as_rank_graph(graph)
    nodes = check_seeds(sources, part.num_nodes).cpu()
    hops = torch.full((part.num_own,), UNREACHED, dtype=torch.int32, device="cpu")
    is_told = torch.zeros(part.num_halo, dtype=torch.bool, device="cpu")
    arrived = part.send_to_owners(nodes.unique(), "bfs sources")[0]
    frontier = part.position_of(arrived.unique())
    hops[frontier] = 0
    level = 0
    while part.exchange.total(len(frontier)):
        level += 1
        found, met = _expand(part, frontier, hops, is_told, level)
        told = part.tell_owners(met, "bfs").unique()
        told = told[hops[told] == UNREACHED]
        hops[told] = level
        frontier = torch.cat([found, told])
        if level % _TRIM_LEVELS == 0:  # frontiers of all lengths leave holes
            trim_heap()
    trim_heap()
    return hops


def _expand(
    part: RankGraph, frontier: Tensor, hops: Tensor, is_told: Tensor, level: int
) -> tuple[Tensor, Tensor]:
    """Return the own nodes that a hop finds, and the places in the halo that it meets first."""
    found, met = [frontier[:0]], [frontier[:0]]
    for entries in part.read_lists(frontier):
        entries = entries.unique()
        cut = int(torch.searchsorted(entries, part.num_own))
        own, halo = entries[:cut], entries[cut:] - part.num_own
        own = own[hops[own] == UNREACHED]
        hops[own] = level
        found.append(own)
        halo = halo[~is_told[halo]]
        is_told[halo] = True
        met.append(halo)
    return torch.cat(found), torch.cat(met).sort().values
