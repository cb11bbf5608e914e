"""Tiles of the kernels, chosen from shapes alone, and their launches.

The backward pass has the gradients of columns for a window of pixels at a time. Those of the input
are gathered from it. Where offsets have a bound, each pixel looks through its halo, the outputs
from which an offset may reach it. Where they have none, or the halo is large, corners of the
window's places are sorted by their pixel, so that each pixel has a list of columns that reach it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import (
    Run,
    TritonLaunch,
    ceil_power,
    launch,
    product_precision,
    use_device,
)
from penstock.ops.deform._shapes import (
    DeformGeometry,
    DeformInputs,
    count_offset_groups,
    count_taps,
)
from penstock.ops.deform.triton import _kernels

_WINDOW_BYTES = 32 * 2**20  # of the columns' gradients
_TILE_PIXELS, _TILE_OUTS, _TILE_CHANNELS = 32, 64, 32
_LEAST_TILE = 16  # of a matrix that tensor cores multiply
_PARTS = 8
_MOST_HALO = 512
"""Places that a pixel looks through for a tap, in all tiles of channels. They are 8 bytes, in a
cache; sorting moves about 1 KiB of memory for a place. The bound was not measured on a GPU."""


class DeformOperands(NamedTuple):
    """Operands that columns are sampled from; a mask that there is none of is not read."""

    x: Tensor
    offset: Tensor
    mask: Tensor


class DeformSizes(NamedTuple):
    """Constants of the kernels; each is a `tl.constexpr`.

    `of_group` and `of_offset` are the channels of a group of weights and of offsets, and `segment`
    those that share both; there are `segments` of them in a group of weights. `halo_height` and
    `halo_width` are outputs whose offsets, within `reach`, may take a tap to a pixel; 0 where
    offsets have no bound.
    """

    batch: Any
    channels: Any
    height: Any
    width: Any
    outs: Any
    outs_of_group: Any
    taps: Any
    kernel_width: Any
    out_height: Any
    out_width: Any
    stride_y: Any
    stride_x: Any
    padding_y: Any
    padding_x: Any
    dilation_y: Any
    dilation_x: Any
    offset_groups: Any
    of_group: Any
    of_offset: Any
    segment: Any
    segments: Any
    parts: Any
    has_mask: Any
    has_bias: Any
    reach: Any
    halo_height: Any
    halo_width: Any
    tile_pixels: Any
    tile_outs: Any
    tile_channels: Any
    precision: Any


def sizes_of(given: DeformInputs) -> DeformSizes:
    """Return the constants of a call as plain numbers."""
    x, offset, weight, bias, mask, geometry = given
    of_group, offset_groups = weight.shape[1], count_offset_groups(offset, weight)
    of_offset = x.shape[1] // offset_groups
    segment = math.gcd(of_group, of_offset)
    outs_of_group = len(weight) * of_group // x.shape[1]
    tile_channels = min(_TILE_CHANNELS, ceil_power(segment, _LEAST_TILE))
    halo = _measure_halo(geometry, -(-of_offset // tile_channels))
    return DeformSizes(
        *x.shape,
        outs=len(weight),
        outs_of_group=outs_of_group,
        taps=count_taps(weight),
        kernel_width=weight.shape[3],
        **dict(zip(("out_height", "out_width"), geometry.out_size(x, weight), strict=True)),
        **dict(zip(("stride_y", "stride_x"), geometry.stride, strict=True)),
        **dict(zip(("padding_y", "padding_x"), geometry.padding, strict=True)),
        **dict(zip(("dilation_y", "dilation_x"), geometry.dilation, strict=True)),
        offset_groups=offset_groups,
        of_group=of_group,
        of_offset=of_offset,
        segment=segment,
        segments=of_group // segment,
        parts=max(1, min(len(x), _PARTS)),
        has_mask=mask is not None,
        has_bias=bias is not None,
        reach=geometry.reach or 0,
        **dict(zip(("halo_height", "halo_width"), halo, strict=True)),
        tile_pixels=_TILE_PIXELS,
        tile_outs=min(_TILE_OUTS, ceil_power(outs_of_group, _LEAST_TILE)),
        tile_channels=tile_channels,
        precision=product_precision(),
    )


def _measure_halo(geometry: DeformGeometry, channel_tiles: int) -> tuple[int, int]:
    """Return rows and columns of outputs whose tap may be moved to a pixel, of 2 reach + 1.

    There is no halo without a bound, or where sorting moves less.
    """
    if geometry.reach is None:
        return 0, 0
    height, width = (2 * geometry.reach // stride + 1 for stride in geometry.stride)
    return (height, width) if height * width * channel_tiles <= _MOST_HALO else (0, 0)


def _as_constants(sizes: DeformSizes) -> DeformSizes:
    return DeformSizes(*(tl.constexpr(each) for each in sizes))


def forward(given: DeformInputs, *, run: Run = launch) -> Tensor:
    """Return the output as `_torch.forward` does; `run` takes the launch."""
    x, offset, weight, bias, mask, _ = given
    sizes, out = sizes_of(given), given.new_output()
    out_tiles = -(-sizes.outs_of_group // sizes.tile_outs)
    groups = x.shape[1] // sizes.of_group
    pixels = sizes.out_height * sizes.out_width
    with use_device(x.device):
        run(
            TritonLaunch(
                kernel=_kernels.convolve_tiles,
                grid=(-(-pixels // sizes.tile_pixels), groups * out_tiles, len(x)),
                arguments=(
                    _operands(x, offset, mask),
                    *(weight.contiguous(), x if bias is None else bias.contiguous(), out),
                    _as_constants(sizes),
                ),
            )
        )
    return out


def backward(
    dout: Tensor,
    given: DeformInputs,
    *,
    run: Run = launch,
    window_bytes: int = _WINDOW_BYTES,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients as `_torch.backward` does.

    `run` takes the launches: one of weights, and for each window one of places and at most one of
    pixels.
    """
    x, offset, weight, bias, mask, _ = given
    sizes = sizes_of(given)
    dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    doffset = torch.empty(offset.shape, dtype=torch.float32, device=x.device)
    dmask = None if mask is None else torch.empty_like(doffset[:, ::2].contiguous())
    operands, dout = _operands(x, offset, mask), dout.contiguous()
    pixels = sizes.out_height * sizes.out_width
    step = max(1, window_bytes // (sizes.channels * sizes.taps * x.element_size()))
    with use_device(x.device):
        dweight = _differentiate_weights(operands, dout, weight, sizes, run)
        for image in range(len(x)):
            for first in range(0, pixels, step):
                window = (image, first, min(pixels, first + step))
                dcolumns = _multiply_window(dout, weight, sizes, window)
                _run_window(operands, dcolumns, doffset, dmask, dx, sizes, window, run)
    return (
        dx.to(x.dtype),
        doffset,
        dweight,
        None if bias is None else dout.sum((0, 2, 3), dtype=torch.float32),
        dmask,
    )


def _differentiate_weights(
    operands: DeformOperands, dout: Tensor, weight: Tensor, sizes: DeformSizes, run: Run
) -> Tensor:
    parts = torch.zeros((sizes.parts, *weight.shape), dtype=torch.float32, device=weight.device)
    out_tiles = -(-sizes.outs_of_group // sizes.tile_outs)
    channel_tiles = sizes.segments * -(-sizes.segment // sizes.tile_channels)
    groups = sizes.channels // sizes.of_group
    run(
        TritonLaunch(
            kernel=_kernels.differentiate_weights,
            grid=(groups * out_tiles, channel_tiles * sizes.taps, sizes.parts),
            arguments=(operands, dout, parts, _as_constants(sizes)),
        )
    )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _multiply_window(
    dout: Tensor, weight: Tensor, sizes: DeformSizes, window: tuple[int, int, int]
) -> Tensor:
    """Return the gradients of columns, `(pixels, groups, taps, channels of a group)`."""
    image, first, end = window
    groups = sizes.channels // sizes.of_group
    given = dout[image].flatten(1)[:, first:end].unflatten(0, (groups, -1))
    by_tap = weight.flatten(2).transpose(1, 2).flatten(1).unflatten(0, (groups, -1))
    columns = given.transpose(1, 2) @ by_tap
    return columns.transpose(0, 1).contiguous()


def _run_window(
    operands: DeformOperands,
    dcolumns: Tensor,
    doffset: Tensor,
    dmask: Tensor | None,
    dx: Tensor,
    sizes: DeformSizes,
    window: tuple[int, int, int],
    run: Run,
) -> None:
    image, first, end = window
    constants = _as_constants(sizes)
    run(
        TritonLaunch(
            kernel=_kernels.differentiate_places,
            grid=(-(-(end - first) // sizes.tile_pixels), sizes.taps, sizes.offset_groups),
            arguments=(
                *(operands, dcolumns, doffset, doffset if dmask is None else dmask),
                *(*window, constants),
            ),
        )
    )
    if sizes.halo_height > 0:
        _gather_halo(operands, dcolumns, dx, sizes, window, run)
        return
    offsets, rows, factors = sort_corners(operands, sizes, window)
    run(
        TritonLaunch(
            kernel=_kernels.gather_gradients,
            grid=_grid_of_pixels(sizes, sizes.height * sizes.width),
            arguments=(dcolumns, offsets, rows, factors, dx, image, constants),
        )
    )


def _gather_halo(
    operands: DeformOperands,
    dcolumns: Tensor,
    dx: Tensor,
    sizes: DeformSizes,
    window: tuple[int, int, int],
    run: Run,
) -> None:
    start, stop = find_reached(sizes, window)
    if start < stop:
        run(
            TritonLaunch(
                kernel=_kernels.gather_halo,
                grid=_grid_of_pixels(sizes, stop - start),
                arguments=(operands, dcolumns, dx, *window, start, stop, _as_constants(sizes)),
            )
        )


def _grid_of_pixels(sizes: DeformSizes, pixels: int) -> tuple[int, int, int]:
    channel_tiles = -(-sizes.of_offset // sizes.tile_channels)
    return -(-pixels // sizes.tile_pixels), channel_tiles, sizes.offset_groups


def find_reached(sizes: DeformSizes, window: tuple[int, int, int]) -> tuple[int, int]:
    """Return the pixels of the input, whole rows, that offsets of a window may reach."""
    _, first, end = window
    last_tap = (sizes.taps // sizes.kernel_width - 1) * sizes.dilation_y
    top = first // sizes.out_width * sizes.stride_y - sizes.padding_y - sizes.reach
    bottom = (end - 1) // sizes.out_width * sizes.stride_y - sizes.padding_y + sizes.reach
    rows = (max(top, 0), min(bottom + last_tap + 1, sizes.height))
    return rows[0] * sizes.width, max(rows) * sizes.width


def sort_corners(
    operands: DeformOperands, sizes: DeformSizes, window: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each offset group and pixel of the input the columns that have a corner there.

    Returns:
        Ends of the lists, int32; of each entry the pixel of the window times the taps plus the tap,
        int32; and the factor of the column's gradient. Corners outside of the image have none.
    """
    image, first, end = window
    groups, taps = sizes.offset_groups, sizes.taps
    device = operands.x.device
    pixel, tap = torch.arange(first, end, device=device), torch.arange(taps, device=device)
    y, x = _find_places(operands, sizes, image, pixel, tap)
    is_near = (y > -2) & (y < sizes.height + 1) & (x > -2) & (x < sizes.width + 1)
    y, x = y.where(is_near, -2.0), x.where(is_near, -2.0)
    top, left = y.floor(), x.floor()
    factor: Any = 1.0
    if sizes.has_mask:
        factor = operands.mask[image].flatten(1)[:, first:end].unflatten(0, (groups, taps))
    plane = sizes.height * sizes.width
    row = (pixel - first) * taps + tap[:, None]
    group = torch.arange(groups, device=device)[:, None, None]
    keys, factors = [], []
    for down in (0, 1):
        for right in (0, 1):
            r, c = top.long() + down, left.long() + right
            is_inside = (r >= 0) & (r < sizes.height) & (c >= 0) & (c < sizes.width)
            key = group * plane + r * sizes.width + c
            keys.append(key.where(is_inside, groups * plane).flatten())
            near_y, near_x = 1 - (y - r).abs(), 1 - (x - c).abs()
            factors.append((near_y * near_x * factor).flatten())
    sorted_keys, order = torch.cat(keys).sort(stable=True)
    numbers = torch.arange(groups * plane + 1, device=device)
    offsets = torch.searchsorted(sorted_keys, numbers).int()
    rows = row.expand(groups, -1, -1).flatten().repeat(4)
    return offsets, rows[order].int(), torch.cat(factors)[order]


def _find_places(
    operands: DeformOperands, sizes: DeformSizes, image: int, pixel: Tensor, tap: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and x of taps at pixels of the output, `(offset groups, taps, pixels)`."""
    tap_y, tap_x = tap // sizes.kernel_width, tap % sizes.kernel_width
    moved = operands.offset[image].flatten(1)[:, pixel]
    moved = moved.unflatten(0, (sizes.offset_groups, sizes.taps, 2))
    y = pixel // sizes.out_width * sizes.stride_y - sizes.padding_y
    x = pixel % sizes.out_width * sizes.stride_x - sizes.padding_x
    y = (y + (tap_y * sizes.dilation_y)[:, None]) + moved[:, :, 0]
    x = (x + (tap_x * sizes.dilation_x)[:, None]) + moved[:, :, 1]
    return y, x


def _operands(x: Tensor, offset: Tensor, mask: Tensor | None) -> DeformOperands:
    offset = offset.contiguous()
    return DeformOperands(x.contiguous(), offset, offset if mask is None else mask.contiguous())
