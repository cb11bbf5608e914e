"""Launches of the kernels that sum rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import Run, TritonLaunch, launch, use_device
from penstock.ops import _kernels
from penstock.ops._operands import sum_dtype
from penstock.ops._tiles import choose_tile_rows

_ROWS, _COLUMNS = 16, 64  # of a block: with four warps eight elements of each thread


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


def _sizes() -> ColumnSizes:
    return ColumnSizes(tl.constexpr(_ROWS), tl.constexpr(_COLUMNS))
