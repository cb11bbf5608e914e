"""Rational activations on the CPU, in C++ (`rational.cpp`), a library for each pair of degrees."""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import REALS, THREADS, VECTORS, load_optional_library
from penstock.ops._columns import COLUMNS
from penstock.ops._operands import KINDS
from penstock.ops._tiles import choose_tile_rows

_TILE_ELEMENTS = 4096  # of a group, at least: 8 bytes of each sum are little beside them
_pack = struct.Struct("7P6q").pack  # `struct Call` of `rational.cpp`


def is_available(num_powers: int, num_roots: int) -> bool:
    """Return whether the kernels of these numbers of coefficients can be built, or were."""
    return _library(num_powers, num_roots) is not None


def forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the activation as `_torch.forward` does."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _call(x, numerator, denominator, y)
    return y


def backward(
    dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as `_torch.backward` does."""
    x = x.contiguous()
    dx = torch.empty_like(x)
    num_powers, num_roots = numerator.shape[1], denominator.shape[1]
    sums = torch.empty(len(numerator), num_powers + num_roots, dtype=torch.float64, device="cpu")
    _call(x, numerator, denominator, dx, dy=dy.contiguous(), sums=sums)
    of_numerator, of_denominator = sums.to(numerator.dtype).split([num_powers, num_roots], 1)
    return dx, of_numerator.clone(), of_denominator.clone()  # results of operators are no views


def _call(
    x: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    out: Tensor,
    *,
    dy: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write the activation to `out`, or with `dy` the gradients to `out` and `sums`."""
    num_rows, num_groups = len(x), len(numerator)
    width = x.shape[1] // num_groups
    tile_rows = choose_tile_rows(num_rows, _TILE_ELEMENTS // max(1, width))
    partials = None
    if sums is not None:
        partials = torch.empty(
            -(-num_rows // tile_rows), *sums.shape, dtype=torch.float64, device="cpu"
        )
    operands = (x, dy, out, numerator, denominator, partials, sums)
    arguments = _pack(
        *(0 if each is None else each.data_ptr() for each in operands),
        *(num_rows, num_groups, width, tile_rows, KINDS[x.dtype], torch.get_num_threads()),
    )
    library = _library(numerator.shape[1], denominator.shape[1])
    assert library is not None, "there is a path without the library"
    library.penstock_group_rational(arguments)


@functools.cache
def _library(num_powers: int, num_roots: int) -> ctypes.CDLL | None:
    return load_optional_library(
        f"group_rational_{num_powers}_{num_roots}",
        [THREADS, VECTORS, REALS, COLUMNS, Path(__file__).with_name("rational.cpp")],
        flags=(
            *("-O3", "-march=native"),
            *(f"-DPENSTOCK_NUMERATOR={num_powers}", f"-DPENSTOCK_DENOMINATOR={num_roots}"),
        ),
        functions={"penstock_group_rational": (None, [ctypes.c_char_p])},
        work=f"rational activations of {num_powers} and {num_roots} coefficients are computed",
        otherwise="by torch, slower",
    )
