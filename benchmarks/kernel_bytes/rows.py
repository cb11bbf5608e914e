"""Bytes that the kernels of rows ask of memory, as formulas of shapes and indices.

Of `copy_rows`, which copies r rows of R bytes out of n places:

    loaded     the indices of all places, and r R
    stored     the rows of all places that are not passed over, those of zeroes included
    atomic     8 for each tile with a row that is not there

Rows that are no multiple of four bytes are read in words of four, those that a row touches. Of
`add_runs`, with n places, m different rows and W columns of E bytes: `rows` and `order` once for
each place, and once more at each run's end and beginning; m W E of the table, both ways, and n W of
the addends. They are requests, before any cache.
"""

from __future__ import annotations

import torch

from penstock.codegen import ByteCount, ceil_div, ceil_power
from penstock.unified.device._rows import Tile, choose_tile, row_bytes


def copied_bytes(
    source: torch.Tensor,
    source_index: torch.Tensor | None,
    target: torch.Tensor,
    target_index: torch.Tensor | None,
    *,
    negative: bool = False,
    is_checked: bool = False,
    host_is_source: bool = True,
) -> ByteCount:
    """Return the bytes of `copy_rows`, from the indices, which are read; for arguments see there.

    Args:
        source: Rows that are read.
        source_index: Rows of the source by place, or None.
        target: Rows that are written.
        target_index: Rows of the target by place, or None.
        negative: Whether source rows below zero count from the end.
        is_checked: Whether rows that are not there become zeroes, and are reported.
        host_is_source: Whether the source is the table in host memory.
    """
    index = source_index if source_index is not None else target_index
    num_places = len(index) if index is not None else min(len(source), len(target))
    width = row_bytes(source)
    if not num_places or not width:
        return ByteCount(loaded_bytes=0, stored_bytes=0, num_launches=0)
    places = torch.arange(num_places, device="cpu")
    read = places if source_index is None else source_index.long().cpu()
    written = places if target_index is None else target_index.long().cpu()
    if negative:
        read = torch.where(read < 0, read + len(source), read)
    is_there = (read >= 0) & (written >= 0)
    is_stored = is_there
    num_reports, tile = 0, choose_tile(source, target, host_is_source=host_is_source)
    if is_checked:
        is_stored = written >= 0
        is_there = is_there & (read < len(source))
        num_reports = len(torch.unique(places[is_stored & ~is_there] // tile.rows))
    numbers = sum(each.nbytes for each in (source_index, target_index) if each is not None)
    return ByteCount(
        loaded_bytes=numbers + _read_bytes(tile, read[is_there], width),
        stored_bytes=int(is_stored.sum()) * width,
        atomic_bytes=8 * num_reports,
        table_bytes=numbers,
    )


def _read_bytes(tile: Tile, rows: torch.Tensor, width: int) -> int:
    """Return the bytes that reading rows asks for: of narrow ones, whole words of four."""
    if not tile.is_narrow:
        return len(rows) * width
    first = rows * width + tile.base  # in bytes from a line's beginning; words begin with it
    words = (first + width + 3) // 4 - first // 4
    return 4 * int(words.sum())


def added_bytes(
    table: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, source: torch.Tensor
) -> ByteCount:
    """Return the bytes of `add_sorted_rows`, from the rows, which are read.

    Args:
        table: Rows that are added to.
        rows: Rows by place, sorted.
        order: By place the row of the source.
        source: Rows that are added.
    """
    num_places, width = len(rows), table.numel() // max(1, len(table))
    if not num_places or not width:
        return ByteCount(loaded_bytes=0, stored_bytes=0, num_launches=0)
    num_runs, tiles = len(torch.unique(rows)), ceil_div(width, min(1024, ceil_power(width)))
    # Each place reads its row, and but for the first the one before. In each tile of columns a run
    # reads the order of its places, and the rows behind each of them, where there is one.
    numbers = (2 * num_places - 1) * rows.element_size()
    numbers += tiles * (num_places * order.element_size() + (num_places - 1) * rows.element_size())
    values = num_runs * width * table.element_size()
    return ByteCount(
        loaded_bytes=numbers + values + num_places * width * source.element_size(),
        stored_bytes=values,
        table_bytes=numbers,
    )
