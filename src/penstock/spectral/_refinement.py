"""Refinement of eigenpairs that rounding errors keep from being better.

Rotations and filters round vectors as a whole. A correction that is computed from the residual is
as small as that, and so are its rounding errors: what is left is about the rounding of one product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.spectral._basis import gram, wide_dtype
from penstock.spectral._filter import ChebyshevFilter
from penstock.spectral._operator import LinearOperator

_GOLDEN = 0.6180339887498949  # its multiples less whole numbers are spread evenly
_NUM_ROUNDINGS = 8
_DEPENDENT = 1e-12  # of the largest eigenvalue of a Gram matrix: below, it is rounding


def solve_projected(
    operator: LinearOperator,
    x: Tensor,
    *,
    block: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Ritz values, Ritz vectors and residuals of the operator on the span of vectors.

    Args:
        operator: The operator.
        x: Vectors, (k, n), linearly independent; they are overwritten.
        block: Vectors that the operator is applied to at once.
        reduce: Sums a tensor over ranks, in place.

    Returns:
        Values (k,), rising, vectors (k, n) and norms of residuals (k,).
    """
    for _ in range(2):
        factor = torch.linalg.cholesky(reduce(gram(x, x)))
        _rotate(x, torch.linalg.inv(factor).mH)
    h = torch.empty(len(x), len(x), dtype=wide_dtype(x.dtype), device=x.device)
    for begin in range(0, len(x), block):
        part = x[begin : begin + block]
        h[:, begin : begin + block] = gram(x, operator.apply(part, torch.empty_like(part)))
    h = reduce(h)
    values, y = torch.linalg.eigh((h + h.mH) / 2)
    _rotate(x, y)
    norms = torch.empty(len(x), dtype=torch.float64, device=x.device)
    for begin in range(0, len(x), block):
        part = x[begin : begin + block]
        found = operator.apply(part, torch.empty_like(part))
        found -= values[begin : begin + block, None].to(found.dtype) * part
        norms[begin : begin + block] = _products(found, found)
    return values.cpu(), x, reduce(norms).sqrt().cpu()


def _rotate(x: Tensor, y: Tensor) -> None:
    """Replace vectors by combinations, x'_j = sum_i y_ij x_i, chunk by chunk."""
    width = 1 << 16
    for begin in range(0, x.shape[1], width):
        part = x[:, begin : begin + width]
        part.copy_((y.T @ part.to(y.dtype)).to(x.dtype))


