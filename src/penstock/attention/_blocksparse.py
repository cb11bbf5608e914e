"""The function `blocksparse`: checks of its operands, and its path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.attention._arguments import check_tensors
from penstock.attention._layout import Layout
from penstock.attention._operands import BlockOperands, sum_dtype
from penstock.attention._operator import attend_directly, blocksparse_forward
from penstock.attention._paths import choose_path
from penstock.attention._torch import attend
from penstock.compat.autograd import autocast_dtype, is_eager, is_transformed

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def blocksparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of queries over the keys that a layout lets them see.

        s_ij = scale q_i . k_j + bias_j        out_i = sum_j softmax_j(s_ij) v_j

    Time follows the listed blocks and memory the tokens, forward and backward, by the tiles and the
    online softmax of FlashAttention (Dao et al., arXiv:2205.14135, sections 3.1 and 3.3). Bits do
    not depend on the run or on the number of threads, but for layouts that go to SDPA, whose bits
    are its own; `blocksparse_report` tells the path.

    Example:
        >>> q, k, v = torch.randn(3, 1, 8, 256, 64)
        >>> blocksparse(q, k, v, Layout.documents([100, 30, 126])).shape
        torch.Size([1, 8, 256, 64])

    Args:
        q: `(B, Hq, N, d)`, float16, bfloat16, float32 or float64. Sums are float32 at least.
        k: `(B, H, M, d)`; query heads `h * G` to `h * G + G`, G = Hq / H, share KV head h.
        v: `(B, H, M, dv)`.
        layout: Blocks and ranges, on the device of q, for 1 head or Hq.
        bias: Floating, `(M,)`, `(Hq or 1, M)` or `(B or 1, Hq or 1, M)`; may need a gradient.
        scale: Factor of the products; None for 1 / sqrt(d).

    Returns:
        `(B, Hq, N, dv)` of the dtype of q, or of autocast. A query that sees nothing has the output
        0 and gradients of 0. There is no second derivative. Transformations of `torch.func` and
        derivatives of forward mode go through torch, with the weights of all listed blocks.

    Raises:
        TypeError: Dtypes differ or are not supported, the scale is a tensor, or `layout` is none.
        ValueError: A shape or a device does not fit.
    """
    check_tensors(q=q, k=k, v=v, bias=bias)
    q, k, v = _cast([q, k, v])
    return _attend(q, k, v, layout, bias, scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, scale: float | None
) -> Tensor:
    check_operands(q, k, v, layout)
    bias = expand_bias(bias, q, k)
    factor = read_scale(scale, q)
    if choose_path(q, layout, bias, factor).name != "SDPA":
        if not torch.compiler.is_compiling() and is_transformed():
            return attend(q, k, v, layout, bias, factor)
        if is_eager(q, k, v, bias):
            return attend_directly(BlockOperands(q, k, v, layout, bias, factor))
        return blocksparse_forward(q, k, v, bias, layout.arrays, layout.block, factor)[0]
    return scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=layout.pattern == "causal",
        scale=factor,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _cast(operands: list[Tensor]) -> list[Tensor]:
    """Return operands in the dtype of autocast, where it is on; never of float64, as torch does."""
    dtype = autocast_dtype(operands[0].device.type)
    if dtype is None:
        return operands
    return [
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each
        for each in operands
    ]


def read_scale(scale: float | None, q: Tensor) -> float:
    """Return the factor of the products."""
    if isinstance(scale, Tensor):
        raise TypeError(
            f"scale is a tensor, {scale!r}, which would get no gradient: pass a number, and "
            "multiply q by a factor that is learned"
        )
    try:
        return q.shape[3] ** -0.5 if scale is None else float(scale)
    except (TypeError, ValueError):
        raise TypeError(f"scale is {scale!r}, but must be a number, or None") from None


def check_operands(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Refuse operands that do not fit each other or the layout."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is {layout!r:.200}, but must be a Layout: make one, as by "
            "Layout.causal(num_tokens)"
        )
    if q.dtype not in _DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise TypeError(
            f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}, but must have one of "
            "float16, bfloat16, float32 and float64: convert them"
        )
    shapes = f"q, k and v have the shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}, but must have (B, Hq, N, d), (B, H, M, d) and (B, H, M, dv)")
    (batch, heads, num_queries, dim), (_, kv_heads, num_keys, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != dim or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{shapes}, but must have (B, Hq, N, d), (B, H, M, d) and (B, H, M, dv)")
    if 0 in (heads, kv_heads, dim, v.shape[3]) or heads % kv_heads:
        raise ValueError(
            f"{shapes}: the query heads must be a multiple of the KV heads, and none may be 0"
        )
    if {k.device, v.device, layout.device} != {q.device}:
        raise ValueError(
            f"q, k, v and layout are on {q.device}, {k.device}, {v.device} and {layout.device}, "
            "but must be on one device: move them, as by layout.to(q.device)"
        )
    # Not looked for in a tuple, where the open numbers of a traced graph are none of its elements.
    if layout.num_heads != 1 and layout.num_heads != heads:
        raise ValueError(
            f"layout has {layout.num_heads} heads, but must have 1 or those of q, {heads}"
        )
    _check_tokens("q", num_queries, layout.num_queries, layout.num_query_blocks, layout.block)
    _check_tokens("k", num_keys, layout.num_keys, layout.num_key_blocks, layout.block)


def _check_tokens(
    name: str, num_tokens: int, expected: int | None, num_blocks: int, block: int
) -> None:
    if expected is not None and num_tokens != expected:
        raise ValueError(f"{name} has {num_tokens} tokens, but layout is for {expected}")
    if -(-num_tokens // block) != num_blocks:
        raise ValueError(
            f"{name} has {num_tokens} tokens, but layout has {num_blocks} blocks of {block}, which "
            f"are {(num_blocks - 1) * block + 1} to {num_blocks * block} tokens"
        )


def expand_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the bias as `(B, Hq, M)` of the dtype of sums."""
    if bias is None:
        return None
    if not bias.is_floating_point() or bias.device != q.device:
        raise TypeError(
            f"bias has the dtype {bias.dtype} on {bias.device}, but must be floating on {q.device}"
        )
    shape = (q.shape[0], q.shape[1], k.shape[2])
    widths = bias.shape[::-1]
    if not 1 <= bias.dim() <= 3 or not all(
        width == full or (i > 0 and width == 1)
        for i, (width, full) in enumerate(zip(widths, shape[::-1], strict=False))
    ):
        raise ValueError(
            f"bias has the shape {tuple(bias.shape)}, but must have (M,), (Hq or 1, M) or (B or 1, "
            f"Hq or 1, M) for B = {shape[0]}, Hq = {shape[1]} and M = {shape[2]}"
        )
    return bias.to(sum_dtype(q)).expand(shape)
