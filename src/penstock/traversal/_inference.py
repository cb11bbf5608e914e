"""Layer-wise inference: each layer of a GNN for all nodes before the next one, block by block.

A mini-batch needs everything within as many hops as there are layers, and computes most of it again
and again. Layer by layer each row is computed once: a block of nodes needs the rows of its
neighbours only. The rows between two layers are in memory, or in a file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError, StoreUnavailableError
from penstock.traversal._graph import CSRGraph
from penstock.traversal._layer_block import (
    LayerBlock,
    check_layer,
    read_block,
    refuse_buffer_changes,
)
from penstock.traversal._layer_rows import DTYPES, LayerRows, check_features, make_rows, write_rows
from penstock.traversal._rank_graph import RankGraph, as_rank_graph
from penstock.unified import UnifiedTensor
from penstock.units import format_bytes, parse_bytes

Layer = Callable[[Tensor, Tensor], Tensor]
_ENTRY_BYTES = 64  # of numbers of an entry, and of what sorting them takes
_LEAST = -(2**62)
_COPIES = 3  # of a row that goes in: itself, a message, and a sum or product


@torch.no_grad()
def infer_layers(
    graph: CSRGraph | RankGraph,
    features: Any,
    layers: Sequence[Layer],
    *,
    max_bytes: int | str = "256MiB",
    store: str | os.PathLike[str] | None = None,
) -> Tensor:
    """Return the outputs of a GNN for all nodes, computed layer by layer in blocks of nodes.

    Example:
        >>> from torch_geometric.nn import SAGEConv
        >>> graph = CSRGraph.from_edges(torch.tensor([[1, 2], [0, 1]]), 3)
        >>> first, last = SAGEConv(4, 8).eval(), SAGEConv(8, 2).eval()
        >>> layers = [lambda x, edges: first(x, edges).relu(), last]
        >>> infer_layers(graph, torch.rand(3, 4), layers).shape
        torch.Size([3, 2])

    Args:
        graph: The graph, in memory or in files, or this rank's part of it; all ranks call. Nodes
            get messages from the nodes in their lists.
        features: Rows of shape (num_nodes, width): a tensor, a table of `penstock.unify`, or the
            path of a table in a file. Over ranks they may be those of the rank's nodes only, of
            shape (num_own, width).
        layers: Functions of (x, edge_index) for rows of shape (n, width) and positions in them of
            shape (2, num_edges), such as convolutions of PyTorch Geometric with the same flow, in
            evaluation mode. They return a row for each row of `x`. The first rows of `x` are a
            block's nodes, with all of their edges; the others are their neighbours, without theirs.
        max_bytes: Bytes that a block takes at most by the width of its rows, before and after a
            layer, and the cache of rows in files: an int, or a string such as "1GiB".
        store: Directory for the rows between layers and for the result; None: memory.

    Returns:
        Rows of shape (num_nodes, width), over ranks (num_own, width) in the order of `graph.nodes`:
        a tensor, or with `store` a table in a new file there.

    Raises:
        CapacityError: A node's list alone needs more than `max_bytes`.
        RankError: Another rank has ended, or does not answer.
        StoreError: A file cannot be used, or has no room, or `store` has a result of a call before.
            A call that raises leaves none.
        TypeError: `graph` is something else, the features are no table, or a layer no function.
        ValueError: `features` have another shape; `layers` are empty; ranks were given different
            numbers of layers, or rows of different widths or dtypes; or the output of a layer is
            of another shape, is random, or depends on more than a node's own list, as with norms by
            the degree of neighbours (GCN) or over all nodes, which a block does not have.
    """
    part = as_rank_graph(graph)
    layers = _check_layers(layers)
    budget = parse_bytes(max_bytes, name="max_bytes")
    if not part.exchange.agree(len(layers)):
        raise ValueError(f"layers: ranks have different numbers of them; this one {len(layers)}")
    directory = None if store is None else Path(store)
    output = _choose_output(directory, part)
    with contextlib.ExitStack() as files:
        rows = check_features(part, features, budget // 4)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            place = output if is_last else _choose_place(directory, part, files)
            rows = _run_layer(part, rows, layer, number, budget, place, is_last)
    return rows.values


def _check_layers(layers: Any) -> list[Layer]:
    """Return the layers; raise for what is no function."""
    try:
        found = list(layers)
    except TypeError as error:
        raise TypeError(
            "layers: expected a sequence of functions of (x, edge_index), got "
            f"{type(layers).__name__}; give [layer] for one"
        ) from error
    if not found:
        raise ValueError("layers: expected at least one function of (x, edge_index), got none")
    for number, layer in enumerate(found):
        if not callable(layer):
            raise TypeError(
                f"layers[{number}]: expected a function of (x, edge_index), got "
                f"{type(layer).__name__}"
            )
    return found


def _choose_output(directory: Path | None, part: RankGraph) -> Path | None:
    """Return the path of the result.

    Raises:
        StoreUnavailableError: A rank's directory is none, or has a result.
    """
    path = None if directory is None else directory / f"output-{part.exchange.rank}.rows"
    is_taken = path is not None and path.exists()
    is_missing = directory is not None and not directory.is_dir()
    if any(part.exchange.largest(int(is_taken), int(is_missing))):
        state = "exists" if is_taken else "has no directory" if is_missing else "is free"
        raise StoreUnavailableError(
            f"store={str(directory)!r}: expected an existing directory on each rank, without a "
            f"result: {path} {state}",
            path=None if path is None else str(path),
        )
    return path


@contextlib.contextmanager
def _delete_if_raised(path: Path | None) -> Iterator[None]:
    """Delete a file that this call has made where the context raises: a part of it has zeroes."""
    try:
        yield
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise


def _choose_place(
    directory: Path | None, part: RankGraph, files: contextlib.ExitStack
) -> Path | None:
    """Return the path of the rows between two layers, which are deleted at the end."""
    if directory is None:
        return None
    folder = tempfile.TemporaryDirectory(dir=directory, prefix="layer-")
    files.enter_context(folder)
    return Path(folder.name) / f"output-{part.exchange.rank}.rows"


def _run_layer(
    part: RankGraph,
    rows: LayerRows,
    layer: Layer,
    number: int,
    budget: int,
    place: Path | None,
    is_last: bool,
) -> LayerRows:
    """Run one layer over all blocks, and exchange the halo's rows unless it is the last one."""
    blocks = _read_blocks(part, rows, budget // 2)
    first = next(blocks, None)
    out = None
    if first is not None:
        with refuse_buffer_changes(layer, number):
            out = _call(layer, first, number)
            check_layer(part, rows, layer, number)
    width, dtype = _agree_on_rows(part, out)
    num_rows = part.num_own if is_last else part.num_own + part.num_halo
    values = make_rows(num_rows, width, dtype, place, budget // 4)
    with _delete_if_raised(place):
        if first is not None and out is not None:
            write_rows(values, first.begin, out)
            del first, out
        for block in blocks:
            _check_room(block, width * dtype.itemsize, budget)
            write_rows(values, block.begin, _call(layer, block, number))
        if not is_last:
            _fill_halo(part, values, width * dtype.itemsize, budget // 4)
    return LayerRows(values, None)


def _read_blocks(part: RankGraph, rows: LayerRows, num_bytes: int) -> Iterator[LayerBlock]:
    """Yield blocks of own nodes with the rows that they need."""
    row_bytes = _ENTRY_BYTES + _COPIES * rows.row_bytes
    most = max(num_bytes // (2 * row_bytes), 1)  # of nodes, and of their entries
    if not part.num_nodes:  # for the width of a layer's rows
        yield read_block(part, rows, 0, 0)
    for first, last in part.split_own(most):
        for begin in range(first, last, most):
            end = min(begin + most, last)
            num_entries = part.count_range(begin, end)
            if num_entries > most:
                node = int(part.id_of(torch.tensor([begin], device="cpu")))
                raise CapacityError(
                    f"max_bytes: the {num_entries} neighbours of node {node} alone take about "
                    f"{format_bytes(num_entries * row_bytes)} as a block, which may take a half of "
                    f"it, {format_bytes(num_bytes)}; give more"
                )
            yield read_block(part, rows, begin, end)


def _check_room(block: LayerBlock, row_bytes: int, budget: int) -> None:
    needed = len(block.rows) * row_bytes + block.rows.nbytes
    if needed > budget:
        raise CapacityError(
            f"max_bytes: a block's rows before and after a layer take {format_bytes(needed)}, more "
            f"than {format_bytes(budget)}; give more"
        )


def _call(layer: Layer, block: LayerBlock, number: int) -> Tensor:
    """Return a layer's rows for the nodes of a block."""
    out = layer(block.rows, block.edge_index)
    count = block.end - block.begin
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) < count:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"layers[{number}]: expected a row for each of {len(block.rows)} rows, got {found}"
        )
    if out.dtype not in DTYPES:
        raise ValueError(f"layers[{number}]: expected one of {DTYPES}, got {out.dtype}")
    return out[:count]


def _agree_on_rows(part: RankGraph, out: Tensor | None) -> tuple[int, torch.dtype]:
    """Return the width and dtype of a layer's rows, also on a rank without nodes."""
    own = (0, -1) if out is None else (out.shape[1], DTYPES.index(out.dtype))
    negative = [_LEAST if out is None else -each for each in own]
    width, dtype, *least = part.exchange.largest(*own, *negative)
    if dtype >= 0 and least != [-width, -dtype]:
        raise ValueError(
            "layers: ranks have rows of different widths or dtypes; those of rank "
            f"{part.exchange.rank} are {'none' if out is None else f'{own[0]} of {out.dtype}'}"
        )
    return width, DTYPES[max(dtype, 0)]


def _fill_halo(part: RankGraph, values: Tensor, row_bytes: int, num_bytes: int) -> None:
    """Exchange the rows of the halo, some of each rank's at a time: each row of the cut once."""
    most = max(num_bytes // max(2 * row_bytes * part.exchange.num_ranks, 1), 1)
    most = -part.exchange.largest(-most)[0]  # where ranks have different budgets
    for positions, sent, places, received in part.split_halo(most):
        rows = (
            values.gather_rows(positions)
            if isinstance(values, UnifiedTensor)
            else values[positions]
        )
        found = part.exchange.trade(rows, sent, received, "rows of layers")
        values[part.num_own + places] = found