def separate_signs(
    operator: LinearOperator,
    pairs: tuple[Tensor, Tensor, Tensor],
    limit: float,
    *,
    block: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return as many pairs of an operator A, of Ritz vectors X whose span is one of A^2.

    There w and -w are one eigenvalue, so X may have mixtures of their vectors, or some of them
    only. Where A^2 X = X T, the span of X and A X is one of A.

    Args:
        operator: The operator A.
        pairs: Ritz values of A, (k,), its Ritz vectors, (k, n), orthonormal, and the norms of
            their residuals, (k,).
        limit: Norm of residuals that need no improvement.
        block: Vectors that the operator is applied to at once.
        reduce: Sums a tensor over ranks, in place.

    Returns:
        Values (k,), rising, vectors (k, n) and norms of residuals (k,).
    """
    values, x, residuals = pairs
    if float(residuals.max()) <= limit:
        return pairs
    # Of A X what X has not: R = A X - X diag(w), which is orthogonal to X.
    r = _residual(operator, values.to(x.device), x, block)
    squares, y = torch.linalg.eigh(reduce(gram(r, r)))
    kept = squares > max(limit**2, _DEPENDENT * float(squares.max()))
    y = y[:, kept] * squares[kept].rsqrt()
    both = torch.cat([x, y.T.to(r.dtype) @ r])
    found, both, norms = solve_projected(operator, both, block=block, reduce=reduce)
    # |A v|^2 = w^2 + |A v - w v|^2 is not small where a mixture's w is.
    order = torch.hypot(found, norms).argsort()[: len(x)].sort().values
    if not float(norms[order].max()) < float(residuals.max()):
        return pairs
    return found[order], both[order.to(both.device)], norms[order]


def refine_pairs(
    operator: LinearOperator,
    values: Tensor,
    x: Tensor,
    chebyshev: ChebyshevFilter,
    *,
    block: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return better eigenpairs and the norms of their residuals.

    Args:
        operator: The operator A.
        values: Ritz values, (k,), float64.
        x: Ritz vectors, (k, n), orthonormal up to rounding.
        chebyshev: Polynomial that damps what the vectors have of the rest of the spectrum.
        block: Vectors that the operator is applied to at once.
        reduce: Sums a tensor over ranks, in place.

    Returns:
        Values (k,), vectors (k, n) and norms (k,).
    """
    values = values.to(x.device)
    r = _residual(operator, values, x, block)
    g = reduce(gram(x, r))
    # Of the same span: X^H A X = diag(values) + X^H R, less what all values have in common.
    center = values.mean()
    h = torch.diag(values - center).to(g.dtype) + (g + g.mH) / 2
    shifted, y = torch.linalg.eigh(h)
    r.addmm_(g.T.to(r.dtype), x, alpha=-1)
    for begin in range(0, len(x), block):
        part = slice(begin, begin + block)
        r[part] = _correction(operator, values[part], r[part], chebyshev)
    r.addmm_(find_turn(y).T.to(r.dtype), x)
    x = x + r
    # Orthonormal to the first order: X (1 - (X^H X - 1) / 2).
    overlap = reduce(gram(x, x))
    overlap.diagonal().sub_(1)
    x.addmm_(overlap.T.to(x.dtype), x.clone(), alpha=-0.5)
    return measure_pairs(operator, shifted + center, x, block=block, reduce=reduce)


def measure_pairs(
    operator: LinearOperator,
    values: Tensor,
    x: Tensor,
    *,
    block: int,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Rayleigh quotients of vectors of norm one, the vectors, and norms of residuals.

    The arguments and the results are those of `refine_pairs`.
    """
    r = _residual(operator, values, x, block)
    slip = reduce(_products(x, r))
    r -= slip[:, None].to(r.dtype) * x
    norms = reduce(_products(r, r)).sqrt()
    return (values + slip).cpu(), x, norms.cpu()


def average_residual(residual: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the mean of R(c x) / c over several numbers c, where R is linear.

    Near the end a residual is the rounding of its products, which differs from c to c.
    """
    scales = [1 + number * _GOLDEN % 1 for number in range(_NUM_ROUNDINGS)]
    return torch.stack([residual(x * scale).div_(scale) for scale in scales]).mean(0)


def find_turn(y: Tensor) -> Tensor:
    """Return eigenvectors less the identity, with phases such that their diagonal is positive."""
    phases = torch.where(y.diagonal().abs() > 0, y.diagonal().sgn(), 1)
    turn = y * phases.conj()
    turn.diagonal().sub_(1)
    return turn


def _residual(operator: LinearOperator, values: Tensor, x: Tensor, block: int) -> Tensor:
    """Return A x - w x, (k, n)."""
    r = torch.empty_like(x)
    for begin in range(0, len(x), block):
        part = slice(begin, begin + block)
        operator.apply(x[part], r[part])
        r[part] -= values[part, None].to(r.dtype) * x[part]
    return r


def _products(x: Tensor, y: Tensor) -> Tensor:
    """Return the real parts of <x_i, y_i>, (k,), in float64."""
    pairs = zip(x, y, strict=True)
    return torch.stack([gram(a[None], b[None])[0, 0].real for a, b in pairs])


def _correction(
    operator: LinearOperator, values: Tensor, r: Tensor, chebyshev: ChebyshevFilter
) -> Tensor:
    """Return T_d(B) x / T_d(b) - x, (b, n), from the residuals r = (A - w) x.

    B = (s A - c) / e, b = (s w - c) / e and (T_j(B) - T_j(b)) / (B - b) =: D_j satisfy
    D_{j+1} = 2 B D_j - D_{j-1} + 2 T_j(b), D_0 = 0, D_1 = 1.
    """
    scale, shift = chebyshev.sign / chebyshev.half_width, -chebyshev.center / chebyshev.half_width
    at = scale * values + shift
    rho = (scale * r).contiguous()
    before, now = torch.zeros_like(rho), rho.clone()
    t_before, t = torch.ones_like(at), at.clone()
    for _ in range(1, chebyshev.degree):
        operator.apply(now, before, alpha=2 * scale, z=now, gamma=2 * shift, beta=-1.0)
        before.addcmul_((2 * t)[:, None].to(rho.dtype).expand_as(rho), rho)
        before, now = now, before
        t_before, t = t, 2 * at * t - t_before
    return now / t[:, None].to(now.dtype)
