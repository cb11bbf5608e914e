"""Dropout masks that are made again instead of stored, from a counter.

Whether an element is kept depends on the seed, the row's number and the column alone, so the
backward pass makes the mask of the forward pass again, on any device, in any order of the rows:

    mix(h):     h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    key(row)  = mix(mix(mix(seed_low) + seed_high) + row)
    word      = mix(key(row) + column * 0x9e3779b9)
    kept     <=> word >= threshold,    threshold = min(round(p * 2**32), 2**32 - 1)

All numbers are unsigned, of 32 bits, and wrap. The constants of `mix` are those of a search for a
small bias of such functions (C. Wellons, "Prospecting for Hash Functions", 2018). The mask only
selects: the factor 1 / (1 - p) goes into a product of rank r, where it costs nothing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
from pathlib import Path
from typing import TypeVar

import torch

from penstock.codegen import THREADS, load_optional_library

TILE_ROWS = 512
"""Rows that are masked at a time; the copy of them is all that is ever stored of a masked input."""

_Word = TypeVar("_Word", int, torch.Tensor)
_WORD = 0xFFFFFFFF
_FEW_ELEMENTS = 1 << 15  # are masked before a second thread is awake
_ACCUMULATED = (torch.float32, torch.float64)
_pack_rows = struct.Struct("13q").pack  # `struct Rows` of `dropout.cpp`, faster than by ctypes


def to_threshold(probability: float) -> int:
    """Return the least word whose element is kept, for a probability of dropping in [0, 1)."""
    return min(round(probability * 2**32), _WORD)


def keep(
    seed: int, first: int, num_rows: int, num_columns: int, probability: float, device: torch.device
) -> torch.Tensor:
    """Return the mask of some rows, computed by torch: bool of shape `(num_rows, num_columns)`.

    Args:
        seed: 64 bits, signed or unsigned.
        first: Number of the first row.
        num_rows: Rows of the mask.
        num_columns: Columns of the mask.
        probability: Probability of dropping an element, in [0, 1).
        device: Device of the mask.
    """
    rows = torch.arange(first, first + num_rows, device=device) & _WORD
    seeds = torch.full((1,), seed & _WORD, device=device)
    keys = mix_words((mix_words(seeds) + ((seed >> 32) & _WORD)) & _WORD)
    keys = mix_words((keys + rows) & _WORD)
    columns = torch.arange(num_columns, device=device) * 0x9E3779B9
    return mix_words((keys[:, None] + columns) & _WORD) >= to_threshold(probability)


def mix_words(word: _Word) -> _Word:
    """Return the function `mix` of words of 32 bits; of int64 tensors the low half is exact."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of one adapter's rows.

    Attributes:
        seed: 64 bits.
        probability: Probability of dropping an element, in [0, 1).
    """

    seed: int
    probability: float

    def select(self, rows: torch.Tensor, first: int, out: torch.Tensor) -> torch.Tensor:
        """Write rows to `out`, zero where they are dropped.

        Args:
            rows: Shape `(n, K)`.
            first: Number of the first of the rows within the adapter's.
            out: Contiguous memory of `rows`' dtype and shape.
        """
        if not _call_native(rows, out, self, first, accumulate=False):
            kept = keep(
                self.seed, first, rows.shape[0], rows.shape[1], self.probability, rows.device
            )
            out.copy_(rows.masked_fill(~kept, 0))
        return out

    def add_selected(self, total: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Add rows to `total` where they are kept; `rows` may be overwritten.

        Args:
            total: Shape `(n, K)`.
            rows: Contiguous, of the same shape and dtype.
            first: Number of the first of the rows within the adapter's.
        """
        if total.dtype not in _ACCUMULATED or not _call_native(
            rows, total, self, first, accumulate=True
        ):
            total.add_(self.select(rows, first, rows))


def _call_native(
    source: torch.Tensor, target: torch.Tensor, mask: Mask, first: int, *, accumulate: bool
) -> bool:
    """Mask rows in C++; False where that is not possible."""
    if source.device.type != "cpu" or source.stride(-1) != 1 or target.stride(-1) != 1:
        return False
    if source.is_neg():
        return False
    library = _library()
    if library is None:
        return False
    arguments = _pack_rows(
        source.data_ptr(),
        target.data_ptr(),
        *source.shape,
        source.stride(0),
        target.stride(0),
        source.element_size(),
        mask.seed & _WORD,
        (mask.seed >> 32) & _WORD,
        first & _WORD,
        to_threshold(mask.probability),
        accumulate,
        torch.get_num_threads() if source.numel() > _FEW_ELEMENTS else 1,
    )
    library.penstock_mask_rows(arguments)
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "lora_dropout",
        [THREADS, Path(__file__).with_name("dropout.cpp")],
        flags=("-O3", "-march=native", "-ffp-contract=off"),
        functions={"penstock_mask_rows": (None, [ctypes.c_char_p])},
        work="dropout masks of LoRA are made",
        otherwise="by torch",
    )
