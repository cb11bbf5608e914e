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
    """Return attention and the log-sum-exp of its scores, without holding scores.

    Args:
        query: `(B, H, n, dim)`.
        keys: `(B, H, m, dim)`.
        values: `(B, H, m, dim)`.
        scale: Factor of the scores.
        is_causal: Whether query i sees keys up to i only.

    Returns:
        `(B, H, n, dim)` and `(B, H, n)`.
    """
    aten = torch.ops.aten
    if not query.is_cuda:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, 0.0, is_causal, scale=scale)
    if query.dtype == torch.float32:
        kernel = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(query, keys, values, None, True, 0.0, is_causal, scale=scale)
        return out, lse[..., : query.shape[2]]  # it is longer, for the backward pass
    kernel = aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(query, keys, values, 0.0, is_causal, scale=scale)
    return out, lse


def has_flash_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether `flash_attention` takes tensors of these dtypes, widths and places."""
    dim = keys.shape[3]
    if values.shape[3] != dim:
        return False
    if not query.is_cuda:
        return True
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if torch.version.hip or query.dtype != keys.dtype or not (is_half or query.dtype.itemsize == 4):
        return False
    if is_half and (dim > 256 or torch.cuda.get_device_capability(query.device) < (8, 0)):
        return False
    is_aligned = all(each.data_ptr() % 16 == 0 for each in (query, keys, values))
    return is_aligned and dim * query.dtype.itemsize % 16 == 0


def make_shape_only(
    kind: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of a subclass with `__torch_dispatch__`, without memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def leaves(tree: object) -> list[Any]:
    """Return what lies in nested tuples, lists and dictionaries, as operators' arguments do."""
    return tree_leaves(tree)
