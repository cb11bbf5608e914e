"""The operator of `linear`, with its backward, its form under `torch.compile`, and its FLOPs.

Autograd keeps the input, which the layer before shares, and the products of rank r. The dropout
mask is made again. A backward pass that is to be differentiated itself goes through operators that
autograd knows.
"""

# pyright: reportFunctionMemberAccess=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN002, ANN003

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.lora import _products
from penstock.lora._dropout import Mask


def uses_of(
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    order: Tensor | None,
    counts: Sequence[int],
    starts: Sequence[int],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    seeds: Sequence[int],
) -> list[_products.AdapterUse]:
    """Return the adapters with their rows, from the operands of a call."""
    parts = [None] * len(counts) if order is None else order.split(list(counts))
    return [
        _products.AdapterUse(
            down=downs[i],
            up=ups[i],
            factor=scalings[i] / (1 - dropouts[i]),
            mask=Mask(seed=seeds[i], probability=dropouts[i]) if dropouts[i] else None,
            start=starts[i],
            num_rows=counts[i],
            index=parts[i] if starts[i] < 0 else None,
        )
        for i in range(len(counts))
    ]


@torch.library.custom_op("penstock::lora_forward", mutates_args=())
def run_operator(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    order: Tensor | None,
    counts: Sequence[int],
    starts: Sequence[int],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    seeds: Sequence[int],
) -> tuple[Tensor, Tensor]:
    uses = uses_of(downs, ups, order, counts, starts, scalings, dropouts, seeds)
    return _products.forward(x, weight, bias, total, uses)


@run_operator.register_fake
def _(x, weight, bias, total, downs, ups, order, counts, *_):  # noqa: ANN202
    size = sum(count * down.shape[0] for count, down in zip(counts, downs, strict=True))
    dtype = downs[0].dtype if downs else x.dtype
    y = x.new_empty(x.shape[0], weight.shape[0]) if total is None else torch.empty_like(total)
    return y, x.new_empty(size, dtype=dtype)


@torch.library.custom_op("penstock::lora_backward", mutates_args=())
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    hidden: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    order: Tensor | None,
    counts: Sequence[int],
    starts: Sequence[int],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    seeds: Sequence[int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """Return the gradients that are asked for: by `needs` of x, then of each down, then each up."""
    num = len(downs)
    gradients = _products.backward(
        dy,
        x,
        weight,
        hidden,
        uses_of(downs, ups, order, counts, starts, scalings, dropouts, seeds),
        needs_x=needs[0],
        needs_down=list(needs[1 : num + 1]),
        needs_up=list(needs[num + 1 :]),
    )
    found = [gradients.x, *gradients.downs, *gradients.ups]
    return [gradient for gradient in found if gradient is not None]


@_backward.register_fake
def _(dy, x, weight, hidden, downs, ups, order, counts, starts, scalings, dropouts, seeds, needs):  # noqa: ANN202
    operands = [x, *downs, *ups]
    return [each.new_empty(each.shape) for each, need in zip(operands, needs, strict=True) if need]


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, total, downs, ups, order, *plain = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    # The sum has the gradient of its operand; nothing of the weight is needed but for x.
    ctx.save_for_backward(x, weight, output[1], order, *downs, *ups)
    ctx.num_adapters, ctx.plain = len(downs), plain
    ctx.of_weight = None if weight is None else weight.dtype
    ctx.of_bias = None if bias is None else bias.dtype
    ctx.of_total = None if total is None else total.dtype


def _differentiate(ctx: Any, dy: Tensor | None, _: object) -> tuple[Any, ...]:
    num, num_plain = ctx.num_adapters, len(ctx.plain)
    if dy is None:
        return (None, None, None, None, [None] * num, [None] * num, None, *[None] * num_plain)
    x, weight, hidden, order, *matrices = ctx.saved_tensors
    downs, ups = matrices[:num], matrices[num:]
    needs_x, needs_weight, needs_bias, needs_total, needs_downs, needs_ups, *_ = (
        ctx.needs_input_grad
    )
    # A list's need is one flag, or one an element.
    flags = [needs_x, *_each(needs_downs, num), *_each(needs_ups, num)]
    if torch.is_grad_enabled():  # create_graph: in operators that autograd knows
        found = iter(_differentiable(dy, x, weight, downs, ups, (order, *ctx.plain), flags))
    else:
        found = iter(_backward(dy, x, weight, hidden, downs, ups, order, *ctx.plain, flags))
    gradients = [next(found) if flag else None for flag in flags]
    dweight = (dy.t() @ x).to(ctx.of_weight) if needs_weight else None
    dbias = dy.sum(0).to(ctx.of_bias) if needs_bias else None
    return (
        gradients[0],
        dweight,
        dbias,
        dy if needs_total else None,
        gradients[1 : num + 1],
        gradients[num + 1 :],
        None,
        *[None] * num_plain,
    )


def _each(flags: bool | Sequence[bool], num: int) -> list[bool]:
    return [flags] * num if isinstance(flags, bool) else list(flags)


def _differentiable(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    rows: Sequence[Any],
    flags: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients in a form that has gradients itself, for `create_graph=True`."""
    # Views, so that an operand that depends on another one is not followed to it.
    x, *matrices = [each.view_as(each) for each in (x, *downs, *ups)]
    downs, ups = matrices[: len(downs)], matrices[len(downs) :]
    total = x.new_zeros(x.shape[0], dy.shape[1]) if weight is None else None
    y = _products.compose(x, weight, None, total, uses_of(downs, ups, *rows))
    asked = [each for each, flag in zip((x, *matrices), flags, strict=True) if flag]
    return torch.autograd.grad(y, asked, dy, create_graph=True, materialize_grads=True)


run_operator.register_autograd(_differentiate, setup_context=_save_operands)


@register_flop_formula(torch.ops.penstock.lora_forward)
def _count_forward(x, weight, bias, total, downs, ups, order, counts, *_, **__) -> int:
    """Count the floating-point operations of products: 2 M K N and 2 M r (K + N) by adapter."""
    of_layer = 0 if weight is None else 2 * x[0] * weight[0] * weight[1]
    return of_layer + sum(
        2 * count * down[0] * (down[1] + up[0])
        for count, down, up in zip(counts, downs, ups, strict=True)
    )


@register_flop_formula(torch.ops.penstock.lora_backward)
def _count_backward(
    dy,
    x,
    weight,
    hidden,
    downs,
    ups,
    order,
    counts,
    starts,
    scalings,
    dropouts,
    seeds,
    needs,
    **_,
) -> int:
    """Count the products for x (2 M N K), and by adapter those for dS, S, x and A."""
    num, needs_x = len(downs), needs[0]
    total = 2 * dy[0] * weight[0] * weight[1] if weight is not None and needs_x else 0
    for i, (down, up, count) in enumerate(zip(downs, ups, counts, strict=True)):
        has_down, has_up = needs[1 + i], needs[1 + num + i]
        of_output = up[0] * (has_up + (has_down or needs_x))
        total += 2 * count * down[0] * (of_output + down[1] * (has_down + needs_x))
    return total
