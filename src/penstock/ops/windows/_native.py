"""Windows and position-dependent filters on the CPU, in C++ (`windows.cpp`, `local.cpp`)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import REALS, THREADS, VECTORS, load_optional_library
from penstock.compat.dynamo import mark_constant
from penstock.ops._operands import KINDS
from penstock.ops.windows._filters import Filters, can_multiply, read_weight
from penstock.ops.windows._geometry import Windows

_FILES = ("windows.cpp", "local.cpp")
_pack_windows = struct.Struct("2P22q").pack  # `struct WindowCall` of `windows.cpp`
_pack_filter = struct.Struct("4P30q").pack  # `struct FilterCall` of `local.cpp`
_FORWARD, _INPUT, _WEIGHT = range(3)  # `enum Pass`


@mark_constant
def is_available() -> bool:
    """Return whether the kernels can be built, or were."""
    return _library() is not None


def unfold(x: Tensor, windows: Windows) -> Tensor:
    """Return windows as `_torch.unfold` does."""
    x, out = x.contiguous(), windows.count_windows(*x.shape[2:])
    strips = x.new_empty(*x.shape[:2], out[0], windows.span(out[1]), windows.kernel[0])
    arguments = _pack_windows(
        *(x.data_ptr(), strips.data_ptr(), *windows.numbers, *x.shape[2:], *out),
        *(*x.shape[:2], *[0] * 6, KINDS[x.dtype], torch.get_num_threads()),
    )
    _call("penstock_unfold_windows", arguments)
    shape = (*x.shape[:2], *out, *windows.kernel)
    return strips.as_strided(shape, windows.strides_of(x.shape[1], out))


def fold(dwindows: Tensor, windows: Windows, height: int, width: int) -> Tensor:
    """Return images as `_torch.fold` does."""
    samples, channels, *out = dwindows.shape[:4]
    dx = dwindows.new_empty(samples, channels, height, width)
    arguments = _pack_windows(
        *(dwindows.data_ptr(), dx.data_ptr(), *windows.numbers, height, width, *out),
        *(samples, channels, *dwindows.stride(), KINDS[dx.dtype], torch.get_num_threads()),
    )
    _call("penstock_fold_windows", arguments)
    return dx


def multiply(x: Tensor, weight: Tensor, windows: Windows, groups: int) -> Tensor:
    """Return filtered images as `_torch.multiply` does."""
    x, weight = x.contiguous(), read_weight(weight, groups)
    num_outs = weight.shape[0] if groups else x.shape[1]
    y = x.new_empty(x.shape[0], num_outs, *weight.shape[4:])
    _filter(_FORWARD, (x, weight, None, y), x.shape, weight, windows, groups)
    return y


def differentiate_input(
    dy: Tensor, weight: Tensor, windows: Windows, groups: int, size: Sequence[int]
) -> Tensor:
    """Return the gradient of images as `_torch.differentiate_input` does."""
    dy, weight = dy.contiguous(), read_weight(weight, groups)
    dx = dy.new_empty(dy.shape[0], weight.shape[1] * groups if groups else dy.shape[1], *size)
    _filter(_INPUT, (None, weight, dy, dx), dx.shape, weight, windows, groups)
    return dx


def differentiate_weight(
    dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, groups: int
) -> Tensor:
    """Return the gradient of weights as `_torch.differentiate_weight` does."""
    dweight = torch.empty_like(weight)
    # Weights of a form that kernels do not write have a gradient that is copied.
    is_written = can_multiply(dweight, groups)
    target = dweight if is_written else dweight.contiguous()
    tensors = (x.contiguous(), None, dy.contiguous(), target)
    _filter(_WEIGHT, tensors, x.shape, target, windows, groups)
    return dweight if is_written else dweight.copy_(target)


def _filter(
    which: int,
    tensors: tuple[Tensor | None, ...],
    shape: torch.Size,
    weight: Tensor,
    windows: Windows,
    groups: int,
) -> None:
    """Call a pass; `tensors` are x, the weights, dy and the result, of which it has three."""
    of = Filters.of(shape, weight, groups)
    arguments = _pack_filter(
        *(0 if each is None else each.data_ptr() for each in tensors),
        *(*windows.numbers, *shape[2:], *weight.shape[4:]),
        *(*of.sizes, *of.x, *of.y, *of.weight),
        *(KINDS[weight.dtype], torch.get_num_threads()),
    )
    result = tensors[-1]
    if result is not None and result.numel() > 0:
        _call("penstock_filter", arguments, which)


def _call(name: str, *arguments: object) -> None:
    library = _library()
    assert library is not None, "there is a path without the library"
    getattr(library, name)(*arguments)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "windows",
        [THREADS, VECTORS, REALS, *(Path(__file__).with_name(name) for name in _FILES)],
        flags=("-O3", "-march=native"),
        functions={
            "penstock_unfold_windows": (None, [ctypes.c_char_p]),
            "penstock_fold_windows": (None, [ctypes.c_char_p]),
            "penstock_filter": (None, [ctypes.c_char_p, ctypes.c_int]),
        },
        work="windows and filters of them are computed",
        otherwise="by torch, slower",
    )
