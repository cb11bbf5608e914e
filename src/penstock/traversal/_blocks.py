"""Lists of neighbours as a search reads them: all at once in memory, in blocks from anywhere else.

A block has few entries, so that what is read from a file is never in memory as a whole, however
long the list of a node is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.traversal._graph import CSRGraph
from penstock.traversal._lists import in_memory

BLOCK_ENTRIES = 16384
"""Entries of a block, at most."""
BLOCK_BYTES = 128 * BLOCK_ENTRIES
"""Bytes that torch's operators take for a block while it is read and looked up, at most."""


@dataclasses.dataclass(frozen=True, eq=False)
class NeighborLists:
    """Lists of neighbours, side by side: the i-th is `entries[offsets[i]:offsets[i + 1]]`.

    With `rows` it is `entries[offsets[rows[i]]:offsets[rows[i] + 1]]`, as in the graph itself.
    """

    rows: Tensor | None
    """Nodes, int64 of shape (num_rows,)."""
    offsets: Tensor
    entries: Tensor
    places: Tensor | None
    """Places of the entries in the graph, int64; None where they stand at these."""
    first: int
    """Number of the first list among those that were asked for."""

    @property
    def num_rows(self) -> int:
        """Lists."""
        return len(self.offsets) - 1 if self.rows is None else len(self.rows)


def whole_lists(graph: CSRGraph, nodes: Tensor | None) -> NeighborLists | None:
    """Return the lists of some nodes, or of all, where they stand; None if that is in a file."""
    offsets, entries = in_memory(graph.indptr), in_memory(graph.indices)
    if offsets is None or entries is None:
        return None
    return NeighborLists(nodes, offsets, entries, None, 0)


def read_blocks(graph: CSRGraph, nodes: Tensor) -> Iterator[NeighborLists]:
    """Read the lists of some nodes, in their order, in blocks that may begin or end within a list.

    Raises:
        ValueError: The graph is damaged.
    """
    for first in range(0, len(nodes), BLOCK_ENTRIES):
        starts, degrees = graph.read_lists(nodes[first : first + BLOCK_ENTRIES])
        ends = degrees.cumsum(0)
        shift = starts - (ends - degrees)  # from an entry's number to its place
        total = int(ends[-1])
        for begin in range(0, total, BLOCK_ENTRIES):
            end = min(begin + BLOCK_ENTRIES, total)
            bounds = torch.tensor([begin, end - 1], device=nodes.device)
            low, high = torch.searchsorted(ends, bounds, right=True).tolist()
            inside = ends[low : high + 1].clamp(max=end) - begin
            places = torch.arange(begin, end, device=nodes.device)
            lengths = inside.diff(prepend=inside.new_zeros(1))
            places += shift[low : high + 1].repeat_interleave(lengths)
            offsets = torch.cat([inside.new_zeros(1), inside])
            yield NeighborLists(None, offsets, read_nodes(graph, places), places, first + low)


def read_nodes(graph: CSRGraph, places: Tensor) -> Tensor:
    """Return the neighbours at some places; raise for one that is no node."""
    found = graph.read_neighbors(places)
    wrong = ((found < 0) | (found >= graph.num_nodes)).nonzero()
    if len(wrong):
        raise graph.damage(int(places[wrong[0]]))
    return found
