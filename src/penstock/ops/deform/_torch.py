"""Deformable convolution by torch: the way without kernels, and their oracle.

Rows of the output are computed in bands, forward and backward, so that columns are those of a band.
`convolve` is the oracle: its gradients are those of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.ops._operands import sum_dtype
from penstock.ops.deform._shapes import (
    DeformGeometry,
    DeformInputs,
    count_offset_groups,
    count_taps,
)

_BAND_PIXELS = 256


def forward(given: DeformInputs) -> Tensor:
    """Return the output, `(B, O, Ho, Wo)`, of the dtype of x, as `deform_conv2d` says."""
    x, offset, weight, bias, mask, geometry = given
    dtype, out = sum_dtype(x.dtype), given.new_output()
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for image, rows in _bands(out):
        of_mask = None if mask is None else mask[image, :, rows]
        of_offset = offset[image, :, rows]
        out[image, :, rows] = convolve(
            x[image].to(dtype), of_offset, weight, bias, of_mask, geometry, rows.start
        ).to(x.dtype)
    return out


def backward(
    dout: Tensor, given: DeformInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, in its dtype, and of all others in the dtype of sums."""
    x, offset, weight, bias, mask, geometry = given
    dtype, taps = sum_dtype(x.dtype), count_taps(weight)

    def zeros(of: Tensor) -> Tensor:  # together, whatever the strides of the operand are
        return torch.zeros(of.shape, dtype=dtype, device=of.device)

    dx, doffset, dweight = zeros(x), zeros(offset), zeros(weight)
    dbias = None if bias is None else zeros(bias)
    dmask = None if mask is None else zeros(mask)
    of_weights = x.shape[1] // weight.shape[1]
    weights = weight.to(dtype).flatten(1).unflatten(0, (of_weights, -1))
    for image, rows in _bands(dout):
        places = _Places.of(x[image], offset[image, :, rows], weight, geometry, rows.start)
        of_mask = None if mask is None else mask[image, :, rows]
        douts = dout[image, :, rows].to(dtype).flatten(1)
        by_group = douts.unflatten(0, (of_weights, -1))
        dcolumns = (weights.mT @ by_group).flatten(0, 1)
        columns, dplaces = _differentiate_band(
            dx[image], x[image].to(dtype), places, of_mask, dcolumns
        )
        doffset[image, :, rows] = dplaces[:, :, :2].flatten(0, 2)
        columns = columns.reshape(of_weights, weight.shape[1] * taps, -1)
        dweight += (by_group @ columns.mT).view(weight.shape)
        if dbias is not None:
            dbias += douts.sum(1)
        if dmask is not None:
            dmask[image, :, rows] = dplaces[:, :, 2].flatten(0, 1)
    return dx.to(x.dtype), doffset, dweight, dbias, dmask


def _differentiate_band(
    dx: Tensor, x: Tensor, places: _Places, mask: Tensor | None, dcolumns: Tensor
) -> tuple[Tensor, Tensor]:
    """Add to the gradient of the input, and return columns and the gradients of places.

    Args:
        dx: `(C, H, W)`, like x, in the dtype of sums.
        x: The image.
        places: Of the band.
        mask: `(G kh kw, rows, Wo)`, or None.
        dcolumns: `(C taps, pixels)`.

    Returns:
        `(G, C / G, taps, rows, Wo)`, and by tap y, x and the mask: `(G, taps, 3, rows, Wo)`.
    """
    groups, taps = places.y.shape[:2]
    given = dcolumns.view(groups, -1, *places.y.shape[1:])
    factor = given.new_ones(()) if mask is None else mask.unflatten(0, (groups, 1, taps))
    flat, dflat = x.reshape(groups, -1, x[0].numel()), dx.view(groups, -1, x[0].numel())
    value, dy, dright = (torch.zeros_like(given) for _ in range(3))
    for corner in places.corners(x.shape[1:]):
        pixels = corner.gather(flat)
        value += (corner.weight_y * corner.weight_x)[:, None] * pixels
        dy += (corner.sign_y * corner.weight_x)[:, None] * pixels
        dright += (corner.sign_x * corner.weight_y)[:, None] * pixels
        share = (corner.weight_y * corner.weight_x)[:, None] * factor * given
        at = corner.place[:, None].expand(-1, flat.shape[1], -1)
        dflat.scatter_add_(2, at, share.where(corner.is_inside[:, None], 0.0).flatten(2))
    value = value.masked_fill(places.is_nan[:, None], torch.nan)
    terms = [(factor * given * dy).sum(1), (factor * given * dright).sum(1), (given * value).sum(1)]
    dplaces = torch.stack(terms, 2).masked_fill(places.is_nan[:, :, None], torch.nan)
    return value * factor, dplaces


