"""Rational activations by torch: the formula, with gradients of any order, and in bounded memory.

`evaluate` is the oracle of all kernels. Rows pass by tiles, so that the powers of a tile are all
that is stored beside operands and results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops._columns import choose_tile_rows
from penstock.ops._operands import sum_dtype


def evaluate(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return y = P / Q of `(rows, C)` in the dtype of the coefficients.

        P = sum_i a_i x^i        Q = 1 + sum_j |b_j| |x|^j

    Args:
        x: `(rows, C)`.
        numerator: `(G, m + 1)`, of the dtype of sums.
        denominator: `(G, n)`, of the same.
    """
    num_groups = numerator.shape[0]
    of_groups = x.to(numerator.dtype).unflatten(1, (num_groups, x.shape[1] // num_groups))
    p = _polynomial(of_groups, numerator)
    if denominator.shape[1] == 0:
        return p.reshape(x.shape)
    size = of_groups.abs()
    return (p / (1 + size * _polynomial(size, denominator.abs()))).reshape(x.shape)


def _polynomial(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return sum_i c_i x^i of `(rows, G, width)`, by Horner's rule."""
    by_power = coefficients.unbind(1)
    value = by_power[-1][:, None].expand(x.shape)
    for each in reversed(by_power[:-1]):
        value = value * x + each[:, None]
    return value


def forward(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return `evaluate` in the dtype of x, contiguous."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for first, tile in _tiles_of(x):
        y[first : first + len(tile)] = evaluate(tile, numerator, denominator)
    return y


def backward(
    dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, the numerator and the denominator, in their shapes and dtypes.

    Args:
        dy: Gradient of the output, of the shape of x.
        x: As `forward` got it, like all others.
        numerator: Coefficients a.
        denominator: Coefficients b.
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    coefficients = numerator.detach(), denominator.detach()
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in coefficients]
    for first, tile in _tiles_of(x.detach()):
        end = first + len(tile)
        inputs = [each.requires_grad_() for each in (tile.to(sum_dtype(x.dtype)), *coefficients)]
        inputs = [each.detach().requires_grad_() for each in inputs]
        with torch.enable_grad():
            y = evaluate(*inputs)
        found = torch.autograd.grad(y, inputs, dy[first:end].to(y.dtype), allow_unused=True)
        dx[first:end] = found[0]
        for total, each in zip(sums, found[1:], strict=True):
            if each is not None:
                total += each
    return dx, sums[0].to(numerator.dtype), sums[1].to(denominator.dtype)


def _tiles_of(x: Tensor) -> list[tuple[int, Tensor]]:
    """Return the first row of each tile, and its rows."""
    num_rows = choose_tile_rows(len(x))
    return [(k * num_rows, tile) for k, tile in enumerate(x.split(num_rows))] if len(x) else []
