"""Lists of the nodes that a rank owns, read from a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.traversal._graph import CSRGraph, open_uncached
from penstock.traversal._lists import list_places, narrow, read_entries

_BLOCK_NODES = 2**14
_BLOCK_LISTS = 2**11


def read_own_lists(graph: CSRGraph, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the offsets and the entries, by id, of the lists of some nodes.

    Each rank reads its part of a file once, so a copy of the whole file in memory would not pay.
    """
    graph = open_uncached(graph)
    offsets = torch.zeros(len(nodes) + 1, dtype=torch.int64, device="cpu")
    for begin in range(0, len(nodes), _BLOCK_NODES):
        part = nodes[begin : begin + _BLOCK_NODES].long()
        offsets[begin + 1 : begin + 1 + len(part)] = graph.read_lists(part)[1]
    torch.cumsum(offsets, 0, out=offsets)
    most = torch.iinfo(torch.int32).max
    dtype = torch.int32 if graph.num_nodes <= most else torch.int64
    entries = torch.empty(int(offsets[-1]), dtype=dtype, device="cpu")
    for begin in range(0, len(nodes), _BLOCK_LISTS):
        part = nodes[begin : begin + _BLOCK_LISTS].long()
        starts, degrees = graph.read_lists(part)
        found = read_entries(graph.indices, list_places(starts, degrees))
        wrong = (found < 0) | (found >= graph.num_nodes)
        if wrong.any():
            raise ValueError(
                f"indices: names node {int(found[wrong][0])}, but the graph has "
                f"{graph.num_nodes} nodes"
            )
        first = int(offsets[begin])
        entries[first : first + len(found)] = found
    return narrow(offsets, len(entries)), entries
