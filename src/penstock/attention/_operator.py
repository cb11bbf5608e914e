"""The operators of block-sparse attention, with gradients, fake kernels and FLOPs.

Layouts reach them as lists of tensors. Autograd keeps queries, keys, values, the output and its
log-sum-exp: all linear in the tokens.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.attention._layout import Layout
from penstock.attention._operands import BlockOperands, empty_gradient, empty_results
from penstock.attention._paths import kernels_for
from penstock.compat.autograd import is_eager
from penstock.compat.dispatch import loop_over_batches, refuse_batched


@torch.library.custom_op("penstock::blocksparse_forward", mutates_args=())
def blocksparse_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    arrays: Sequence[Tensor],
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, as `_torch.forward` says."""
    layout = Layout.of_arrays(arrays, block)
    return kernels_for(q).forward(BlockOperands(q, k, v, layout, bias, scale))


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    arrays: Sequence[Tensor],
    block: int,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, where there is one, of the bias."""
    given = BlockOperands(q, k, v, Layout.of_arrays(arrays, block), bias, scale)
    grads = kernels_for(q).backward(dout, given, out, lse)
    return [each for each in grads if each is not None]


blocksparse_backward = torch.library.custom_op(
    "penstock::blocksparse_backward", _backward, mutates_args=()
)


@blocksparse_forward.register_fake
def _(q, k, v, bias, arrays, block, scale):
    return empty_results(q, v)


@blocksparse_backward.register_fake
def _(dout, q, k, v, out, lse, bias, arrays, block, scale):
    grads = [empty_gradient(each) for each in (q, k, v)]
    return grads if bias is None else [*grads, bias.new_empty(bias.shape)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, arrays, block, scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, bias, *arrays)
    ctx.block, ctx.scale = block, scale


def _differentiate(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, bias, *arrays = ctx.saved_tensors
    if dout is None:
        return None, None, None, None, [None] * len(arrays), None, None
    refuse_batched("penstock.attention.blocksparse", dout)
    # With create_graph, by the operator, which refuses to be differentiated.
    is_direct = is_eager(dout, q, k, v, bias) and not torch.is_grad_enabled()
    run = _backward if is_direct else blocksparse_backward
    dq, dk, dv, *rest = run(dout, q, k, v, out, lse, bias, arrays, ctx.block, ctx.scale)
    return dq, dk, dv, *(rest or [None]), [None] * len(arrays), None, None


blocksparse_forward.register_autograd(_differentiate, setup_context=_keep)


class _BlockSparse(torch.autograd.Function):
    """The operators as `attend_directly` has them."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> tuple[Tensor, Tensor]:
        q, k, v, layout, bias, scale = given = BlockOperands(*operands)
        found = kernels_for(q).forward(given)
        _keep(ctx, (q, k, v, bias, layout.arrays, layout.block, scale), found)
        return found

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grad_outputs
        dq, dk, dv, dbias, *_ = _differentiate(ctx, dout, dlse)
        return dq, dk, dv, None, dbias, None


def attend_directly(given: BlockOperands) -> Tensor:
    """Return the attention without the dispatcher, with gradients; for calls that are eager."""
    return _BlockSparse.apply(*given)[0]


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the gradient of penstock.attention.blocksparse has no gradient of its own: for second "
        "derivatives compute torch.nn.functional.scaled_dot_product_attention with "
        "attn_mask=layout.token_mask() under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


blocksparse_backward.register_autograd(_refuse)
loop_over_batches(blocksparse_backward)


def _count_pairs(q, arrays, block: int) -> int:
    """Return pairs of a query and a key in listed blocks, of all sequences and heads."""
    (num_heads, _), (num_blocks,) = arrays[0], arrays[1]
    return q[0] * (q[1] // num_heads) * num_blocks * block * block


@register_flop_formula(torch.ops.penstock.blocksparse_forward)
def _count_forward(q, k, v, bias, arrays, block, *_, **__) -> int:
    """Count the products QK' and PV."""
    return 2 * _count_pairs(q, arrays, block) * (q[3] + v[3])


@register_flop_formula(torch.ops.penstock.blocksparse_backward)
def _count_backward(dout, q, k, v, out, lse, bias, arrays, block, *_, **__) -> int:
    """Count QK', dS K and dS' Q, of the head dim, and dO V' and P' dO, of the value dim."""
    return 2 * _count_pairs(q, arrays, block) * (3 * q[3] + 2 * v[3])
