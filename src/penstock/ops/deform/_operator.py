"""The operators of deformable convolutions, with gradients, fake kernels and FLOPs."""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.codegen import name_kernels
from penstock.compat.dispatch import loop_over_batches, refuse_batched
from penstock.ops.deform import _native, _torch
from penstock.ops.deform._shapes import DeformGeometry, DeformInputs


def kernels_for(x: Tensor) -> ModuleType:
    """Return the module that computes inputs of this dtype and device; Triton on the first call."""
    name = name_kernels(x.device.type, _native.is_available)
    if name == "Triton" and x.dtype != torch.float64:
        return import_module("penstock.ops.deform.triton")
    return _native if name == "C++" else _torch


@torch.library.custom_op("penstock::deform_forward", mutates_args=())
def deform_forward(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: list[int],
) -> Tensor:
    """Return the output, as `_torch.forward` says."""
    given = DeformInputs(x, offset, weight, bias, mask, DeformGeometry.of(geometry))
    return kernels_for(x).forward(given.in_sums())


@torch.library.custom_op("penstock::deform_backward", mutates_args=())
def deform_backward(
    dout: Tensor,
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: list[int],
) -> list[Tensor]:
    """Return the gradients of x, offset, weight, and of bias and mask where there are such."""
    given = DeformInputs(x, offset, weight, bias, mask, DeformGeometry.of(geometry))
    grads = kernels_for(x).backward(dout, given.in_sums())
    return [
        grad.to(each.dtype)
        for grad, each in zip(grads, given[:5], strict=True)
        if grad is not None and each is not None
    ]


@deform_forward.register_fake
def _(x, offset, weight, bias, mask, geometry):
    return DeformInputs(x, offset, weight, bias, mask, DeformGeometry.of(geometry)).new_output()


@deform_backward.register_fake
def _(dout, x, offset, weight, bias, mask, geometry):
    given = (x, offset, weight, bias, mask)
    return [each.new_empty(each.shape) for each in given if each is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.geometry = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    refuse_batched("penstock.ops.deform_conv2d", dout)
    given = ctx.saved_tensors
    grads = iter(deform_backward(dout, *given, ctx.geometry))
    return *(None if each is None else next(grads) for each in given), None


deform_forward.register_autograd(_differentiate, setup_context=_keep)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the gradient of penstock.ops.deform_conv2d has no gradient of its own: second derivatives "
        "are not supported"
    )


deform_backward.register_autograd(_refuse)
loop_over_batches(deform_forward)
loop_over_batches(deform_backward)


@register_flop_formula(torch.ops.penstock.deform_forward)
def _count_forward(x, offset, weight, *_, out_shape, **__) -> int:
    """Count the products of weights and columns."""
    outs, of_group, height, width = weight
    return 2 * out_shape[0] * out_shape[2] * out_shape[3] * outs * of_group * height * width


@register_flop_formula(torch.ops.penstock.deform_backward)
def _count_backward(dout, x, offset, weight, *_, **__) -> int:
    """Count those of dcolumn and dW."""
    outs, of_group, height, width = weight
    return 4 * dout[0] * dout[2] * dout[3] * outs * of_group * height * width
