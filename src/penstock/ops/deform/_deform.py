"""The function `deform_conv2d`: checks of its operands, and variants of its offsets."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from penstock.compat.autograd import autocast_dtype
from penstock.ops._operands import (
    check_dtype,
    check_operand,
    check_tensor,
    check_together,
    read_integers,
    sum_dtype,
)
from penstock.ops.deform._operator import deform_forward
from penstock.ops.deform._shapes import DeformGeometry, count_taps

_MOST_PIXELS = 2**31 - 2  # of an image, whose pixels have numbers of 32 bits


def deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    *,
    bound: float | None = None,
    square: bool = False,
) -> Tensor:
    """Return a convolution whose taps are moved by offsets, each sampled between four pixels.

        y_o(p) = b_o + sum_kc w_ock m_k(p) x_c(stride p - padding + dilation k + offset_k(p))

    Arguments and results are those of `torchvision.ops.deform_conv2d` (Dai et al.,
    arXiv:1703.06211, section 2.1; with a mask Zhu et al., arXiv:1811.11168, section 3.2). Samples
    are multiplied as they are gathered: no column buffer of kernel area times channels is in
    memory, forward or backward. Bits do not depend on the run or on the number of threads.

    Example:
        >>> x, weight = torch.randn(1, 8, 16, 16), torch.randn(4, 8, 3, 3)
        >>> offset = torch.zeros(1, 18, 16, 16)
        >>> deform_conv2d(x, offset, weight, padding=1).shape
        torch.Size([1, 4, 16, 16])

    Args:
        input: `(B, C, H, W)`: float16, bfloat16, float32 or float64. Sums are float32 at least.
        offset: `(B, 2 * G * kh * kw, Ho, Wo)` in pixels: y and x of each tap, for each of G groups
            of channels; of the dtype of input or of its sums, as bfloat16 has few bits.
        weight: `(O, C / groups, kh, kw)`, of the dtype of input.
        bias: `(O,)`, of the same dtype; None for none.
        stride: Pixels of the input between two of the output, by dimension or of both.
        padding: Pixels of 0 around the input.
        dilation: Pixels between two taps.
        mask: `(B, G * kh * kw, Ho, Wo)`: factors of the samples, of a dtype as offsets; None for 1.
        bound: Offsets are clamped to `[-bound, bound]`, as hardware with line buffers needs them
            (CoDeNet, arXiv:2006.08357, section 3.1); None for no bound. A small one spares a GPU
            the sorting of the backward pass.
        square: Whether there is one offset for each pixel and group, `(B, G, Ho, Wo)`, that widens
            the square of taps around its centre: what s adds to the dilation (the same section).

    Returns:
        `(B, O, Ho, Wo)`, of the dtype of input or of autocast. Beyond the input all pixels are 0; a
        sample whose offset is NaN is NaN, and has no gradient for the input. There is no second
        derivative.

    Raises:
        TypeError: Dtypes differ or are not supported.
        ValueError: A shape, a device or a number does not fit.
    """
    geometry = DeformGeometry(
        stride=_as_pair("stride", stride, 1),
        padding=_as_pair("padding", padding, 0),
        dilation=_as_pair("dilation", dilation, 1),
    )
    return _convolve(input, offset, weight, bias, mask, geometry, bound, square)


def _convolve(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: DeformGeometry,
    bound: float | None,
    square: bool,
) -> Tensor:
    check_tensor("offset", offset)
    for name, each in (("bias", bias), ("mask", mask)):
        if each is not None:
            check_tensor(name, each)
    for name, each in (("input", input), ("weight", weight)):
        check_dtype(name, each)
    input, weight, bias = _cast(input, weight, bias)
    _check_dtypes(input, weight, bias, offset, mask)
    _check_shapes(input, weight, bias, geometry)
    size = geometry.out_size(input, weight)
    if square:
        offset = _widen(offset, input, weight, size)
    _check_offsets(input, offset, mask, weight, size)
    if bound is not None:
        _check_bound(bound)
        offset = offset.clamp(-bound, bound)
        geometry = dataclasses.replace(geometry, reach=math.ceil(min(bound, _MOST_PIXELS)))
    return deform_forward(input, offset, weight, bias, mask, geometry.numbers)


def _check_bound(bound: float) -> None:
    try:
        is_right = not isinstance(bound, str) and bool(bound >= 0)
    except (TypeError, ValueError, RuntimeError):  # nothing that is compared with numbers, or many
        is_right = False
    if not is_right:
        raise ValueError(f"bound is {bound!r}, but must be at least 0, or None for no bound")


def _as_pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = read_integers(name, value)
    if len(pair) != 2 or any(each < least for each in pair):
        raise ValueError(
            f"{name} is {value}, but must be a number or a pair of them, each at least {least}"
        )
    return pair[0], pair[1]


def _cast(
    input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return operands in the dtype of autocast, where it is on; offsets keep theirs.

    What is no floating-point number stays, to be refused.
    """
    dtype = autocast_dtype(input.device.type)
    if dtype is None or input.dtype == torch.float64:
        return input, weight, bias
    input, weight = (
        each.to(dtype) if each.is_floating_point() else each for each in (input, weight)
    )
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype)
    return input, weight, bias


