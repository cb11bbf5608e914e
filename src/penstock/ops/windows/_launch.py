"""Blocks of the kernels, chosen from shapes alone, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import Run, TritonLaunch, launch, use_device
from penstock.ops.windows import _kernels
from penstock.ops.windows._filters import Filters, can_multiply, read_weight
from penstock.ops.windows._geometry import Windows

COLUMNS = 128  # of a block of one row
SAMPLES, PRODUCT_COLUMNS = 8, 64  # of a block of products


class Geometry(NamedTuple):
    """The numbers of `Windows`; each is a `tl.constexpr`."""

    kernel_height: Any
    kernel_width: Any
    stride_height: Any
    stride_width: Any
    padding_height: Any
    padding_width: Any
    dilation_height: Any
    dilation_width: Any


class Size(NamedTuple):
    """Sizes of images and outputs."""

    height: int
    width: int
    out_height: int
    out_width: int


class WindowStrides(NamedTuple):
    """Strides of `(N, C, Ho, Wo, Fh, Fw)`."""

    sample: int
    channel: int
    row: int
    column: int
    kernel_row: int
    kernel_column: int


class ImageStrides(NamedTuple):
    """Strides of images, as of `Filters`."""

    instance: int
    sample: int
    channel: int


class WeightStrides(NamedTuple):
    """Strides of weights, as of `Filters`."""

    instance: int
    out: int
    channel: int
    row: int
    column: int
    line: int


class FilterOperands(NamedTuple):
    """Sizes and strides of `Filters`, without the number of instances."""

    batch: int
    channels: int
    outs: int
    x: ImageStrides
    y: ImageStrides
    weight: WeightStrides


class BlockSizes(NamedTuple):
    """Constants of a kernel: samples and columns of a block, and the dtype of sums."""

    samples: Any
    columns: Any
    dtype: Any


def unfold(x: Tensor, windows: Windows, *, run: Run = launch) -> Tensor:
    """Return windows as `_torch.unfold` does; `run` takes the launch."""
    x, out = x.contiguous(), windows.count_windows(*x.shape[2:])
    span = windows.span(out[1])
    strips = x.new_empty(*x.shape[:2], out[0], span, windows.kernel[0])
    grid = (x.shape[:2].numel() * out[0], -(-span // COLUMNS))
    size, g = Size(x.shape[2], x.shape[3], *out), _geometry(windows)
    arguments = (x, strips, size, span, g, _sizes(x, COLUMNS))
    with use_device(x.device):
        run(TritonLaunch(kernel=_kernels.unfold_rows, grid=grid, arguments=arguments))
    shape = (*x.shape[:2], *out, *windows.kernel)
    return strips.as_strided(shape, windows.strides_of(x.shape[1], out))


def fold(
    dwindows: Tensor, windows: Windows, height: int, width: int, *, run: Run = launch
) -> Tensor:
    """Return images as `_torch.fold` does; `run` takes the launch."""
    samples, channels, *out = dwindows.shape[:4]
    dx = dwindows.new_empty(samples, channels, height, width)
    grid = (samples * channels * height, -(-width // COLUMNS))
    arguments = (
        *(dwindows, dx, WindowStrides(*dwindows.stride()), Size(height, width, *out), channels),
        *(_geometry(windows), _sizes(dx, COLUMNS)),
    )
    with use_device(dx.device):
        run(TritonLaunch(kernel=_kernels.sum_windows, grid=grid, arguments=arguments))
    return dx


def multiply(
    x: Tensor, weight: Tensor, windows: Windows, groups: int, *, run: Run = launch
) -> Tensor:
    """Return filtered images as `_torch.multiply` does; `run` takes the launch."""
    x, weight = x.contiguous(), read_weight(weight, groups)
    num_outs = weight.shape[0] if groups else x.shape[1]
    y = x.new_empty(x.shape[0], num_outs, *weight.shape[4:])
    of = Filters.of(x.shape, weight, groups)
    grid = _grid(of.instances * of.outs * weight.shape[4], weight.shape[5], of.batch)
    arguments = (x, weight, y, *_sizes_of(x.shape, weight, windows, of))
    with use_device(x.device):
        run(TritonLaunch(kernel=_kernels.multiply, grid=grid, arguments=arguments))
    return y


def differentiate_input(
    dy: Tensor,
    weight: Tensor,
    windows: Windows,
    groups: int,
    size: Sequence[int],
    *,
    run: Run = launch,
) -> Tensor:
    """Return the gradient of images as `_torch.differentiate_input` does."""
    dy, weight = dy.contiguous(), read_weight(weight, groups)
    dx = dy.new_empty(dy.shape[0], weight.shape[1] * groups if groups else dy.shape[1], *size)
    of = Filters.of(dx.shape, weight, groups)
    grid = _grid(of.instances * of.channels * size[0], size[1], of.batch)
    arguments = (dy, weight, dx, *_sizes_of(dx.shape, weight, windows, of))
    with use_device(dy.device):
        run(TritonLaunch(kernel=_kernels.differentiate_input, grid=grid, arguments=arguments))
    return dx


def differentiate_weight(
    dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, groups: int, *, run: Run = launch
) -> Tensor:
    """Return the gradient of weights as `_torch.differentiate_weight` does."""
    dweight = torch.empty_like(weight)
    is_written = can_multiply(dweight, groups)
    target = dweight if is_written else dweight.contiguous()
    of = Filters.of(x.shape, target, groups)
    num_lines = of.instances * of.outs * of.channels * weight.shape[4]
    grid = (num_lines, -(-weight.shape[5] // PRODUCT_COLUMNS))
    arguments = (dy.contiguous(), x.contiguous(), target)
    arguments += _sizes_of(x.shape, target, windows, of)
    with use_device(x.device):
        run(TritonLaunch(kernel=_kernels.differentiate_weight, grid=grid, arguments=arguments))
    return dweight if is_written else dweight.copy_(target)


def _grid(num_lines: int, width: int, batch: int) -> tuple[int, int, int]:
    return num_lines, -(-width // PRODUCT_COLUMNS), -(-batch // SAMPLES)


def _sizes_of(
    shape: torch.Size, weight: Tensor, windows: Windows, of: Filters
) -> tuple[Size, FilterOperands, Geometry, BlockSizes]:
    """Return what kernels of products take beside operands."""
    strides = ImageStrides(*of.x), ImageStrides(*of.y), WeightStrides(*of.weight)
    operands = FilterOperands(of.batch, of.channels, of.outs, *strides)
    size = Size(*shape[2:], *weight.shape[4:])
    return size, operands, _geometry(windows), _sizes(weight, PRODUCT_COLUMNS)


def _geometry(windows: Windows) -> Geometry:
    return Geometry(*map(tl.constexpr, windows.numbers))


def _sizes(tensor: Tensor, columns: int) -> BlockSizes:
    dtype = tl.float64 if tensor.dtype == torch.float64 else tl.float32
    return BlockSizes(tl.constexpr(SAMPLES), tl.constexpr(columns), tl.constexpr(dtype))
