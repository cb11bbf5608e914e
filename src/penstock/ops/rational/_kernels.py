"""Triton kernels of rational activations; importing this imports Triton.

With P = sum_i a_i x^i, S = sum_j |b_j| |x|^(j-1), Q = 1 + |x| S and y = P / Q:

    evaluate        y
    differentiate   dx = g (P' - y sgn(x) (S + |x| S')) / Q, and of each block the sums
                    da_i = sum g x^i / Q,    db_j = -sgn(b_j) sum g y |x|^j / Q

A program has a block of rows and channels of one group, so all sums are its own (FlashKAT,
arXiv:2505.13813, section 4): one number for each coefficient, which `add_partials` adds up.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_block(num_rows, width, sizes):
    """Return group, tile, places and mask of a program's elements."""
    num_pieces = tl.cdiv(width, sizes.columns)
    tile, group = tl.program_id(0), tl.program_id(1)
    row = tile // num_pieces * sizes.rows + tl.arange(0, sizes.rows)
    channel = tile % num_pieces * sizes.columns + tl.arange(0, sizes.columns)
    mask = (row < num_rows)[:, None] & (channel < width)[None, :]
    place = (row.to(tl.int64)[:, None] * tl.num_programs(1) + group) * width + channel[None, :]
    return group, tile.to(tl.int64), place, mask


@triton.jit
def horner(x, coefficients, COUNT: tl.constexpr):
    """Return a polynomial of COUNT coefficients, and its derivative."""
    value = tl.zeros_like(x)
    derivative = tl.zeros_like(x)
    for i in tl.static_range(COUNT):
        derivative = derivative * x + value
        value = value * x + tl.load(coefficients + (COUNT - 1 - i))
    return value, derivative


@triton.jit
def horner_of_sizes(size, coefficients, COUNT: tl.constexpr):
    """Return the same of |x| and the absolute values of coefficients."""
    value = tl.zeros_like(size)
    derivative = tl.zeros_like(size)
    for i in tl.static_range(COUNT):
        derivative = derivative * size + value
        value = value * size + tl.abs(tl.load(coefficients + (COUNT - 1 - i)))
    return value, derivative


@triton.jit(do_not_specialize=["num_rows"])
def evaluate(x, numerator, denominator, y, num_rows, width, sizes):
    """Compute the activation of a block."""
    group, _, place, mask = find_block(num_rows, width, sizes)
    value = tl.load(x + place, mask=mask, other=0.0).to(numerator.dtype.element_ty)
    size = tl.abs(value)
    p, _ = horner(value, numerator + group * sizes.powers, sizes.powers)
    s, _ = horner_of_sizes(size, denominator + group * sizes.roots, sizes.roots)
    tl.store(y + place, (p / (1.0 + size * s)).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def differentiate(x, dy, numerator, denominator, dx, partials, num_rows, width, sizes):
    """Compute the gradient of a block, and its sums of the coefficients' gradients."""
    group, tile, place, mask = find_block(num_rows, width, sizes)
    value = tl.load(x + place, mask=mask, other=0.0).to(numerator.dtype.element_ty)
    term = tl.load(dy + place, mask=mask, other=0.0).to(numerator.dtype.element_ty)
    size = tl.abs(value)
    p, dp = horner(value, numerator + group * sizes.powers, sizes.powers)
    s, ds = horner_of_sizes(size, denominator + group * sizes.roots, sizes.roots)
    q = 1.0 + size * s
    y, term = p / q, term / q
    dq = s + size * ds
    signed = tl.where(value > 0, dq, tl.where(value < 0, -dq, 0.0))
    tl.store(dx + place, (term * (dp - y * signed)).to(dx.dtype.element_ty), mask=mask)
    COUNT: tl.constexpr = sizes.powers + sizes.roots
    sums = partials + (tile * tl.num_programs(1) + group) * COUNT
    of_root = term * y
    for i in tl.static_range(sizes.powers):
        tl.store(sums + i, tl.sum(term))
        term *= value
    for j in tl.static_range(sizes.roots):
        of_root *= size
        b = tl.load(denominator + group * sizes.roots + j)
        sign = tl.where(b > 0, -1.0, tl.where(b < 0, 1.0, 0.0))
        tl.store(sums + (sizes.powers + j), tl.sum(of_root) * sign)
