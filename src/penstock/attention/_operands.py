"""Operands of a call, and the memory of results and gradients, the same for all paths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.attention._layout import Layout


class BlockOperands(NamedTuple):
    """Operands of block-sparse attention, checked.

    Attributes:
        q: `(B, Hq, N, d)`, float16, bfloat16, float32 or float64, of any strides.
        k: `(B, H, M, d)`, of the same dtype; H divides Hq, and query heads `h * G` to `h * G + G`
            share KV head h.
        v: `(B, H, M, dv)`, of the same dtype.
        layout: The blocks, on the device of q; of 1 head or Hq.
        bias: `(B, Hq, M)`, float64 where q is and else float32; strides may be 0. None for none.
        scale: Factor of the products.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    bias: Tensor | None
    scale: float


def sum_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 where q is, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the output, which lies as `(B, N, Hq, dv)`, and for the log-sum-exp."""
    (batch, heads, tokens, _), dim = q.shape, v.shape[3]
    # Not a view of other memory, which autograd would not let be changed in place.
    strides = (tokens * heads * dim, dim, heads * dim, 1)
    out = q.new_empty_strided((batch, heads, tokens, dim), strides)
    return out, q.new_empty(q.shape[:3], dtype=sum_dtype(q))


def empty_gradient(operand: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a gradient, with rows that lie together and else in the operand's order."""
    if operand.stride(-1) == 1:
        return torch.empty_like(operand, dtype=dtype)
    return torch.empty_like(operand, dtype=dtype, memory_format=torch.contiguous_format)


def with_whole_rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension lies together, copied where it does not."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()
