"""Rows of random bits, and whether two tensors have the same."""

from __future__ import annotations

import torch

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
]


def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every bit random, so that special values occur; but no other bytes than 0 and 1 in bools."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    flat = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    as_bytes = [each.contiguous().view(-1).view(torch.uint8).cpu() for each in (found, expected)]
    return found.shape == expected.shape and torch.equal(*as_bytes)
