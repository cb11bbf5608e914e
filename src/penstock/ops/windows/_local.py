"""The functions `local_conv2d` and `dynamic_filter2d`, and their operators.

Both are one operator, linear in images and in weights, so each gradient of it is another of three.
"""

# ruff: noqa: ANN001, ANN002, ANN003, ANN202

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from penstock.compat.dispatch import loop_over_batches
from penstock.ops._operands import check_dtype, check_operand, check_tensor, check_together
from penstock.ops.windows._geometry import Pair, Windows
from penstock.ops.windows._unfold import check_images, kernels_for
from penstock.units import parse_count


def local_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Return a convolution whose filters depend on the position, without windows in memory.

        y[n,o,i,j] = bias[o,i,j] + sum_cfk weight[o,c,f,k,i,j] window_ij(x)[n,c,f,k]

    Example:
        >>> x = torch.randn(8, 16, 32, 32)
        >>> weight = torch.randn(16, 16, 3, 3, 32, 32)
        >>> local_conv2d(x, weight, padding=1).shape
        torch.Size([8, 16, 32, 32])

    Args:
        x: `(N, C, H, W)`, float32, float16, bfloat16 or float64. Sums are of float32 at least.
        weight: `(O, C / groups, Fh, Fw, Ho, Wo)`: `weight[..., i, j]` is that of `F.conv2d` at one
            position. Any strides; `LocalConv2d` has the fastest.
        bias: `(O, Ho, Wo)`, or a shape that is broadcast to the result's; of any of these dtypes.
        stride: Distance of neighbouring windows, for both dimensions or `(height, width)`.
        padding: Zeros on each side.
        dilation: Distance of neighbouring elements of a window.
        groups: Groups of channels, each of which is filtered on its own.

    Returns:
        `(N, O, Ho, Wo)`, of the dtype of x.

    Raises:
        TypeError: A dtype is not known, or a number is no int or pair.
        ValueError: Shapes do not fit, or operands are on several devices.
    """
    check_images(x)
    check_tensor("weight", weight)
    groups = parse_count(groups, name="groups", least=1)
    fits = weight.dim() == 6 and weight.shape[1] * groups == x.shape[1]
    if not fits or weight.shape[0] % groups:
        raise ValueError(
            f"weight has the shape {tuple(weight.shape)}, but must have (O, {x.shape[1]} / "
            f"{groups}, Fh, Fw, Ho, Wo) with O a multiple of {groups}"
        )
    if bias is not None:
        _check_bias(x, weight, bias)
    y = _filter(x, weight, (stride, padding, dilation), groups, "weight")
    return y if bias is None else y + bias.to(y.dtype)


def _check_bias(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Refuse a bias that would change the shape of the result, or lose more than digits in it."""
    check_dtype("bias", bias)  # a tangent is right here, as torch adds it
    check_together(x=x, bias=bias)
    shape = (x.shape[0], weight.shape[0], *weight.shape[4:])
    pairs = zip(bias.shape[::-1], shape[::-1], strict=False)
    # Not looked for in a tuple, where the open numbers of a traced graph are none of its elements.
    if bias.dim() > 4 or not all(full == length or length == 1 for length, full in pairs):
        raise ValueError(
            f"bias has the shape {tuple(bias.shape)}, but must have (O, Ho, Wo), {shape[1:]}, or "
            f"one that is broadcast to {shape}: reshape it"
        )


def dynamic_filter2d(
    x: Tensor, filters: Tensor, *, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1
) -> Tensor:
    """Return images filtered by filters of each sample and position, without windows in memory.

        y[n,c,i,j] = sum_fk filters[n,g,f,k,i,j] window_ij(x)[n,c,f,k],    g = c / (C / G)

    So do dynamic filter networks (De Brabandere et al., arXiv:1605.09673, section 3.2), involution
    and content-aware upsampling; elsewhere it takes `F.unfold`.

    Example:
        >>> x, guide = torch.randn(2, 32, 20, 20), torch.nn.Conv2d(32, 4 * 9, 1)
        >>> filters = guide(x).unflatten(1, (4, 3, 3)).flatten(2, 3).softmax(2)
        >>> dynamic_filter2d(x, filters.unflatten(2, (3, 3)), padding=1).shape
        torch.Size([2, 32, 20, 20])

    Args:
        x: `(N, C, H, W)`, float32, float16, bfloat16 or float64. Sums are of float32 at least.
        filters: `(N, G, Fh, Fw, Ho, Wo)`; G divides C, and group g filters the channels
            `g * C / G` to `(g + 1) * C / G`.
        stride: Distance of neighbouring windows, for both dimensions or `(height, width)`.
        padding: Zeros on each side.
        dilation: Distance of neighbouring elements of a window.

    Returns:
        `(N, C, Ho, Wo)`, of the dtype of x.

    Raises:
        TypeError: A dtype is not known, or a number is no int or pair.
        ValueError: Shapes do not fit, or operands are on several devices.
    """
    check_images(x)
    check_tensor("filters", filters)
    fits = filters.dim() == 6 and filters.shape[0] == x.shape[0]
    if not fits or filters.shape[1] == 0 or x.shape[1] % filters.shape[1]:
        raise ValueError(
            f"filters has the shape {tuple(filters.shape)}, but must have ({x.shape[0]}, G, Fh, "
            f"Fw, Ho, Wo) with G dividing {x.shape[1]}"
        )
    return _filter(x, filters, (stride, padding, dilation), 0, "filters")


