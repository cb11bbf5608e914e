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

_NUM_SAMPLED = 64  # nodes all over the graph, and as many entries
_NUM_COMPARED = 8  # of them
_MOST_ENTRIES = 16  # of a compared list; those beside it may be longer
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

    A few nodes are computed twice with the rows in their lists, and once more where their
    neighbours have lists too, beside as many rows of a further node. Each node has copies of its
    neighbours, which so have no list unless they are given one; of long lists the first entries
    are taken.
    """
    if not part.num_own:
        return
    nodes, further = _choose_nodes(part)
    alone = _lay_out(part, nodes, _MOST_ENTRIES)
    beside = _add_node(_give_lists(alone), _lay_out(part, further, 2 * _MOST_ENTRIES))
    outs = [
        layer(source.read(each.numbers), _direct(part, each.neighbors, each.owners))[: len(nodes)]
        for each in (alone, alone, beside)
    ]
    if not all(_are_close(outs[0], each) for each in outs[1:]):
        raise ValueError(
            f"layers[{number}]: its output for a node changes with the lists of the node's "
            "neighbours, or with the other rows of a block, or from call to call, or is not "
            "finite. Call model.eval() before; a norm by the degree of neighbours, as in GCNConv, "
            "or by the mean of all nodes has to be computed from the whole graph and given to the "
            "layer with the features."
        )


def _are_close(out: Tensor, other: Tensor) -> bool:
    """Return whether rows are the same within a tolerance; where they are finite, as some are."""
    is_finite = out.isfinite()
    if not out.numel() or not torch.equal(is_finite, other.isfinite()):
        return not out.numel()
    out, other = out[is_finite], other[is_finite]
    tolerance = _TOLERANCES.get(out.dtype, _HALF_TOLERANCE)
    return len(out) > 0 and bool(((out - other).abs() <= tolerance * other.abs().max()).all())


def _choose_nodes(part: RankGraph) -> tuple[Tensor, Tensor]:
    """Return own nodes to compare, with lists of many lengths, and a further one beside them.

    Entries are sampled too: where few nodes have lists, these are found by them.
    """
    places = _sample(part.count_range(0, part.num_own), _NUM_SAMPLED)
    tried = torch.cat([_sample(part.num_own, _NUM_SAMPLED), part.owners_of(places)]).unique()
    lengths, order = part.count_entries(tried).sort(stable=True)
    bare, listed = tried[order].split([int((lengths == 0).sum()), int((lengths > 0).sum())])
    # The longest list is never compared, so that it is beside shorter ones.
    compared = listed[:-1] if len(listed) > 1 else listed
    compared = compared[_sample(len(compared), _NUM_COMPARED)]
    nodes = torch.cat([compared, bare[: _NUM_COMPARED - len(compared)]])
    further = tried[order][~torch.isin(tried[order], nodes)]
    again = torch.arange(_NUM_COMPARED, device="cpu") % len(nodes)
    return nodes[again], torch.cat([nodes[:1], further])[-1:]


def _sample(total: int, count: int) -> Tensor:
    """Return some of the first numbers, as far from each other as they can be."""
    return (torch.arange(count, device="cpu") * total // count).unique()[: max(total, 0)]


@dataclasses.dataclass(frozen=True, eq=False)
class _ComparedNodes:
    """Rows of nodes, and behind them those of the neighbours of each, as others for each."""

    numbers: Tensor
    """Nodes, by number."""
    neighbors: Tensor
    """Rows of the entries of lists."""
    owners: Tensor
    """Rows of the nodes that have these entries, rising as in a block."""
    num_listed: int
    """Rows of nodes that were given, which have lists."""


def _lay_out(part: RankGraph, nodes: Tensor, most: int) -> _ComparedNodes:
    """Return some own nodes with the first entries of their lists."""
    numbers, neighbors, owners, count = [nodes], [nodes[:0]], [nodes[:0]], len(nodes)
    for row, node in enumerate(nodes.tolist()):
        entries = part.read_list(node, most)
        if len(entries) and bool((entries == node).all()):  # of loops alone nothing can be seen
            other = (node + 1) % (part.num_own + part.num_halo)
            entries = torch.cat([entries, entries.new_full((1,), other)])
        others = entries[entries != node].unique()
        rows = count + torch.searchsorted(others, entries)
        numbers.append(others)
        neighbors.append(torch.where(entries == node, row, rows))
        owners.append(torch.full_like(entries, row))
        count += len(others)
    return _ComparedNodes(torch.cat(numbers), torch.cat(neighbors), torch.cat(owners), len(nodes))


def _give_lists(layout: _ComparedNodes) -> _ComparedNodes:
    """Let each neighbour have a list as long as its node's, which has the node in every place.

    It has two entries at least, as norms take no degree and a degree of one for the same.
    """
    count = layout.num_listed
    rows = torch.arange(count, len(layout.numbers), device="cpu")
    is_near = layout.neighbors >= count
    node = torch.empty_like(layout.numbers)
    node[layout.neighbors[is_near]] = layout.owners[is_near]
    node = node[count:]
    lengths = torch.bincount(layout.owners, minlength=count)[node].clamp(min=2)
    return dataclasses.replace(
        layout,
        neighbors=torch.cat([layout.neighbors, node.repeat_interleave(lengths)]),
        owners=torch.cat([layout.owners, rows.repeat_interleave(lengths)]),
    )


def _add_node(layout: _ComparedNodes, further: _ComparedNodes) -> _ComparedNodes:
    """Return a layout with a further node behind it, whose row so often changes any mean."""
    count = len(layout.numbers)
    rows = further.numbers[:1].expand(count)
    return _ComparedNodes(
        torch.cat([layout.numbers, further.numbers, rows]),
        torch.cat([layout.neighbors, count + further.neighbors]),
        torch.cat([layout.owners, count + further.owners]),
        layout.num_listed,
    )


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
