"""Tile sizes of the kernels: one table by dtype, without a search at run time."""

from __future__ import annotations

import dataclasses

import torch


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
        gradient_rows: Rows that both gradients take at a time.
        up_columns: Columns of dY of a program for dB.
        down_columns: Columns of x of a program for dA.
        added: Elements of a program that adds partial sums.
        base_warps: Warps of the base product; all others have four.
    """

    rank: int
    down_rows: int
    down_inner: int
    base_rows: int
    base_columns: int
    base_inner: int
    base_rank: int
    gradient_rows: int
    up_columns: int
    down_columns: int
    added: int = 1024
    base_warps: int


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of x and the weight."""
MIN_RANK, MAX_RANK = 16, {2: 128, 4: 64}
"""Columns of S of a program: a matrix instruction takes at least 16. By bytes of an element."""
_MOST_SUMS = 8192
"""Elements of a program's partial gradient: with four warps, 64 registers of each thread."""


def choose_tiles(dtype: torch.dtype, max_rank: int) -> Tiles:
    """Choose tile sizes for layers of a dtype whose adapters have at most some rank.

    Raises:
        TypeError: The dtype has no kernels.
    """
    if dtype not in DTYPES:
        raise TypeError(
            f"x has the dtype {dtype}; the Triton kernels accept torch.float32, torch.float16 and "
            "torch.bfloat16: convert it, or move the layer to the CPU"
        )
    rank = min(MAX_RANK[dtype.itemsize], max(MIN_RANK, 1 << max(0, max_rank - 1).bit_length()))
    if dtype.itemsize == 2:
        return Tiles(
            rank=rank,
            **{"down_rows": 64, "down_inner": 64},
            **{"base_rows": 128, "base_columns": 128, "base_inner": 64, "base_rank": min(rank, 64)},
            **{"gradient_rows": 64, "up_columns": min(256, _MOST_SUMS // rank)},
            down_columns=min(128, _MOST_SUMS // rank),
            base_warps=8,
        )
    return Tiles(
        rank=rank,
        **{"down_rows": 32, "down_inner": 32},
        **{"base_rows": 64, "base_columns": 64, "base_inner": 32, "base_rank": min(rank, 32)},
        **{"gradient_rows": 32, "up_columns": 64, "down_columns": 64},
        base_warps=4,
    )
