"""Launches of the kernels that sum rows, and the bytes that they ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import ByteCount, Run, TritonLaunch, launch, use_device
from penstock.ops import _kernels
from penstock.ops._columns import choose_tile_rows
from penstock.ops._operands import sum_dtype

_ROWS, _COLUMNS = 16, 64  # of a block: with four warps eight elements of each thread
_SUM_BYTES = 8


class ColumnSizes(NamedTuple):
    """Constants of the kernels: rows and columns of a block; each is a `tl.constexpr`."""

    rows: Any
    columns: Any


def reduce_columns(rows: Tensor, *, run: Run = launch) -> Tensor:
    """Return the sums of the columns of a contiguous matrix, float64; `run` takes the launches."""
    num_rows, num_columns = rows.shape
    tile_rows = choose_tile_rows(num_rows)
    num_tiles = -(-num_rows // tile_rows)
    partials = rows.new_empty(num_tiles, num_columns, dtype=sum_dtype(rows.dtype))
    grid = (num_tiles, -(-num_columns // _COLUMNS))
    arguments = (rows, partials, num_rows, num_columns, tile_rows, _sizes())
    with use_device(rows.device):
        run(TritonLaunch(kernel=_kernels.sum_rows, grid=grid, arguments=arguments))
        return add_partials(partials, run=run)


def add_partials(partials: Tensor, *, run: Run = launch) -> Tensor:
    """Return the sums of `(tiles, columns)` over tiles, float64; `run` takes the launch."""
    num_tiles, num_columns = partials.shape
    sums = torch.empty(num_columns, dtype=torch.float64, device=partials.device)
    arguments = (partials, sums, num_tiles, num_columns, _sizes())
    grid = (-(-num_columns // _COLUMNS),)
    run(TritonLaunch(kernel=_kernels.add_partials, grid=grid, arguments=arguments))
    return sums


def column_bytes(rows: Tensor) -> ByteCount:
    """Return the bytes of `reduce_columns`: each row once, and the partial sums to and fro."""
    num_tiles = -(-rows.shape[0] // choose_tile_rows(rows.shape[0]))
    of_tile = rows.shape[1] * sum_dtype(rows.dtype).itemsize
    first = ByteCount(loaded_bytes=rows.nbytes, stored_bytes=num_tiles * of_tile)
    if num_tiles == 0 or rows.shape[1] == 0:  # it is not launched
        first = ByteCount(loaded_bytes=0, stored_bytes=0, num_launches=0)
    return first + partial_bytes(num_tiles, rows.shape[1], sum_dtype(rows.dtype).itemsize)


def partial_bytes(num_tiles: int, num_columns: int, item_bytes: int) -> ByteCount:
    """Return the bytes of `add_partials`."""
    return ByteCount(
        loaded_bytes=num_tiles * num_columns * item_bytes,
        stored_bytes=num_columns * _SUM_BYTES,
        num_launches=int(num_columns > 0),
    )


def _sizes() -> ColumnSizes:
    return ColumnSizes(tl.constexpr(_ROWS), tl.constexpr(_COLUMNS))
