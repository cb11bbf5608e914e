"""What kernels need to know of a graph besides its indices; made once per graph, then only read.

Making a table may wait for the device; reading one never does.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from penstock.rgnn import spaces
from penstock.rgnn.graph import Graph, dtype_for, offsets_of
from penstock.rgnn.spaces import RowMap, Space, is_sorted

LIGHT, MIDDLING, HEAVY = 8, 128, 2048
"""The most rows of a light, a middling and a heavy group; beyond, it is cut."""
PIECE_ROWS = 1024
"""Rows of a piece of a group that is cut."""
_MIN_PIECE, _MAX_PIECE = 128, 4096
_NUM_PIECES = 512  # enough for every processor of a large GPU to have several

_P = ParamSpec("_P")
_Table = TypeVar("_Table")
_graphs: weakref.WeakKeyDictionary[Graph, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _build_once(
    build: Callable[Concatenate[Graph, _P], _Table],
) -> Callable[Concatenate[Graph, _P], _Table]:
    """Make a function build its table for a graph and arguments once."""

    @functools.wraps(build)
    def read(graph: Graph, *args: _P.args, **kwargs: _P.kwargs) -> _Table:
        tables = _graphs.setdefault(graph, {})
        key = (build.__name__, args, *kwargs.items())
        if key not in tables:
            tables[key] = build(graph, *args, **kwargs)
        return tables[key]

    return read


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """Runs of rows that lie one after another, each of one type or group."""

    targets: torch.Tensor
    """The type or the group of each run."""
    begins: torch.Tensor
    ends: torch.Tensor
    first_runs: torch.Tensor
    """Where the runs of each target begin, and where the last ones end."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.begins)


@dataclasses.dataclass(frozen=True, slots=True)
class Lanes:
    """What a program should have at most, before its features are counted."""

    num_rows: int
    """Rows of a group that are read at once."""
    num_groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Groups of rows of about one size; of cut_groups, pieces of them."""

    lanes: Lanes
    groups: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor


_HEAVY_LANES = Lanes(256, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class CutGroups:
    """Groups that are cut into pieces whose sums are then added."""

    pieces: Bucket
    places: torch.Tensor
    """For each piece, the place of its group among the cut_groups."""
    groups: torch.Tensor
    first_pieces: torch.Tensor


@_build_once
def row_index(
    graph: Graph, maps: tuple[RowMap, ...], order: RowMap | None = None
) -> torch.Tensor | None:
    """Where `maps` lead from each row, or from each row as `order` groups them.

    Returns:
        int32 where the numbers fit; None if every row leads to itself.
    """
    index = None if order is None or is_sorted(order) else graph.grouped(order)[1]
    for row_map in maps:
        if row_map == spaces.identity(row_map.rows):
            continue
        step = graph.index(row_map)
        index = step if index is None else step.index_select(0, index)
    return None if index is None else index.contiguous()


def type_order(graph: Graph, row_map: RowMap) -> RowMap | None:
    """The map by which rows have to be ordered for those of a type to lie together; or None."""
    return row_map if row_map == spaces.NODE_TYPE_OF and graph.nodes_by_type is not None else None


@_build_once
def tiles(graph: Graph, maps: tuple[RowMap, ...], *, batch: int, block_rows: int) -> Runs:
    """Rows of one type each, at most `block_rows`, for a segment GEMM.

    Args:
        graph: The graph.
        maps: From rows to the weight that they are multiplied with; the first one to their type.
        batch: How many rows of the product a row has.
        block_rows: Rows of the product in a tile.
    """
    found = _runs(graph, maps[0], batch, block_rows)
    weights = row_index(graph, maps[1:])
    if weights is None:
        return found
    return dataclasses.replace(found, targets=weights.index_select(0, found.targets))


@_build_once
def pieces(graph: Graph, row_map: RowMap, *, batch: int) -> Runs:
    """Rows of one type each, in pieces of a length that depends on the graph alone."""
    num_rows = graph.counts.rows(row_map.rows) * batch
    length = _MIN_PIECE
    while length < _MAX_PIECE and length * _NUM_PIECES < num_rows:
        length *= 2
    return _runs(graph, row_map, batch, length)


def _runs(graph: Graph, row_map: RowMap, batch: int, length: int) -> Runs:
    if row_map.into is Space.ONE:
        starts: Sequence[int] = (0, graph.counts.rows(row_map.rows))
    else:
        starts = graph.segment_starts(row_map)
    starts_of = torch.tensor(starts) * batch
    return _cut(starts_of[:-1], starts_of[1:], length, graph.device)


def _cut(begins: torch.Tensor, ends: torch.Tensor, length: int, device: torch.device) -> Runs:
    """Cut intervals (on the CPU) into runs of at most `length`, each interval's in order."""
    counts = (ends - begins + length - 1) // length
    first_runs = offsets_of(counts)
    targets = torch.repeat_interleave(torch.arange(len(counts)), counts)
    number = torch.arange(len(targets)) - first_runs[targets]
    run_begins = begins[targets] + number * length
    run_ends = torch.minimum(run_begins + length, ends[targets])
    wide = dtype_for(int(ends.max()) if len(ends) else 0)
    return Runs(
        targets.to(device, torch.int32),
        run_begins.to(device, wide),
        run_ends.to(device, wide),
        first_runs.to(device, torch.int32),
    )


@_build_once
def buckets(graph: Graph, row_map: RowMap) -> tuple[tuple[Bucket, ...], CutGroups | None]:
    """The groups of a map by how many rows they have, so that none waits for a longer one.

    Args:
        graph: The graph.
        row_map: Sends rows to their group.

    Returns:
        Groups that have a program each or share one, and the longest ones, if any are cut.
    """
    starts = graph.grouped(row_map)[0].cpu().long()
    sizes, groups = torch.sort(starts[1:] - starts[:-1], stable=True)
    bounds = [
        (-1, LIGHT, Lanes(4, 64)),
        (LIGHT, MIDDLING, Lanes(16, 8)),
        (MIDDLING, HEAVY, _HEAVY_LANES),
    ]
    found = []
    for above, most, lanes in bounds:
        of = groups[(sizes > above) & (sizes <= most)]
        if len(of):
            found.append(_bucket(graph, lanes, of, starts[:-1][of], starts[1:][of]))
    cut_groups = groups[sizes > HEAVY]
    if not len(cut_groups):
        return tuple(found), None
    cut = _cut(starts[:-1][cut_groups], starts[1:][cut_groups], PIECE_ROWS, graph.device)
    on_device = cut_groups.to(graph.device, torch.int32)
    of_pieces = on_device.index_select(0, cut.targets)
    pieces = Bucket(_HEAVY_LANES, of_pieces, cut.begins, cut.ends)
    return tuple(found), CutGroups(pieces, cut.targets, on_device, cut.first_runs)


def _bucket(
    graph: Graph, lanes: Lanes, groups: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor
) -> Bucket:
    dtype = dtype_for(int(ends.max()))
    begins, ends = (each.to(graph.device, dtype) for each in (begins, ends))
    return Bucket(lanes, groups.to(graph.device, torch.int32), begins, ends)
