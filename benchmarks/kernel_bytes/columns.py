"""Bytes that the kernels of sums of columns ask of memory."""

from __future__ import annotations

from torch import Tensor

from penstock.codegen import ByteCount
from penstock.ops._operands import sum_dtype
from penstock.ops._tiles import choose_tile_rows

_SUM_BYTES = 8


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
