"""Triton kernels of sums over rows; importing this imports Triton.

    sum_rows        partials[tile][column] = sum of the rows of a tile
    add_partials    sums[column] = sum of partials, tile by tile, in float64

No atomics: a sum has one writer, and a fixed order.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "tile_rows"])
def sum_rows(rows, partials, num_rows, num_columns, tile_rows, sizes):
    """Sum a tile of rows, for a block of columns."""
    tile = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * sizes.columns + tl.arange(0, sizes.columns)
    is_column = column < num_columns
    end = tl.minimum((tile + 1) * tile_rows, num_rows)
    sums = tl.zeros([sizes.rows, sizes.columns], partials.dtype.element_ty)
    for first in range(tile * tile_rows, end, sizes.rows):
        row = first + tl.arange(0, sizes.rows)
        mask = (row < end)[:, None] & is_column[None, :]
        pointers = rows + row.to(tl.int64)[:, None] * num_columns + column[None, :]
        sums += tl.load(pointers, mask=mask, other=0.0).to(sums.dtype)
    tl.store(partials + tile * num_columns + column, tl.sum(sums, 0), mask=is_column)


@triton.jit(do_not_specialize=["num_tiles"])
def add_partials(partials, sums, num_tiles, num_columns, sizes):
    """Add up the sums of all tiles, for a block of columns."""
    column = tl.program_id(0) * sizes.columns + tl.arange(0, sizes.columns)
    is_column = column < num_columns
    total = tl.zeros([sizes.rows, sizes.columns], tl.float64)
    for first in range(0, num_tiles, sizes.rows):
        tile = first + tl.arange(0, sizes.rows)
        mask = (tile < num_tiles)[:, None] & is_column[None, :]
        pointers = partials + tile.to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float64)
    tl.store(sums + column, tl.sum(total, 0), mask=is_column)
