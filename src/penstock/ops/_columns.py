"""Sums over rows in a fixed order: no atomic additions, and bits that do not depend on threads.

Each tile of rows is summed by one thread or program, and the sums of the tiles are added up in
their order, in float64. The tiles follow from the shape alone. `rational` sums gradients so too.
"""

# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.codegen import REALS, THREADS, VECTORS, load_optional_library, name_kernels
from penstock.compat.dispatch import loop_over_batches
from penstock.ops._operands import KINDS, check_operand, sum_dtype
from penstock.ops._tiles import choose_tile_rows

COLUMNS = Path(__file__).with_name("columns.cpp")
"""C++ source of sums over tiles; after `REALS`, before what uses it."""
_pack = struct.Struct("3P5q").pack  # `struct ColumnCall` of `columns.cpp`


def column_reduce(x: Tensor) -> Tensor:
    """Return the sums of a tensor's columns, with the same bits for any number of threads.

    Example:
        >>> column_reduce(torch.ones(2, 500, 3))
        tensor([1000., 1000., 1000.])

    Args:
        x: `(..., C)`, float32, float16, bfloat16 or float64.

    Returns:
        `(C,)`, of the dtype of x. Sums are of float32 at least and rounded once.

    Raises:
        TypeError: x has another dtype.
        ValueError: x has no dimension.
    """
    check_operand("x", x)
    if x.dim() == 0:
        raise ValueError("x has no dimensions, but must be (..., C): give it one with x[None]")
    return _column_reduce(x.reshape(x.shape[:-1].numel(), x.shape[-1]))


@torch.library.custom_op("penstock::column_reduce", mutates_args=())
def _column_reduce(rows: Tensor) -> Tensor:
    """Return the sums of the columns of `(rows, columns)`."""
    path = name_kernels(rows.device.type, lambda: _library() is not None)
    if path == "Triton":
        from penstock.ops._column_launch import reduce_columns

        return reduce_columns(rows.contiguous()).to(rows.dtype)
    return (_sum_by_cpp if path == "C++" else _sum_by_torch)(rows).to(rows.dtype)


@_column_reduce.register_fake
def _(rows):
    return rows.new_empty(rows.shape[1])


def _keep_shape(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _differentiate(ctx: Any, dsums: Tensor) -> Tensor:
    return dsums.expand(ctx.shape)


_column_reduce.register_autograd(_differentiate, setup_context=_keep_shape)
loop_over_batches(_column_reduce)


def _sum_by_torch(rows: Tensor) -> Tensor:
    """Sum tile by tile, so that the bits are those of one tile's sum by torch."""
    dtype = sum_dtype(rows.dtype)
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for tile in rows.split(choose_tile_rows(len(rows))):
        total += tile.sum(0, dtype=dtype)
    return total


def _sum_by_cpp(rows: Tensor) -> Tensor:
    rows, (num_rows, num_columns) = rows.contiguous(), rows.shape
    tile_rows = choose_tile_rows(num_rows)
    sums = torch.empty(num_columns, dtype=torch.float64, device="cpu")
    partials = torch.empty(
        -(-num_rows // tile_rows), num_columns, dtype=torch.float64, device="cpu"
    )
    library = _library()
    assert library is not None, "there is a path without the library"
    pointers = rows.data_ptr(), partials.data_ptr(), sums.data_ptr()
    of_call = (num_rows, num_columns, tile_rows, KINDS[rows.dtype], torch.get_num_threads())
    library.penstock_column_reduce(_pack(*pointers, *of_call))
    return sums


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "column_reduce",
        [THREADS, VECTORS, REALS, COLUMNS, Path(__file__).with_name("column_reduce.cpp")],
        flags=("-O3", "-march=native"),
        functions={"penstock_column_reduce": (None, [ctypes.c_char_p])},
        work="sums of columns are computed",
        otherwise="by torch, slower",
    )
