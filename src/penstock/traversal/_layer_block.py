"""A block of nodes as a layer sees it, and the comparison that shows if a block is all it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from penstock.compat.modules import refuse_changed_buffers
from penstock.traversal._layer_rows import LayerRows
from penstock.traversal._rank_graph import RankGraph

_NUM_COMPARED = 4  # nodes of a layer's comparison, and neighbours of each
_MOST_ENTRIES = 256  # of their lists
_NUM_TRIED = 4096  # nodes among which they are looked for
# Relative to the largest output: the same sums in another order, of at most a few hundred terms.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2


@dataclasses.dataclass(frozen=True, eq=False)
class LayerBlock:
    """Consecutive own nodes with the rows and edges that a layer needs for them."""

    begin: int
    end: int
    rows: Tensor
    """Rows of the nodes, then of their other neighbours."""
    edge_index: Tensor
    """Positions in `rows` of the source and target of each entry of the nodes' lists."""


def read_block(part: RankGraph, source: LayerRows, begin: int, end: int) -> LayerBlock:
    """Read the lists and the rows of a block."""
    degrees, entries = part.read_own(begin, end)
    entries, count = entries.long(), end - begin
    is_inside = (entries >= begin) & (entries < end)
    others = entries[~is_inside].unique()
    places = torch.where(is_inside, entries - begin, count + torch.searchsorted(others, entries))
    owners = torch.arange(count, device="cpu").repeat_interleave(degrees)
    rows = source.read(torch.cat([torch.arange(begin, end, device="cpu"), others]))
    return LayerBlock(begin, end, rows, _direct(part, places, owners))


def check_layer(
    part: RankGraph, source: LayerRows, layer: Callable[[Tensor, Tensor], Tensor], number: int
) -> None:
    """Raise if a layer's output for a node depends on more than the rows in its list.

    A few nodes are computed alone, with the rows in their lists, and once more beside some of their
    neighbours and some further nodes, with the lists and rows of all.
    """
    tried = torch.arange(min(part.num_own, _NUM_TRIED), device="cpu")
    lengths = part.count_entries(tried)
    tried, lengths = (each[lengths <= _MOST_ENTRIES] for each in (tried, lengths))
    has_list = lengths > 0
    nodes = torch.cat([tried[has_list], tried[~has_list]])[:_NUM_COMPARED]
    if not len(nodes):
        return
    near = [part.read_list(node) for node in nodes.tolist()]
    inner = torch.cat([each[each < part.num_own][:_NUM_COMPARED] for each in near]).unique()
    inner = inner[~torch.isin(inner, nodes)]
    inner = inner[part.count_entries(inner) <= _MOST_ENTRIES]
    others = tried[~torch.isin(tried, torch.cat([nodes, *near]))][-_NUM_COMPARED:]
    owners = torch.cat([nodes, inner, others])
    lists = near + [part.read_list(node) for node in owners[len(nodes) :].tolist()]
    alone = layer(*_read_lists(part, source, nodes, near))[: len(nodes)]
    beside = layer(*_read_lists(part, source, owners, lists))[: len(nodes)]
    tolerance = _TOLERANCES.get(alone.dtype, _HALF_TOLERANCE)
    scale = beside.abs().max().clamp(min=1e-30)
    if not bool(((alone - beside).abs() <= tolerance * scale).all()):
        raise ValueError(
            f"layers[{number}]: its output for a node changes with the lists of the node's "
            "neighbours, or with the other rows of a block, or from call to call, or is not "
            "finite. Call model.eval() before; a norm by the degree of neighbours, as in GCNConv, "
            "or by the mean of all nodes has to be computed from the whole graph and given to the "
            "layer with the features."
        )


def _read_lists(
    part: RankGraph, source: LayerRows, owners: Tensor, lists: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return rows of nodes, then of the others in their lists, and edges by positions in them."""
    entries = torch.cat(lists)
    known = torch.cat([owners, entries[~torch.isin(entries, owners)].unique()])
    order = known.argsort()
    places = order[torch.searchsorted(known[order], entries)]
    lengths = torch.tensor([len(each) for each in lists], device="cpu")
    targets = torch.arange(len(lists), device="cpu").repeat_interleave(lengths)
    return source.read(known), _direct(part, places, targets)


def refuse_buffer_changes(layer: object, number: int) -> AbstractContextManager[None]:
    """Return a context that raises if a module has changed its buffers by the end."""
    return refuse_changed_buffers(
        [layer],
        f"layers[{number}]: it changes its buffers, as of batches and not of nodes. Call "
        "model.eval() before.",
    )


def _direct(part: RankGraph, neighbors: Tensor, owners: Tensor) -> Tensor:
    """Return edges whose sources and targets are as the graph's flow has them."""
    ends = (neighbors, owners) if part.flow == "source_to_target" else (owners, neighbors)
    return torch.stack(ends)
