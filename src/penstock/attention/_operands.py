"""Memory of operands, results and gradients, the same for all paths."""

from __future__ import annotations

import torch
from torch import Tensor


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
