"""Windows and position-dependent filters by torch: the way without kernels.

Products pass by rows of the output, so that the windows of one row are all that is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.ops._operands import sum_dtype
from penstock.ops.windows._geometry import Windows


def unfold(x: Tensor, windows: Windows) -> Tensor:
    """Return the windows of images as a view of their strips, as `unfold_windows` says.

    Args:
        x: `(N, C, H, W)`.
        windows: Their geometry.
    """
    out, rows = windows.count_windows(*x.shape[2:]), windows.kernel[0]
    span = windows.span(out[1])
    padded = pad(x, (windows.padding[1],) * 2 + (windows.padding[0],) * 2)
    strips = x.new_empty(*x.shape[:2], out[0], span, rows)
    for f in range(rows):
        first = f * windows.dilation[0]
        end = first + (out[0] - 1) * windows.stride[0] + 1
        strips[..., f] = padded[:, :, first : end : windows.stride[0], :span]
    shape = (*x.shape[:2], *out, *windows.kernel)
    return strips.as_strided(shape, windows.strides_of(x.shape[1], out))


def fold(dwindows: Tensor, windows: Windows, height: int, width: int) -> Tensor:
    """Return of each element of images the sum of its places in windows, contiguous.

    Args:
        dwindows: `(N, C, Ho, Wo, Fh, Fw)`, of any strides.
        windows: Their geometry.
        height: Rows of the images.
        width: Columns of the images.
    """
    sums = _new_sums(dwindows, dwindows.shape[1], windows, height, width)
    rows, columns = _places(windows, *dwindows.shape[2:4])
    for f, row in enumerate(rows):
        for k, column in enumerate(columns):
            sums[:, :, row, column] += dwindows[..., f, k]
    return _crop(sums, windows, height, width, dwindows.dtype)


def multiply(x: Tensor, weight: Tensor, windows: Windows, groups: int) -> Tensor:
    """Return the filtered images `(N, O, Ho, Wo)`, contiguous, as `_filters.py` says.

    Args:
        x: `(N, C, H, W)`.
        weight: `(O, C / G, Fh, Fw, Ho, Wo)`, or `(N, G, Fh, Fw, Ho, Wo)` with G dividing C.
        windows: The geometry.
        groups: G; 0 where each sample has weights of its own.
    """
    found, (height, width) = unfold(x, windows), weight.shape[4:]
    y = x.new_empty(x.shape[0], weight.shape[0] if groups else x.shape[1], height, width)
    for i in range(height):
        of_x, of_weight = _pair(found[:, :, i], weight[..., i, :], groups)
        equation = "ngcjfk,gocfkj->ngoj" if groups else "ngcjfk,ngfkj->ngcj"
        y[:, :, i] = torch.einsum(equation, of_x, of_weight).flatten(1, 2)
    return y


def differentiate_input(
    dy: Tensor, weight: Tensor, windows: Windows, groups: int, size: Sequence[int]
) -> Tensor:
    """Return the gradient of images, contiguous; `size` is theirs, all else as in `multiply`."""
    channels = weight.shape[1] * groups if groups else dy.shape[1]
    height, width = size
    sums = _new_sums(dy, channels, windows, height, width)
    equation = "ngoj,gocfkj->ngcjfk" if groups else "ngcj,ngfkj->ngcjfk"
    _, columns = _places(windows, *dy.shape[2:])
    for i in range(dy.shape[2]):
        of_dy, of_weight = _pair(dy[:, :, i], weight[..., i, :], groups)
        terms = torch.einsum(equation, of_dy, of_weight).flatten(1, 2)
        for f in range(windows.kernel[0]):
            row = i * windows.stride[0] + f * windows.dilation[0]
            for k, column in enumerate(columns):
                sums[:, :, row, column] += terms[..., f, k]
    return _crop(sums, windows, height, width, dy.dtype)


def differentiate_weight(
    dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, groups: int
) -> Tensor:
    """Return the gradient of weights, which lies as they do; all else is as in `multiply`."""
    found, dweight = unfold(x, windows), torch.empty_like(weight)
    equation = "ngoj,ngcjfk->gocfkj" if groups else "ngcj,ngcjfk->ngfkj"
    num_groups = groups or weight.shape[1]
    for i in range(dy.shape[2]):
        of_dy, of_x = (
            each.to(sum_dtype(x.dtype)).unflatten(1, (num_groups, each.shape[1] // num_groups))
            for each in (dy[:, :, i], found[:, :, i])
        )
        terms = torch.einsum(equation, of_dy, of_x)
        dweight[..., i, :] = terms.flatten(0, 1) if groups else terms
    return dweight


def _pair(images: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return a row of images and one of weights by group, in the dtype of sums."""
    images, weight = (each.to(sum_dtype(each.dtype)) for each in (images, weight))
    if groups:
        weight = weight.unflatten(0, (groups, weight.shape[0] // groups))
    num_groups = groups or weight.shape[1]
    return images.unflatten(1, (num_groups, images.shape[1] // num_groups)), weight


def _places(windows: Windows, num_rows: int, num_columns: int) -> tuple[list[slice], list[slice]]:
    """Return, by place in the kernel, the rows and columns of padded images of all windows."""
    rows, columns = (
        [
            slice(f * dilation, f * dilation + (number - 1) * stride + 1, stride)
            for f in range(kernel)
        ]
        for kernel, stride, dilation, number in zip(
            windows.kernel, windows.stride, windows.dilation, (num_rows, num_columns), strict=True
        )
    )
    return rows, columns


def _new_sums(of: Tensor, channels: int, windows: Windows, height: int, width: int) -> Tensor:
    """Return zeros in the size of padded images."""
    padded = (height + 2 * windows.padding[0], width + 2 * windows.padding[1])
    return of.new_zeros(of.shape[0], channels, *padded, dtype=sum_dtype(of.dtype))


def _crop(sums: Tensor, windows: Windows, height: int, width: int, dtype: torch.dtype) -> Tensor:
    top, left = windows.padding
    return sums[:, :, top : top + height, left : left + width].to(dtype).contiguous()
