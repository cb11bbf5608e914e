"""Attention of torch that also returns the log-sum-exp, and tensors that have a shape only."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def flash_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention on the CPU, and the log-sum-exp of its scores, without holding scores.

    Args:
        query: `(B, H, n, dim)`.
        keys: `(B, H, m, dim)`.
        values: `(B, H, m, dim)`.
        scale: Factor of the scores.
        is_causal: Whether query i sees keys up to i only.

    Returns:
        `(B, H, n, dim)` and `(B, H, n)`.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, keys, values, 0.0, is_causal, scale=scale)


def make_shape_only(
    kind: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor of a subclass with `__torch_dispatch__`, on the CPU, without memory."""
    device = torch.device("cpu")
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def leaves(tree: object) -> list[Any]:
    """Return what lies in nested tuples, lists and dictionaries, as operators' arguments do."""
    return tree_leaves(tree)
