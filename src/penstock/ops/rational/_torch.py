"""Rational activations by torch: the formula, with gradients of any order, and in bounded memory.

`evaluate` is the oracle of all kernels. Rows pass by tiles, so that the powers of a tile are all
that is stored beside operands and results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops._columns import choose_tile_rows


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
    sums = [torch.zeros_like(each, dtype=torch.float64) for each in (numerator, denominator)]
    for first, tile in _tiles_of(x):
        end = first + len(tile)
        dx[first:end], *found = _differentiate(dy[first:end], tile, numerator, denominator)
        for total, each in zip(sums, found, strict=True):
            total += each
    return dx, sums[0].to(numerator.dtype), sums[1].to(denominator.dtype)


def _differentiate(
    dy: Tensor, x: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one tile.

    dx   = g (P' - y sgn(x) Q') / Q
    da_i = sum g x^i / Q            db_j = -sgn(b_j) sum g y |x|^j / Q
    """
    shape = (len(numerator), x.shape[1] // len(numerator))
    of_x, of_dy = (each.to(numerator.dtype).unflatten(1, shape) for each in (x, dy))
    of_q = torch.cat([torch.ones_like(numerator[:, :1]), denominator.abs()], 1)
    size = of_x.abs()
    q, dq = _polynomial(size, of_q), _polynomial(size, _differentiate_powers(of_q))
    y = _polynomial(of_x, numerator) / q
    dp = _polynomial(of_x, _differentiate_powers(numerator))
    term = of_dy / q
    by_power = [(term * of_x**i).sum((0, 2)) for i in range(numerator.shape[1])]
    by_root = [-(term * y * size**j).sum((0, 2)) for j in range(denominator.shape[1] + 1)]
    of_roots = torch.stack(by_root, 1)[:, 1:] * denominator.sign()
    dx = term * (dp - y * of_x.sign() * dq)
    return dx.reshape(x.shape), torch.stack(by_power, 1), of_roots


def _differentiate_powers(coefficients: Tensor) -> Tensor:
    """Return the coefficients of a polynomial's derivative; at least one, which may be 0."""
    if coefficients.shape[1] == 1:
        return torch.zeros_like(coefficients)
    powers = torch.arange(1, coefficients.shape[1], device=coefficients.device)
    return coefficients[:, 1:] * powers


def _tiles_of(x: Tensor) -> list[tuple[int, Tensor]]:
    """Return the first row of each tile, and its rows."""
    num_rows = choose_tile_rows(len(x))
    return [(k * num_rows, tile) for k, tile in enumerate(x.split(num_rows))] if len(x) else []
