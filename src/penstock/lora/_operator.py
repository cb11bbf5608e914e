"""The operator of `linear`, with its backward, its form under `torch.compile`, and its FLOPs.

Seeds are a tensor on the CPU, so that a compiled or captured step draws new ones in each run; None
where no adapter has dropout.
Autograd keeps the input, which the layer before shares, and the products of rank r. The dropout
mask is made again. A backward pass that is to be differentiated itself goes through operators that
autograd knows.
"""

# ruff: noqa: ANN001, ANN002, ANN003

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.compat.autograd import below_autograd, is_eager, is_transformed, map_batched
from penstock.compat.dispatch import loop_over_batches
from penstock.lora import _products
from penstock.lora._dropout import Mask

_logger = logging.getLogger(__name__)
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def uses_of(
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    order: Tensor | None,
    counts: Sequence[int],
    starts: Sequence[int],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    seeds: Tensor | None,
) -> list[_products.AdapterUse]:
    """Return the adapters with their rows, from the operands of a call."""
    parts = [None] * len(counts) if order is None else order.split(list(counts))
    numbers = [0] * len(counts) if seeds is None else seeds.tolist()
    return [
        _products.AdapterUse(
            down=downs[i],
            up=ups[i],
            factor=scalings[i] / (1 - dropouts[i]),
            mask=Mask(seed=numbers[i], probability=dropouts[i]) if dropouts[i] else None,
            start=starts[i],
            num_rows=counts[i],
            index=parts[i] if starts[i] < 0 else None,
        )
        for i in range(len(counts))
    ]


def has_kernels(x: Tensor, *downs: Tensor) -> bool:
    """Return whether Triton kernels compute a call; else torch's products do, adapter by adapter.

    Args:
        x: Input.
        *downs: Matrices A of the adapters.
    """
    if x.device.type != "cuda" or not downs or x.dtype not in _KERNEL_DTYPES:
        return False
    return downs[0].dtype in _KERNEL_DTYPES and _load_kernels() is not None


@functools.cache
def _load_kernels() -> Any:
    try:
        from penstock.lora import triton
    except ImportError as error:
        _logger.info("LoRA layers on GPUs are computed by torch, without Triton: %s", error)
        return None
    return triton


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    *operands: Any,
) -> tuple[Tensor, Tensor]:
    if has_kernels(x, *operands[0]):
        return _load_kernels().run_forward(x, weight, bias, total, *operands)
    return _products.forward(x, weight, bias, total, uses_of(*operands))


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    hidden: Tensor,
    *operands: Any,
) -> list[Tensor]:
    """Return the gradients that are asked for: by `needs` of x, then of each down, then each up."""
    if has_kernels(x, *operands[0]):
        return _load_kernels().run_backward(dy, x, weight, hidden, *operands)
    *of_uses, needs = operands
    uses = uses_of(*of_uses)
    gradients = _products.backward(
        dy,
        x,
        weight,
        hidden,
        uses,
        needs_x=needs[0],
        needs_down=needs[1 : len(uses) + 1],
        needs_up=needs[len(uses) + 1 :],
    )
    found = [gradients.x, *gradients.downs, *gradients.ups]
    return [gradient for gradient in found if gradient is not None]


