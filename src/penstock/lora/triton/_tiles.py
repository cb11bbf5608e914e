"""Tile sizes of the kernels: one table by dtype, without a search at run time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from penstock.codegen import ceil_power

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of x, the weight and the adapters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes; rows are those of a batch, columns those of a result, inner what is summed over.

    Attributes:
        rank: Columns of S that a program has; a larger rank is cut.
        down_rows: Rows of the down-projection.
        down_inner: Inner elements of the down-projection.
        base_rows: Rows of the base product.
        base_columns: Columns of the base product.
        base_inner: Inner elements of the base product.
        base_rank: Columns of S that the base product takes at a time.
        base_warps: Warps of the base product.
        gradient_rows: Rows that both gradients take at a time.
        up_columns: Columns of dY of a program for dB.
        down_columns: Columns of x of a program for dA.
        rank_warps: Warps of the down-projection and of both gradients.
        added: Elements of a program that adds partial sums.
    """

    rank: int
    down_rows: int
    down_inner: int
    base_rows: int
    base_columns: int
    base_inner: int
    base_rank: int
    base_warps: int
    gradient_rows: int
    up_columns: int
    down_columns: int
    rank_warps: int
    added: int = 1024


def choose_tiles(dtype: torch.dtype, adapter_dtype: torch.dtype, ranks: Sequence[int]) -> Tiles:
    """Choose tile sizes, such that no kernel spills registers on sm_90 or gfx942.

    Args:
        dtype: Of x.
        adapter_dtype: Of the adapters, in which products of rank r are computed.
        ranks: By adapter its rank.

    Raises:
        TypeError: A dtype has no kernels.
    """
    for each in (dtype, adapter_dtype):
        if each not in DTYPES:
            raise TypeError(
                f"x has the dtype {dtype} and the adapters {adapter_dtype}; the Triton kernels "
                "accept torch.float32, torch.float16 and torch.bfloat16: convert them, or move the "
                "layer to the CPU"
            )
    # Float32 is multiplied in registers on sm_90, so its tiles are smaller.
    is_half, is_base_half = adapter_dtype.itemsize == dtype.itemsize == 2, dtype.itemsize == 2
    factor = find_rank_factor(ranks)
    longest = 128 if factor >= 4 else 64  # odd ranks need a mask for each element
    rank = min(longest if is_half else 64, ceil_power(max(ranks, default=1), 16))
    up_columns = {16: 256, 32: 256, 64: 128, 128: 128} if factor >= 8 else {16: 128, 32: 128}
    return Tiles(
        rank=rank,
        down_rows=64 if is_half else 32,
        down_inner=64 if is_half else 32,
        base_rows=128 if is_base_half else 64,
        base_columns=128 if is_half else 64,
        base_inner=64 if is_base_half else 32,
        base_rank=min(rank, 64 if is_half else 16),
        base_warps=8 if is_base_half else 4,
        gradient_rows=64 if is_half else 32,
        up_columns=up_columns.get(rank, 64) if is_half else (64 if rank == 16 else 32),
        down_columns=128 if is_half else 64,
        rank_warps=8 if rank == (128 if is_half else 64) else 4,
    )


def find_rank_factor(ranks: Sequence[int]) -> int:
    """Return the power of two, at most 16, of which all ranks are multiples.

    Rows of S and B then begin at multiples of it, and are read in as wide words.
    """
    return math.gcd(16, *ranks)
