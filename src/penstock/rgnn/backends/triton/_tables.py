"""Tables of a graph for kernels, besides its indices; built once per graph, then only read.

Making a table may wait for the device; reading one never does.
"""

from __future__ import annotations

import dataclasses

import torch

from penstock.rgnn import spaces
from penstock.rgnn.graph import Graph, build_once, compute_offsets, dtype_for
from penstock.rgnn.spaces import RowMap, is_sorted

LIGHT, MIDDLING, HEAVY = 8, 128, 2048
"""The most rows of a light, a middling and a heavy group; beyond, it is cut."""
PIECE_ROWS = 1024
"""Rows of a piece of a group that is cut."""
_MIN_PIECE, _MAX_PIECE = 128, 4096
_NUM_PIECES = 512  # enough for every processor of a large GPU to have several


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """Runs of rows that lie one after another, each of one type or group."""

    targets: torch.Tensor
    """The type or the group of each run."""
    begins: torch.Tensor
    ends: torch.Tensor
    first_runs: torch.Tensor
    """The begin of the runs of each target, and the end of the last."""

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.begins)


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Groups of rows of about one size, or pieces of groups that are cut."""

    num_rows: int
    """The most rows of a group that a Triton program reads at once, before features are counted."""
    num_groups: int
    """The most groups that it has."""
    groups: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor


_HEAVY_LANES = (256, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class CutGroups:
    """Groups that are cut into pieces; their sums are then added."""

    groups: torch.Tensor
    runs: Runs
    """The pieces; the targets of each are places among the groups."""
    pieces: Bucket


@build_once
def compose_index(
    graph: Graph, maps: tuple[RowMap, ...], order: RowMap | None = None
) -> torch.Tensor | None:
    """Return the target of `maps` for each row, or for each row as `order` groups them.

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


def find_type_order(graph: Graph, row_map: RowMap) -> RowMap | None:
    """Return the map by which rows must be ordered for those of a type to lie together; or None."""
    return row_map if row_map == spaces.NODE_TYPE_OF and graph.nodes_by_type is not None else None


@build_once
def cut_tiles(graph: Graph, maps: tuple[RowMap, ...], *, batch: int, block_rows: int) -> Runs:
    """Cut rows into runs of one type and at most `block_rows`, for a segment GEMM.

    Args:
        graph: The graph that has the rows.
        maps: From rows to the weight that they are multiplied with; the first one to their type.
        batch: How many rows of the product a row has.
        block_rows: Rows of the product in a tile.
    """
    found = _cut_types(graph, maps[0], batch, block_rows)
    weights = compose_index(graph, maps[1:])
    if weights is None:
        return found
    return dataclasses.replace(found, targets=weights.index_select(0, found.targets))


@build_once
def cut_pieces(graph: Graph, row_map: RowMap, *, batch: int) -> Runs:
    """Cut rows into pieces of one type and of a length that depends on the graph alone."""
    num_rows = graph.counts.rows(row_map.rows) * batch
    length = _MIN_PIECE
    while length < _MAX_PIECE and length * _NUM_PIECES < num_rows:
        length *= 2
    return _cut_types(graph, row_map, batch, length)


def _cut_types(graph: Graph, row_map: RowMap, batch: int, length: int) -> Runs:
    starts_of = torch.tensor(graph.segment_starts(row_map), device="cpu") * batch
    return _cut_intervals(starts_of[:-1], starts_of[1:], length, graph.device)


def _cut_intervals(
    begins: torch.Tensor, ends: torch.Tensor, length: int, device: torch.device
) -> Runs:
    """Cut intervals (on the CPU) into runs of at most `length`, each interval's in order."""
    counts = (ends - begins + length - 1) // length
    first_runs = compute_offsets(counts)
    targets = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    number = torch.arange(len(targets), device="cpu") - first_runs[targets]
    run_begins = begins[targets] + number * length
    run_ends = torch.minimum(run_begins + length, ends[targets])
    wide = dtype_for(int(ends.max()) if len(ends) else 0)
    return Runs(
        targets.to(device, torch.int32),
        run_begins.to(device, wide),
        run_ends.to(device, wide),
        first_runs.to(device, torch.int32),
    )


@build_once
def sort_groups(graph: Graph, row_map: RowMap) -> tuple[tuple[Bucket, ...], CutGroups | None]:
    """Sort the groups of a map by how many rows they have, so that none waits for a longer one.

    Returns:
        Groups that have a program each or share one, and the longest ones, if any are cut.
    """
    starts = graph.grouped(row_map)[0].cpu().long()
    sizes, groups = torch.sort(starts[1:] - starts[:-1], stable=True)
    bounds = [
        (-1, LIGHT, 4, 64),
        (LIGHT, MIDDLING, 16, 8),
        (MIDDLING, HEAVY, *_HEAVY_LANES),
    ]
    found = []
    for above, most, num_rows, num_groups in bounds:
        of = groups[(sizes > above) & (sizes <= most)]
        if len(of):
            dtype = dtype_for(int(starts[1:][of].max()))
            begins, ends = (each[of].to(graph.device, dtype) for each in (starts[:-1], starts[1:]))
            of = of.to(graph.device, torch.int32)
            found.append(Bucket(num_rows, num_groups, of, begins, ends))
    cut_groups = groups[sizes > HEAVY]
    if not len(cut_groups):
        return tuple(found), None
    cut = _cut_intervals(starts[:-1][cut_groups], starts[1:][cut_groups], PIECE_ROWS, graph.device)
    on_device = cut_groups.to(graph.device, torch.int32)
    of_pieces = on_device.index_select(0, cut.targets)
    pieces = Bucket(*_HEAVY_LANES, of_pieces, cut.begins, cut.ends)
    return tuple(found), CutGroups(on_device, cut, pieces)
