"""Copies of records between addresses: one program for each record, all in one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from torch import Tensor

from penstock.codegen import TritonLaunch, ceil_power
from penstock.kv.triton import _kernels

_TILE_BYTES = 16 * 1024  # of a program that are on their way at once: 128 bytes of each thread
_NUM_WARPS = 4
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int32}
"""By the bytes that divide all addresses and lengths; 16 are four words, which a thread has."""


def common_alignment(num_bytes: int, *addresses: np.ndarray) -> int:
    """Return the largest power of two up to 16 that divides a length and all addresses."""
    bits = 16 | num_bytes
    for each in addresses:
        bits |= int(np.bitwise_or.reduce(each, initial=0))
    return bits & -bits


def copy_launch(table: Tensor, num_bytes: int, alignment: int) -> TritonLaunch:
    """Return the launch of copies.

    Args:
        table: Addresses of the destinations and of the sources, int64 `(2, n)` on the GPU: of its
            own memory, or of registered host memory. None of the pieces overlap.
        num_bytes: Bytes of a piece, at least 1.
        alignment: As of `common_alignment`.
    """
    word = _WORDS[alignment]
    num_words = num_bytes // (word.primitive_bitwidth // 8)
    most: Any = _TILE_BYTES // (word.primitive_bitwidth // 8)
    return TritonLaunch(
        kernel=_kernels.copy_records,
        grid=(table.shape[1],),
        arguments=(table[0], table[1]),
        constants={
            "WORD": word,
            "ALIGNED": alignment == 16,
            "NUM_WORDS": num_words,
            "TILE_WORDS": min(most, ceil_power(num_words)),
        },
        num_warps=_NUM_WARPS,
    )
