"""Connected components: within each rank at once, then over the nodes that ranks share."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.memory.pages import trim_heap
from penstock.traversal._graph import CSRGraph
from penstock.traversal._rank_graph import RankGraph, as_rank_graph


def connected_components(graph: CSRGraph | RankGraph) -> Tensor:
    """Return the smallest node of each node's component, whatever the direction of the edges.

    Over ranks each finds the components of its own lists, halo included. Then owners and the ranks
    that have a node in their halo exchange the smallest ids that they know, until none changes.

    Example:
        >>> edges = torch.tensor([[4, 1], [2, 3]])
        >>> connected_components(CSRGraph.from_edges(edges, 5)).tolist()
        [0, 1, 2, 1, 2]

    Args:
        graph: The graph, or this rank's part of it; all ranks call.

    Returns:
        int64 of shape (num_nodes,), for a `RankGraph` of shape (num_own,) in the order of
        `graph.nodes`.

    Raises:
        RankError: Another rank has ended, or does not answer.
        TypeError: `graph` is something else.
        ValueError: The graph is damaged.
    """
    part = as_rank_graph(graph)
    roots = _find_roots(part)
    trim_heap()
    num_own = part.num_own
    least = _find_least(part, roots)
    while part.num_halo or part.exchange.num_ranks > 1:
        is_changed = _tell_owners(part, roots, least) | _ask_owners(part, roots, least)
        if not part.exchange.total(int(is_changed)):
            break
    found = torch.empty(num_own, dtype=torch.int64, device="cpu")
    for begin in range(0, num_own, part.block_entries):
        end = min(begin + part.block_entries, num_own)
        found[begin:end] = least.index_select(0, roots[begin:end])
    del roots, least
    trim_heap()
    return found


def _find_least(part: RankGraph, roots: Tensor) -> Tensor:
    """Return the smallest id of each of the rank's components at its root; other places are not
    used.
    """
    least = torch.full_like(roots, part.num_nodes)
    for begin in range(0, part.num_own, part.block_entries):
        root = roots[begin : min(begin + part.block_entries, part.num_own)].long()
        ids = part.id_of(torch.arange(begin, begin + len(root), device="cpu"))
        least.scatter_reduce_(0, root, ids.to(least.dtype), "amin")
    for positions, sent, places, received in part.split_halo():
        own = part.id_of(positions).to(least.dtype)
        ids = part.exchange.trade(own, sent, received, "component ids")
        least.scatter_reduce_(0, roots[part.num_own + places].long(), ids, "amin")
    return least


def _tell_owners(part: RankGraph, roots: Tensor, least: Tensor) -> bool:
    """Send the smallest ids of the halo to their owners; return whether one was news there."""
    is_changed = False
    for positions, received, places, sent in part.split_halo():
        known = least[roots[part.num_own + places].long()]
        arrived = part.exchange.trade(known, sent, received, "components to owners")
        is_changed |= _lower(least, roots[positions].long(), arrived)
    return is_changed


def _ask_owners(part: RankGraph, roots: Tensor, least: Tensor) -> bool:
    """Get the smallest ids of the halo from their owners; return whether one was news here."""
    is_changed = False
    for positions, sent, places, received in part.split_halo():
        known = least[roots[positions].long()]
        arrived = part.exchange.trade(known, sent, received, "components from owners")
        is_changed |= _lower(least, roots[part.num_own + places].long(), arrived)
    return is_changed


def _lower(least: Tensor, places: Tensor, values: Tensor) -> bool:
    is_less = bool((values < least[places]).any())
    least.scatter_reduce_(0, places, values, "amin")
    return is_less


def _find_roots(part: RankGraph) -> Tensor:
    """Return the smallest number in the component of each node that the rank knows.

    Labels of both ends of an edge are hooked to the smaller one, and labels to those that these
    have, until no edge joins two (Shiloach and Vishkin 1982). A hook may take the place of another
    in the same sweep; the next one sees its edge again.
    """
    num_known, is_narrow = part.num_own + part.num_halo, part.num_nodes < 2**31
    roots = torch.arange(num_known, dtype=torch.int32 if is_narrow else torch.int64, device="cpu")
    while True:
        num_joined = 0
        for begin, end in part.split_own():
            degrees, entries = part.read_own(begin, end)
            here = roots[begin:end].repeat_interleave(degrees)
            there = roots.index_select(0, entries)
            differs = here != there
            here, there = here[differs], there[differs]
            num_joined += len(here)
            high = torch.maximum(here, there).long()
            roots.scatter_reduce_(0, high, torch.minimum(here, there), "amin")
        if not num_joined:
            return roots
        while _shorten(roots, part.block_entries):
            pass


def _shorten(roots: Tensor, most: int) -> bool:
    """Let each label be that of its label, block by block; return whether one has changed."""
    is_changed = False
    for block in roots.split(most):
        found = roots.index_select(0, block)
        is_changed |= not torch.equal(found, block)
        block.copy_(found)
    return is_changed