class _LinearWithAdapters(torch.autograd.Function):
    """The operator below autograd, with its gradients.

    Lists are flattened, which `torch.library`'s own autograd does in half a millisecond a call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        total: Tensor | None,
        rows: tuple[Any, ...],
        seeds: Tensor | None,
        order: Tensor | None,
        *matrices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num = len(matrices) // 2
        downs, ups = matrices[:num], matrices[num:]
        if is_eager(x, weight, *matrices):
            y, hidden = _forward(x, weight, bias, total, downs, ups, order, *rows, seeds)
        else:
            with below_autograd():
                y, hidden = torch.ops.penstock.lora_forward(
                    x, weight, bias, total, downs, ups, order, *rows, seeds
                )
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(hidden)
        needs = ctx.needs_input_grad
        # Only dW and dA have x in them. Without them a layer of PEFT does not keep it either.
        ctx.keeps_x = needs[1] or any(needs[7 : 7 + num])
        kept = x if ctx.keeps_x else x.new_zeros(1, 1).expand(x.shape)
        ctx.save_for_backward(kept, weight, hidden, order, seeds, *matrices)
        ctx.rows = rows
        ctx.of_bias = None if bias is None else bias.dtype
        return y, hidden

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Any, ...]:
        dy = grad_outputs[0]
        needs_x, needs_weight, needs_bias, needs_total, _, _, _, *needed = ctx.needs_input_grad
        if dy is None:
            return (None,) * (7 + len(needed))
        x, weight, hidden, order, seeds, *matrices = ctx.saved_tensors
        num = len(matrices) // 2
        operands = (matrices[:num], matrices[num:], order, *ctx.rows, seeds)
        flags = [needs_x, *needed]
        if not any(flags):
            found = iter(())
        elif torch.is_grad_enabled():  # create_graph: in operators that autograd knows
            if not ctx.keeps_x and any(needed[num:]):
                raise RuntimeError(
                    "create_graph=True where the matrix B of an adapter requires a gradient and no "
                    "matrix A does: the input was not kept, so the gradient of B has no gradient "
                    "of its own; let the matrices A require gradients"
                )
            x = x if ctx.keeps_x else x.detach().requires_grad_()
            found = iter(_differentiable(dy, x, weight, *operands, flags=flags))
        else:
            run = _backward
            if not is_eager(dy, x, weight, *matrices) or is_transformed():
                run = torch.ops.penstock.lora_backward
            found = iter(map_batched(lambda dy: run(dy, x, weight, hidden, *operands, flags), dy))
        gradients = [next(found) if flag else None for flag in flags]
        dweight = _products.multiply(dy.t(), x).to(weight.dtype) if needs_weight else None
        dbias = dy.sum(0).to(ctx.of_bias) if needs_bias else None
        dtotal = dy if needs_total else None
        return gradients[0], dweight, dbias, dtotal, None, None, None, *gradients[1:]


def record(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    downs: list[Tensor],
    ups: list[Tensor],
    order: Tensor | None,
    *plain: Any,
) -> tuple[Tensor, Tensor]:
    """Return the results of the operator, with its gradients; arguments are the operator's."""
    *rows, seeds = plain
    return _LinearWithAdapters.apply(
        x, weight, bias, total, tuple(rows), seeds, order, *downs, *ups
    )


@_products.without_autocast
def _differentiable(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    *rows: Any,
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


_OPERANDS = (
    "Tensor[] downs, Tensor[] ups, Tensor? order, SymInt[] counts, SymInt[] starts, "
    "float[] scalings, float[] dropouts, Tensor? seeds"
)
_library = torch.library.Library("penstock", "FRAGMENT")
_library.define(
    f"lora_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? total, {_OPERANDS}) -> "
    "(Tensor, Tensor)"
)
_library.define(
    f"lora_backward(Tensor dy, Tensor x, Tensor? weight, Tensor hidden, {_OPERANDS}, bool[] needs) "
    "-> Tensor[]"
)
_library.impl("lora_forward", _forward, "CompositeExplicitAutograd")
_library.impl("lora_backward", _backward, "CompositeExplicitAutograd")
_library.impl("lora_forward", record, "Autograd")


@torch.library.register_fake("penstock::lora_forward", lib=_library)
def _(x, weight, bias, total, downs, ups, order, counts, *_):  # noqa: ANN202
    size = sum(count * down.shape[0] for count, down in zip(counts, downs, strict=True))
    dtype = downs[0].dtype if downs else x.dtype
    y = x.new_empty(x.shape[0], weight.shape[0]) if total is None else torch.empty_like(total)
    return y, x.new_empty(size, dtype=dtype)


@torch.library.register_fake("penstock::lora_backward", lib=_library)
def _(dy, x, weight, hidden, downs, ups, *operands):  # noqa: ANN202
    matrices, needs = [x, *downs, *ups], operands[-1]
    return [each.new_empty(each.shape) for each, need in zip(matrices, needs, strict=True) if need]


# Where `torch.vmap` is around the backward pass.
loop_over_batches(torch.ops.penstock.lora_backward.default, _library)


@register_flop_formula(torch.ops.penstock.lora_forward)
def _count_forward(x, weight, bias, total, downs, ups, order, counts, *_, **__) -> int:
    """Count the floating-point operations of products: 2 M K N and 2 M r (K + N) by adapter."""
    of_layer = 0 if weight is None else 2 * x[0] * weight[0] * weight[1]
    return of_layer + sum(
        2 * count * down[0] * (down[1] + up[0])
        for count, down, up in zip(counts, downs, ups, strict=True)
    )


@register_flop_formula(torch.ops.penstock.lora_backward)
def _count_backward(dy, x, weight, hidden, downs, ups, order, counts, *rest, **_) -> int:
    """Count the products for x (2 M N K), and by adapter those for dS, S, x and A."""
    num, needs, needs_x = len(downs), rest[-1], rest[-1][0]
    total = 2 * dy[0] * weight[0] * weight[1] if weight is not None and needs_x else 0
    for i, (down, up, count) in enumerate(zip(downs, ups, counts, strict=True)):
        has_down, has_up = needs[1 + i], needs[1 + num + i]
        of_output = up[0] * (has_up + (has_down or needs_x))
        total += 2 * count * down[0] * (of_output + down[1] * (has_down + needs_x))
    return total