def _filter(
    x: Tensor, weight: Tensor, pairs: tuple[Pair, Pair, Pair], groups: int, name: str
) -> Tensor:
    """Check what both functions share, and filter.

    Raises:
        TypeError: The dtype of the weights is not known.
        ValueError: They are of another number of positions, or elsewhere.
    """
    check_operand(name, weight)
    check_together(x=x, **{name: weight})
    height, width = weight.shape[2:4]
    if height == 0 or width == 0:
        raise ValueError(f"{name} has a kernel of {height} x {width}, but must have elements")
    windows = Windows.of((height, width), *pairs)
    out = windows.count_windows(x.shape[2], x.shape[3])
    if tuple(weight.shape[4:]) != out:
        raise ValueError(
            f"{name} has {tuple(weight.shape[4:])} positions, but x of {tuple(x.shape[2:])} has "
            f"{out} windows of {(height, width)} at this stride, padding and dilation"
        )
    return _multiply(x, weight.to(x.dtype), windows.numbers, groups)


@torch.library.custom_op("penstock::local_filter", mutates_args=())
def _multiply(x: Tensor, weight: Tensor, windows: Sequence[int], groups: int) -> Tensor:
    """Return the filtered images, as `_torch.multiply` says."""
    return kernels_for(x).multiply(x, weight, Windows.of_numbers(windows), groups)


@torch.library.custom_op("penstock::local_filter_input", mutates_args=())
def _differentiate_input(
    dy: Tensor, weight: Tensor, windows: Sequence[int], groups: int, size: Sequence[int]
) -> Tensor:
    """Return the gradient of images, as `_torch.differentiate_input` says."""
    of = Windows.of_numbers(windows)
    return kernels_for(dy).differentiate_input(dy, weight, of, groups, size)


@torch.library.custom_op("penstock::local_filter_weight", mutates_args=())
def _differentiate_weight(
    dy: Tensor, x: Tensor, weight: Tensor, windows: Sequence[int], groups: int
) -> Tensor:
    """Return the gradient of weights, as `_torch.differentiate_weight` says."""
    of = Windows.of_numbers(windows)
    return kernels_for(x).differentiate_weight(dy, x, weight, of, groups)


@_multiply.register_fake
def _(x, weight, windows, groups):
    num_outs = weight.shape[0] if groups else x.shape[1]
    return x.new_empty(x.shape[0], num_outs, *weight.shape[4:])


@_differentiate_input.register_fake
def _(dy, weight, windows, groups, size):
    channels = weight.shape[1] * groups if groups else dy.shape[1]
    return dy.new_empty(dy.shape[0], channels, *size)


@_differentiate_weight.register_fake
def _(dy, x, weight, windows, groups):
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.rest = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dx = _differentiate_input(dy, weight, *ctx.rest, ctx.size) if needs[0] else None
    dweight = _differentiate_weight(dy, x, weight, *ctx.rest) if needs[1] else None
    return dx, dweight, None, None


def _keep_of_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, weight, *ctx.rest, _ = inputs
    ctx.save_for_backward(dy, weight)


def _differentiate_of_input(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
    dy, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    ddy = _multiply(ddx, weight, *ctx.rest) if needs[0] else None
    dweight = _differentiate_weight(dy, ddx, weight, *ctx.rest) if needs[1] else None
    return ddy, dweight, None, None, None


def _keep_of_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, x, _, *ctx.rest = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(dy, x)


def _differentiate_of_weight(ctx: Any, ddweight: Tensor) -> tuple[Any, ...]:
    dy, x = ctx.saved_tensors
    needs = ctx.needs_input_grad
    ddy = _multiply(x, ddweight, *ctx.rest) if needs[0] else None
    dx = _differentiate_input(dy, ddweight, *ctx.rest, ctx.size) if needs[1] else None
    return ddy, dx, None, None, None


_multiply.register_autograd(_differentiate, setup_context=_keep)
_differentiate_input.register_autograd(_differentiate_of_input, setup_context=_keep_of_input)
_differentiate_weight.register_autograd(_differentiate_of_weight, setup_context=_keep_of_weight)
loop_over_batches(_multiply)
loop_over_batches(_differentiate_input)
loop_over_batches(_differentiate_weight)


@register_flop_formula(torch.ops.penstock.local_filter)
def _count_forward(x, weight, windows, groups, *_, **__) -> int:
    """Count two operations of each weight, for each sample or channel that it is for."""
    uses = x[0] if groups else x[1] // weight[1]
    return 2 * uses * _numel(weight)


@register_flop_formula(torch.ops.penstock.local_filter_input)
def _count_input(dy, weight, windows, groups, *_, **__) -> int:
    """Count as many as forward."""
    return _count_forward(dy, weight, windows, groups)


@register_flop_formula(torch.ops.penstock.local_filter_weight)
def _count_weight(dy, x, weight, windows, groups, *_, **__) -> int:
    """Count as many as forward."""
    return _count_forward(x, weight, windows, groups)


def _numel(shape) -> int:
    return torch.Size(shape).numel()
