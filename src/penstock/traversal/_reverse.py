"""The comparison of a graph with the lists of the other direction that are given for it."""

from __future__ import annotations

from typing import Any

import torch

from penstock.traversal._blocks import read_blocks, whole_lists
from penstock.traversal._graph import CSRGraph, is_known_reverse, remember_reverse

_NODES = 2**14  # whose offsets are looked at together
# Odd, as in SplitMix64 (Steele, Lea and Flood 2014), less 2^64.
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def check_reverse(graph: CSRGraph, reverse: Any) -> None:
    """Raise unless `reverse` has the edges of a graph as lists of the other direction, or is None.

    All edges are compared, once for two graphs, by a sum over hashes of them. Of two that differ
    one in 2^64 is not noticed.
    """
    if reverse is None:
        return
    if not isinstance(reverse, CSRGraph):
        raise TypeError(f"reverse: expected a CSRGraph, got {type(reverse).__name__}")
    sizes = [(each.num_nodes, each.num_edges) for each in (graph, reverse)]
    has_edges = sizes[0] == sizes[1] and graph.flow != reverse.flow
    if has_edges and whole_lists(reverse, None) is None:
        raise ValueError("reverse: expected lists in memory, got a table in a file")
    if has_edges and not is_known_reverse(graph, reverse):
        has_edges = _sum_hashes(graph) == _sum_hashes(reverse)
    if not has_edges:
        raise ValueError(
            f"reverse: expected the edges of the graph with the other flow, as graph.reverse() "
            f"gives them; got {reverse} for {graph}"
        )
    remember_reverse(graph, reverse)


def _sum_hashes(graph: CSRGraph) -> int:
    """Return a sum over the edges, in whatever order, with 64 bits."""
    is_forward, total = graph.flow == "source_to_target", 0
    for first in range(0, graph.num_nodes, _NODES):
        nodes = torch.arange(first, min(first + _NODES, graph.num_nodes), device="cpu")
        for lists in read_blocks(graph, nodes):
            owners = torch.arange(lists.num_rows, device="cpu").repeat_interleave(
                lists.offsets.diff()
            )
            ends = (lists.entries, owners.add_(first + lists.first))
            source, target = ends if is_forward else reversed(ends)
            mixed = source * _MULTIPLIERS[0] + target * _MULTIPLIERS[1]
            mixed = (mixed ^ (mixed >> 31)) * _MULTIPLIERS[2]
            total += int((mixed ^ (mixed >> 29)).sum())
    return total % 2**64
