"""Reports: the path that a call takes, and the work that its layout leaves."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from penstock.attention._arguments import check_tensors
from penstock.attention._blocksparse import check_operands, expand_bias, read_scale
from penstock.attention._layout import Layout
from penstock.attention._paths import choose_path
from penstock.tables import Report


@dataclasses.dataclass(frozen=True)
class AttentionReport(Report, title="block-sparse attention"):
    """A call of `blocksparse`, before it runs.

    Attributes:
        path: "SDPA", "C++", "Triton" or "torch".
        reason: Why this path is taken.
        density: Listed blocks as a share of all.
        num_blocks: Listed blocks of all sequences and heads.
        num_partial_blocks: Those of them in which some tokens are hidden.
        forward_flops: Floating-point operations of the products over listed blocks.
        backward_flops: The same of the backward pass, with the scores computed once more.
        saved_bytes: Bytes of the output and its log-sum-exp, which autograd keeps beside q, k, v.
    """

    path: str
    reason: str
    density: float
    num_blocks: int
    num_partial_blocks: int
    forward_flops: int
    backward_flops: int
    saved_bytes: int


def blocksparse_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> AttentionReport:
    """Return the path that `blocksparse` takes for operands, with the reason and the work.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 8, 256, 64)
        >>> blocksparse_report(q, q, q, Layout.from_blocks(torch.ones(1, 4, 4).bool())).path
        'SDPA'

    Args:
        q: As of `blocksparse`, like all others.
        k: Keys.
        v: Values.
        layout: Blocks and ranges.
        bias: Added to the scores.
        scale: Factor of the products.

    Raises:
        TypeError: As `blocksparse`.
        ValueError: As `blocksparse`.
    """
    check_tensors(q=q, k=k, v=v, bias=bias)
    check_operands(q, k, v, layout)
    bias = expand_bias(bias, q, k)
    path = choose_path(q, layout, bias, read_scale(scale, q))
    copies = q.shape[0] * q.shape[1] // layout.num_heads
    pairs = copies * layout.num_blocks * layout.block**2
    dim, value_dim = q.shape[3], v.shape[3]
    sums = 8 if q.element_size() == 8 else 4
    return AttentionReport(
        path=path.name,
        reason=path.reason,
        density=layout.density,
        num_blocks=copies * layout.num_blocks,
        num_partial_blocks=copies * int(layout.is_partial.sum()),
        forward_flops=2 * pairs * (dim + value_dim),
        backward_flops=2 * pairs * (3 * dim + 2 * value_dim),
        saved_bytes=q.shape[:3].numel() * (value_dim * q.element_size() + sums),
    )
