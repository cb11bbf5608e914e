"""Blocks of the kernels, chosen from shapes alone, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import Run, TritonLaunch, launch, use_device
from penstock.ops._column_launch import add_partials
from penstock.ops.rational import _kernels

_BLOCK_BYTES = 8192  # in the dtype of sums: with four warps sixteen float32 of each thread
_LEAST_COLUMNS, _MOST_COLUMNS = 32, 128


class RationalSizes(NamedTuple):
    """Constants of the kernels; each is a `tl.constexpr`.

    Attributes:
        rows: Rows of a block.
        columns: Channels of a block.
        powers: Coefficients of the numerator.
        roots: Coefficients of the denominator.
    """

    rows: Any
    columns: Any
    powers: Any
    roots: Any


def forward(x: Tensor, numerator: Tensor, denominator: Tensor, *, run: Run = launch) -> Tensor:
    """Return the activation as `_torch.forward` does; `run` takes the launch."""
    x = x.contiguous()
    y = torch.empty_like(x)
    grid, width, sizes = cut_blocks(x, numerator, denominator)
    arguments = (x, numerator, denominator, y, len(x), width, sizes)
    with use_device(x.device):
        run(TritonLaunch(kernel=_kernels.evaluate, grid=grid, arguments=arguments))
    return y


def backward(
    dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor, *, run: Run = launch
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as `_torch.backward` does; `run` takes the launches."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    num_groups, counts = len(numerator), [numerator.shape[1], denominator.shape[1]]
    grid, width, sizes = cut_blocks(x, numerator, denominator)
    partials = numerator.new_empty(grid[0], num_groups * sum(counts))
    arguments = (x, dy, numerator, denominator, dx, partials, len(x), width, sizes)
    with use_device(x.device):
        run(TritonLaunch(kernel=_kernels.differentiate, grid=grid, arguments=arguments))
        sums = add_partials(partials, run=run).view(num_groups, -1).to(numerator.dtype)
    of_numerator, of_denominator = sums.split(counts, 1)
    return dx, of_numerator.clone(), of_denominator.clone()


def cut_blocks(
    x: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[tuple[int, int], int, RationalSizes]:
    """Return the grid of blocks and groups, the channels of a group, and the constants."""
    width = x.shape[1] // len(numerator)
    columns = width & -width if width else 1  # the power of two that divides it
    if columns < _LEAST_COLUMNS:
        columns = 1 << (width - 1).bit_length() if width else 1
    columns = min(columns, _MOST_COLUMNS)
    rows = _BLOCK_BYTES // numerator.element_size() // columns
    grid = (-(-len(x) // rows) * -(-width // columns), len(numerator))
    counts = numerator.shape[1], denominator.shape[1]
    return grid, width, RationalSizes(*map(tl.constexpr, (rows, columns, *counts)))
