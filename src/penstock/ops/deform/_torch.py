"""Deformable convolution by torch: the way without kernels, and their oracle.

Rows of the output are computed in bands, so that columns are those of a band; the backward pass
computes a band again and differentiates it. `convolve` is the oracle: its gradients are autograd's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.ops._operands import sum_dtype
from penstock.ops.deform._shapes import Geometry, count_offset_groups, count_taps

_BAND_PIXELS = 256


def forward(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    """Return the output, `(B, O, Ho, Wo)`, of the dtype of x, as `deform_conv2d` says.

    Args:
        x: `(B, C, H, W)`.
        offset: `(B, 2 G kh kw, Ho, Wo)`, of the dtype of sums.
        weight: `(O, C / groups, kh, kw)`, of the dtype of x.
        bias: `(O,)`, of the dtype of x, or None.
        mask: `(B, G kh kw, Ho, Wo)`, of the dtype of sums, or None.
        geometry: Stride, padding and dilation.
    """
    dtype = sum_dtype(x.dtype)
    out = x.new_empty(len(x), len(weight), *geometry.out_size(x, weight))
    sums = [None if each is None else each.to(dtype) for each in (x, weight, bias)]
    for image, rows in _bands(out):
        of_mask = None if mask is None else mask[image, :, rows]
        out[image, :, rows] = convolve(
            sums[0][image], offset[image, :, rows], *sums[1:], of_mask, geometry, rows.start
        ).to(x.dtype)
    return out


def backward(
    dout: Tensor,
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: Geometry,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, offset, weight, bias and mask, in their shapes and dtypes."""
    dtype = sum_dtype(x.dtype)
    given = (x, offset, weight, bias, mask)
    sums = [None if each is None else torch.zeros_like(each, dtype=dtype) for each in given]
    for image, rows in _bands(dout):
        parts = [None if each is None else each.detach().to(dtype) for each in (
            *(x[image], offset[image, :, rows], weight, bias),
            None if mask is None else mask[image, :, rows],
        )]  # fmt: skip
        with torch.enable_grad():
            leaves = [each if each is None else each.requires_grad_() for each in parts]
            out = convolve(*leaves, geometry, rows.start)
        wanted = [each for each in leaves if each is not None]
        grads = iter(torch.autograd.grad(out, wanted, dout[image, :, rows].to(dtype)))
        places = (image, (image, slice(None), rows), ..., ..., (image, slice(None), rows))
        for total, place in zip(sums, places, strict=True):
            if total is not None:
                total[place] += next(grads)
    dx, doffset, dweight, dbias, dmask = (
        None if total is None else total.to(each.dtype)
        for total, each in zip(sums, given, strict=True)
    )
    return dx, doffset, dweight, dbias, dmask


def convolve(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: Geometry,
    first_row: int = 0,
) -> Tensor:
    """Return some rows of the output of one image, `(O, rows, Wo)`, with gradients by autograd.

    Args:
        x: `(C, H, W)`.
        offset: `(2 G kh kw, rows, Wo)`, of the rows.
        weight: As of `forward`, like the bias.
        bias: The bias.
        mask: `(G kh kw, rows, Wo)`.
        geometry: Stride, padding and dilation.
        first_row: Row of the output that the first one is.
    """
    taps, groups = count_taps(weight), count_offset_groups(offset[None], weight)
    rows, width = offset.shape[1:]
    steps = [torch.arange(n, device=x.device, dtype=offset.dtype) for n in weight.shape[2:]]
    tap_y = (steps[0] * geometry.dilation[0]).repeat_interleave(weight.shape[3])[:, None, None]
    tap_x = (steps[1] * geometry.dilation[1]).repeat(weight.shape[2])[:, None, None]
    row = torch.arange(rows, device=x.device, dtype=offset.dtype)[:, None] + first_row
    column = torch.arange(width, device=x.device, dtype=offset.dtype)
    moved = offset.unflatten(0, (groups, taps, 2))
    y = row * geometry.stride[0] - geometry.padding[0] + tap_y + moved[:, :, 0]
    at_x = column * geometry.stride[1] - geometry.padding[1] + tap_x + moved[:, :, 1]
    columns = _sample(x.unflatten(0, (groups, -1)), y, at_x)
    if mask is not None:
        columns = columns * mask.unflatten(0, (groups, 1, taps))
    # (C, taps, pixels), by group of weights
    of_weights = len(x) // weight.shape[1]
    columns = columns.flatten(0, 1).flatten(2).unflatten(0, (of_weights, -1)).flatten(1, 2)
    out = weight.flatten(1).unflatten(0, (of_weights, -1)) @ columns
    out = out.flatten(0, 1).unflatten(1, (rows, width))
    return out if bias is None else out + bias[:, None, None]


def _sample(x: Tensor, y: Tensor, at_x: Tensor) -> Tensor:
    """Return x between its pixels, `(groups, channels, taps, rows, columns)`.

    Args:
        x: `(groups, channels, H, W)`.
        y: `(groups, taps, rows, columns)`.
        at_x: The same in the other dimension.
    """
    height, width = x.shape[2:]
    is_near = (y > -2) & (y < height + 1) & (at_x > -2) & (at_x < width + 1)
    # What is further away is 0, and what is NaN is NaN without a place.
    is_nan = y.isnan() | at_x.isnan()
    y, at_x = (torch.where(is_near, each, -2.0) for each in (y, at_x))
    top, left = y.detach().floor(), at_x.detach().floor()
    down, right = y - top, at_x - left
    flat = x.flatten(2)
    value: Tensor | None = None
    for row, weight_y in ((0, 1 - down), (1, down)):
        for column, weight_x in ((0, 1 - right), (1, right)):
            r, c = top + row, left + column
            is_inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
            at = (r.clamp(0, height - 1) * width + c.clamp(0, width - 1)).long().flatten(1)
            corner = flat.gather(2, at[:, None].expand(-1, flat.shape[1], -1))
            corner = corner.unflatten(2, y.shape[1:]).where(is_inside[:, None], 0.0)
            term = (weight_y * weight_x)[:, None] * corner
            value = term if value is None else value + term
    assert value is not None
    return torch.where(is_nan[:, None], torch.nan, value)


def _bands(out: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield images and rows of the output."""
    height, width = out.shape[2:]
    step = max(1, _BAND_PIXELS // max(1, width))
    for image in range(len(out)):
        for first in range(0, height, step):
            yield image, slice(first, min(height, first + step))