def convolve(
    x: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    geometry: DeformGeometry,
    first_row: int = 0,
) -> Tensor:
    """Return some rows of the output of one image, `(O, rows, Wo)`, with gradients by autograd.

    Args:
        x: `(C, H, W)`.
        offset: `(2 G kh kw, rows, Wo)`, of the rows.
        weight: As of `DeformInputs`, like the bias.
        bias: The bias.
        mask: `(G kh kw, rows, Wo)`.
        geometry: Stride, padding and dilation.
        first_row: Row of the output that the first one is.
    """
    places = _Places.of(x, offset, weight, geometry, first_row)
    groups, taps, rows, width = places.y.shape
    columns = _sample(x.unflatten(0, (groups, -1)), places)
    if mask is not None:
        columns = columns * mask.unflatten(0, (groups, 1, taps))
    # (C, taps, pixels), by group of weights
    of_weights = len(x) // weight.shape[1]
    columns = columns.flatten(0, 1).flatten(2).unflatten(0, (of_weights, -1)).flatten(1, 2)
    out = weight.flatten(1).unflatten(0, (of_weights, -1)) @ columns
    out = out.flatten(0, 1).unflatten(1, (rows, width))
    return out if bias is None else out + bias[:, None, None]


class _Corner(NamedTuple):
    """A corner of places: its pixel, if it is inside, and the factors that it has in y and x.

    The signs are the derivatives of the factors.
    """

    place: Tensor
    is_inside: Tensor
    weight_y: Tensor
    weight_x: Tensor
    sign_y: int
    sign_x: int

    def gather(self, flat: Tensor) -> Tensor:
        """Return the corner of each channel of `(groups, channels, pixels)`, 0 outside."""
        at = self.place[:, None].expand(-1, flat.shape[1], -1)
        corner = flat.gather(2, at).unflatten(2, self.is_inside.shape[1:])
        return corner.where(self.is_inside[:, None], 0.0)


class _Places(NamedTuple):
    """Places of taps at some pixels, `(groups, taps, rows, columns)`; far from the image -2."""

    y: Tensor
    x: Tensor
    is_nan: Tensor

    @classmethod
    def of(
        cls, x: Tensor, offset: Tensor, weight: Tensor, geometry: DeformGeometry, first_row: int
    ) -> _Places:
        """Return the places of rows of the output, as `convolve` has them."""
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
        is_near = (y > -2) & (y < x.shape[1] + 1) & (at_x > -2) & (at_x < x.shape[2] + 1)
        is_nan = y.isnan() | at_x.isnan()
        return cls(y.where(is_near, -2.0), at_x.where(is_near, -2.0), is_nan)

    def corners(self, size: tuple[int, ...]) -> Iterator[_Corner]:
        """Yield the four corners in an image of a size."""
        height, width = size
        top, left = self.y.detach().floor(), self.x.detach().floor()
        down, right = self.y - top, self.x - left
        for row, weight_y in ((0, 1 - down), (1, down)):
            for column, weight_x in ((0, 1 - right), (1, right)):
                r, c = top + row, left + column
                is_inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
                place = (r.clamp(0, height - 1) * width + c.clamp(0, width - 1)).long().flatten(1)
                signs = (2 * row - 1, 2 * column - 1)
                yield _Corner(place, is_inside, weight_y, weight_x, *signs)


def _sample(x: Tensor, places: _Places) -> Tensor:
    """Return `(groups, channels, H, W)` between its pixels, `(groups, channels, taps, rows, Wo)`.

    What is far away is 0, and what is NaN is NaN without a place.
    """
    flat = x.flatten(2)
    terms = [
        (corner.weight_y * corner.weight_x)[:, None] * corner.gather(flat)
        for corner in places.corners(x.shape[2:])
    ]
    return torch.where(places.is_nan[:, None], torch.nan, sum(terms[1:], terms[0]))


def _bands(out: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield images and rows of the output."""
    height, width = out.shape[2:]
    step = max(1, _BAND_PIXELS // max(1, width))
    for image in range(len(out)):
        for first in range(0, height, step):
            yield image, slice(first, min(height, first + step))