def _check_dtypes(
    input: Tensor, weight: Tensor, bias: Tensor | None, offset: Tensor, mask: Tensor | None
) -> None:
    check_operand("input", input)
    others = {"weight": weight, "bias": bias, "offset": offset, "mask": mask}
    given = {name: each for name, each in others.items() if each is not None}
    for name, each in given.items():
        accepted = [input.dtype]
        if name in ("offset", "mask"):
            accepted.append(sum_dtype(input.dtype))
        if each.dtype not in accepted:
            names = " or ".join(dict.fromkeys(map(str, accepted)))
            raise TypeError(
                f"{name} has the dtype {each.dtype}, but must have {names}, as input has "
                f"{input.dtype}: convert it"
            )
        check_operand(name, each)
    check_together(input=input, **given)


def _check_shapes(
    input: Tensor, weight: Tensor, bias: Tensor | None, geometry: DeformGeometry
) -> None:
    shapes = f"input and weight have the shapes {tuple(input.shape)} and {tuple(weight.shape)}"
    if input.dim() != 4 or weight.dim() != 4:
        raise ValueError(f"{shapes}, but must have (B, C, H, W) and (O, C / groups, kh, kw)")
    channels, of_group = input.shape[1], weight.shape[1]
    if 0 in weight.shape or channels % of_group or channels == 0:
        raise ValueError(
            f"{shapes}: the channels of input must be a multiple of those of weight, and none 0"
        )
    if weight.shape[0] % (channels // of_group):
        raise ValueError(
            f"{shapes}, which are {channels // of_group} groups: they must divide the outputs"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has the shape {tuple(bias.shape)}, but must have that of the outputs of weight, "
            f"{tuple(weight.shape[:1])}"
        )
    if min(geometry.out_size(input, weight)) < 1 or 0 in input.shape[2:]:
        raise ValueError(
            f"{shapes}: the kernel is larger than the padded input: pass a larger padding"
        )
    if input.shape[2] * input.shape[3] > _MOST_PIXELS:
        raise ValueError(f"{shapes}: an image may have at most {_MOST_PIXELS} pixels")


def _check_offsets(
    input: Tensor, offset: Tensor, mask: Tensor | None, weight: Tensor, size: tuple[int, int]
) -> None:
    taps = count_taps(weight)
    groups = offset.shape[1] // (2 * taps) if offset.dim() == 4 else 0
    if groups == 0 or input.shape[1] % groups:
        raise ValueError(
            f"offset has the shape {tuple(offset.shape)}, but must have y and x of each of the "
            f"{taps} taps: {2 * taps} channels for each of some groups that divide the "
            f"{input.shape[1]} channels of input"
        )
    expected = {"offset": (offset, 2 * taps * groups), "mask": (mask, taps * groups)}
    for name, (each, channels) in expected.items():
        if each is not None and each.shape != (input.shape[0], channels, *size):
            raise ValueError(
                f"{name} has the shape {tuple(each.shape)}, but must have "
                f"{(input.shape[0], channels, *size)}, as the output is {size[0]} x {size[1]}"
            )


def _widen(offset: Tensor, input: Tensor, weight: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the offsets of taps of a square that is widened by one number at each pixel.

    offset_k = s (k - (kernel - 1) / 2)
    """
    if offset.dim() != 4 or offset.shape[2:] != size or offset.shape[0] != input.shape[0]:
        raise ValueError(
            f"offset has the shape {tuple(offset.shape)}, but must have "
            f"{(input.shape[0], 'groups', *size)} where square is true"
        )
    height, width = weight.shape[2:]
    y = torch.arange(height, device=offset.device, dtype=offset.dtype) - (height - 1) / 2
    x = torch.arange(width, device=offset.device, dtype=offset.dtype) - (width - 1) / 2
    taps = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).flatten()
    return (offset[:, :, None] * taps[:, None, None]).flatten(1, 2)
