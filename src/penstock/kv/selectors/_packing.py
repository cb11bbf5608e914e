"""Packing of what selectors keep: two numbers in a byte, a step and an offset per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_4bit(numbers: Tensor) -> list[Tensor]:
    """Round `(B, H, N, T, r)` to 16 steps between the extremes of a block's channel.

    Returns:
        uint8 `(B, H, N, T, r / 2)`, and offsets and steps, float16 `(B, H, N, 1, r)`.
    """
    low, high = numbers.float().aminmax(dim=3, keepdim=True)
    offset = low.half()
    step = ((high - offset.float()) / 15).half()
    level = (numbers.float() - offset.float()) / step.float().clamp(min=1e-7)
    level = level.round().clamp(0, 15).to(torch.uint8)
    return [level[..., 0::2] | (level[..., 1::2] << 4), offset, step]


def unpack_4bit(parts: Sequence[Tensor]) -> Tensor:
    """Return the numbers of `pack_4bit`, float32 `(B, H, N, T, r)`."""
    packed, offset, step = parts
    level = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return level.float() * step.float() + offset.float()
