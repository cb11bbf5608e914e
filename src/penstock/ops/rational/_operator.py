"""The operators of rational activations, with gradients, fake kernels and FLOPs.

Autograd keeps the input and the coefficients. Gradients that are to be differentiated themselves go
through the formula.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.codegen import name_kernels
from penstock.compat.dispatch import loop_over_batches
from penstock.ops.rational import _native, _torch


def kernels_for(x: Tensor, numerator: Tensor, denominator: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute a call."""
    counts = numerator.shape[1], denominator.shape[1]
    path = name_kernels(x.device.type, lambda: _native.is_available(*counts))
    if path == "Triton":
        return import_module("penstock.ops.rational._launch")
    return _native if path == "C++" else _torch


@torch.library.custom_op("penstock::group_rational", mutates_args=())
def rational_forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the activation of `(rows, C)`, contiguous, as `_torch.forward` says."""
    return kernels_for(x, numerator, denominator).forward(x, numerator, denominator)


@torch.library.custom_op("penstock::group_rational_backward", mutates_args=())
def rational_backward(
    dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, numerator and denominator, as `_torch.backward` says."""
    return kernels_for(x, numerator, denominator).backward(dy, x, numerator, denominator)


@rational_forward.register_fake
def _(x, numerator, denominator):
    return x.new_empty(x.shape)


@rational_backward.register_fake
def _(dy, x, numerator, denominator):
    return tuple(each.new_empty(each.shape) for each in (x, numerator, denominator))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return rational_backward(dy, *ctx.saved_tensors)


rational_forward.register_autograd(_differentiate, setup_context=_keep)


def _differentiate_gradients(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """Return the gradients of dy, x and the coefficients, by autograd through the formula."""
    is_followed = torch.is_grad_enabled()  # to derivatives of a higher order
    with torch.enable_grad():
        dy, *inputs = (
            each.view_as(each) if each.requires_grad else each.detach().requires_grad_()
            for each in ctx.saved_tensors
        )
        y = _torch.evaluate(*inputs).to(dy.dtype)
        found = torch.autograd.grad(y, inputs, dy, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(
            found, (dy, *inputs), grads, create_graph=is_followed, materialize_grads=True
        )


rational_backward.register_autograd(_differentiate_gradients, setup_context=_keep)
loop_over_batches(rational_forward)
loop_over_batches(rational_backward)


@register_flop_formula(torch.ops.penstock.group_rational)
def _count_forward(x, numerator, denominator, *_, **__) -> int:
    """Count two operations of each coefficient."""
    return 2 * x[0] * x[1] * (numerator[1] + denominator[1])


@register_flop_formula(torch.ops.penstock.group_rational_backward)
def _count_backward(dy, x, numerator, denominator, *_, **__) -> int:
    """Count six of each: two polynomials, their derivatives, and the terms of the sums."""
    return 6 * x[0] * x[1] * (numerator[1] + denominator[1])
