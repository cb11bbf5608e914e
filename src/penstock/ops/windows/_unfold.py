"""The function `unfold_windows`, and its operators."""

# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.codegen import name_kernels
from penstock.compat.dispatch import loop_over_batches
from penstock.ops._operands import check_operand
from penstock.ops.windows import _native, _torch
from penstock.ops.windows._geometry import Pair, Windows


def unfold_windows(
    x: Tensor, kernel: Pair, stride: Pair = 1, padding: Pair = 0, dilation: Pair = 1
) -> Tensor:
    """Return all windows of images, neighbours sharing memory: a third of `F.unfold`'s for 3 x 3.

    Each row of windows is a strip of the image, column by column, in which a window is one run of
    `Fh * Fw` elements and its right neighbour begins `stride * Fh` elements later (Lu et al.,
    "Im2win", arXiv:2306.14316, section 3). The result is a view of the strips. The backward pass
    needs no windows and stores none.

    Example:
        >>> x = torch.arange(20.0).reshape(1, 1, 4, 5)
        >>> windows = unfold_windows(x, 3)
        >>> windows.shape
        torch.Size([1, 1, 2, 3, 3, 3])
        >>> bool((windows[0, 0, 1, 2] == x[0, 0, 1:4, 2:5]).all())
        True
        >>> windows.mT.flatten(-2).stride()[-1]  # window order: a view, column by column
        1

    Args:
        x: `(N, C, H, W)`, float32, float16, bfloat16 or float64.
        kernel: Rows and columns of a window, `(Fh, Fw)`, or one number for both, as of all others.
        stride: Distance of neighbouring windows.
        padding: Zeros on each side.
        dilation: Distance of neighbouring elements of a window. Beyond 1 in width, a window is Fw
            runs of Fh elements.

    Returns:
        `(N, C, Ho, Wo, Fh, Fw)`, of the dtype of x. Elements of several windows are one: do not
        write to it.

    Raises:
        TypeError: x has another dtype, or another argument is no int or pair of them.
        ValueError: x has other dimensions, a number is too small, or no window fits.
    """
    windows = Windows.of(kernel, stride, padding, dilation)
    check_images(x)
    windows.count_windows(x.shape[2], x.shape[3])
    return _unfold(x, windows.numbers)


def check_images(x: Tensor) -> None:
    """Refuse a tensor that is not `(N, C, H, W)` of a known dtype.

    Raises:
        TypeError: The dtype is another.
        ValueError: The dimensions are.
    """
    check_operand("x", x)
    if x.dim() != 4:
        raise ValueError(f"x has the shape {tuple(x.shape)}, but must be (N, C, H, W)")


def kernels_for(x: Tensor) -> ModuleType:
    """Return the module with the kernels of windows and filters for the device of x."""
    path = name_kernels(x.device.type, _native.is_available)
    if path == "Triton":
        return import_module("penstock.ops.windows._launch")
    return _native if path == "C++" else _torch


@torch.library.custom_op("penstock::unfold_windows", mutates_args=())
def _unfold(x: Tensor, windows: Sequence[int]) -> Tensor:
    """Return windows as a view of their strips."""
    return kernels_for(x).unfold(x, Windows.of_numbers(windows))


@torch.library.custom_op("penstock::fold_windows", mutates_args=())
def _fold(dwindows: Tensor, windows: Sequence[int], height: int, width: int) -> Tensor:
    """Return of each element of images the sum of its places in windows."""
    return kernels_for(dwindows).fold(dwindows, Windows.of_numbers(windows), height, width)


@_unfold.register_fake
def _(x, windows):
    of = Windows.of_numbers(windows)
    out = of.count_windows(x.shape[2], x.shape[3])
    shape = (*x.shape[:2], *out, *of.kernel)
    return torch.empty_strided(
        shape, of.strides_of(x.shape[1], out), dtype=x.dtype, device=x.device
    )


@_fold.register_fake
def _(dwindows, windows, height, width):
    return dwindows.new_empty(*dwindows.shape[:2], height, width)


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.windows = inputs
    ctx.size = x.shape[2:]


def _differentiate(ctx: Any, dwindows: Tensor) -> tuple[Any, ...]:
    return _fold(dwindows, ctx.windows, *ctx.size), None


def _keep_windows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.windows = inputs[1]


def _differentiate_fold(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    return _unfold(dx, ctx.windows), None, None, None


_unfold.register_autograd(_differentiate, setup_context=_keep_size)
_fold.register_autograd(_differentiate_fold, setup_context=_keep_windows)
loop_over_batches(_unfold)
loop_over_batches(_fold)
