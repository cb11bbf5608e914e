"""Numbers of 4 bits that selectors keep, and their products with queries.

On the CPU the products are computed in C++ (`scores.cpp`) from the packed numbers; elsewhere, or
without a compiler, the numbers are unpacked by torch first.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import THREADS, VECTORS, load_optional_library

_pack_call = struct.Struct("6P13q").pack  # `struct Call` of `scores.cpp`


def pack(numbers: Tensor, bits: int | None) -> list[Tensor]:
    """Return what is kept of `(B, H, N, T, r)`: N blocks of T tokens of r channels.

    Returns:
        With `bits=None` the numbers as they are. With 4, for r even, they are rounded to 16 steps
        between the extremes of a block's channel: uint8 `(B, H, N, r / 2, T)`, and offsets and
        steps, float16 `(B, H, N, r)`.
    """
    if bits is None:
        return [numbers]
    low, high = numbers.float().aminmax(dim=3, keepdim=True)
    offset = low.half()
    step = ((high - offset.float()) / 15).half()
    level = (numbers.float() - offset.float()) / step.float().clamp(min=1e-7)
    level = level.round().clamp(0, 15).to(torch.uint8).transpose(3, 4)
    packed = (level[..., 0::2, :] | (level[..., 1::2, :] << 4)).contiguous()
    return [packed, offset.squeeze(3), step.squeeze(3)]


def unpack(parts: Sequence[Tensor]) -> Tensor:
    """Return the numbers of `pack`, float32 `(B, H, N, T, r)`."""
    if len(parts) == 1:
        return parts[0].float()
    packed, offset, step = parts
    level = torch.stack([packed & 15, packed >> 4], dim=-2).flatten(-3, -2).transpose(3, 4)
    return level.float() * step.float().unsqueeze(3) + offset.float().unsqueeze(3)


def best_products(rows: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the largest product of each row and block.

    Args:
        rows: float32 `(B, H, R, r)`.
        parts: Of `pack`.

    Returns:
        float32 `(B, H, R, N)`.
    """
    found = _reduce_packed(rows, parts, with_sums=False)
    return _products(rows, parts).amax(dim=4) if found is None else found[0]


def best_weights(rows: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return the largest weight of each row and block, after a softmax over all tokens.

    Arguments and result are those of `best_products`.
    """
    # The softmax grows with the product: the largest weight is that of the largest product.
    found = _reduce_packed(rows, parts, with_sums=True)
    if found is None:
        products = _products(rows, parts)
        return (products.amax(dim=4) - products.logsumexp(dim=(3, 4)).unsqueeze(3)).exp()
    best, sums = found
    return (best - (best + sums.log()).logsumexp(dim=3, keepdim=True)).exp()


def _products(rows: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return `(B, H, R, N, T)`."""
    numbers = unpack(parts)
    products = rows @ numbers.flatten(2, 3).transpose(2, 3)
    return products.unflatten(3, numbers.shape[2:4])


def _reduce_packed(
    rows: Tensor, parts: Sequence[Tensor], *, with_sums: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the largest products and, if wanted, sums of exp(product - largest) of each block.

    Returns:
        Both float32 `(B, H, R, N)`; None where torch has to do it.
    """
    if len(parts) == 1 or parts[0].device.type != "cpu" or not parts[0].numel():
        return None
    library = _library()
    if library is None:
        return None
    packed, offset, step = parts
    rows = rows.contiguous()
    batch, heads, num_rows, num_channels = rows.shape
    num_blocks, num_tokens = packed.shape[2], packed.shape[4]
    best = torch.empty(batch, heads, num_rows, num_blocks, dtype=torch.float32, device="cpu")
    sums = torch.empty_like(best if with_sums else best[:0])
    library.penstock_best_products(
        _pack_call(
            *(rows.data_ptr(), packed.data_ptr(), offset.data_ptr(), step.data_ptr()),
            *(best.data_ptr(), sums.data_ptr() if with_sums else 0),
            *(batch, heads, num_rows, num_blocks, num_tokens, num_channels),
            *(*packed.stride()[:2], *offset.stride()[:2], *step.stride()[:2]),
            torch.get_num_threads(),
        )
    )
    return best, sums


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "kv_scores",
        [THREADS, VECTORS, Path(__file__).with_name("scores.cpp")],
        flags=("-O3", "-march=native"),
        functions={"penstock_best_products": (None, [ctypes.c_char_p])},
        work="blocks of a KV cache are scored",
        otherwise="by torch, slower",
    )
