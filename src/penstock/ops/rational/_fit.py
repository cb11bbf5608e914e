"""Coefficients of a rational function without poles that is nearest to a given activation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_NUM_POINTS = 501
_NUM_LINEAR, _NUM_NEWTON = 8, 60  # steps


def fit(
    activation: Callable[[Tensor], Tensor],
    numerator_degree: int,
    denominator_degree: int,
    interval: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Return coefficients a, `(m + 1,)`, and b >= 0, `(n,)`, by least squares, float64.

    First by linear problems, each weighted by the denominator before (Sanathanan and Koerner, IEEE
    Trans. Automatic Control 8(1), 1963):

        min sum_x ((P(x) - f(x) Q(x)) / Q_before(x))^2,    b >= 0

    then by damped Gauss-Newton steps on the distance itself (Levenberg, Marquardt).

    Args:
        activation: Applied to float64 points of the interval.
        numerator_degree: The degree m.
        denominator_degree: The degree n.
        interval: Ends of the points.

    Raises:
        TypeError: `activation` is no function of tensors.
        ValueError: It does not have a finite number for each point, or `interval` has no two ends.
    """
    if not callable(activation):
        raise TypeError(
            f"activation is {activation!r}, but must be a function of a tensor: pass "
            "torch.nn.functional.gelu, for example"
        )
    _check_interval(interval)
    points = torch.linspace(*interval, _NUM_POINTS, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        values = activation(points).double()
    if values.shape != points.shape or not bool(values.isfinite().all()):
        raise ValueError(
            f"activation is not finite, elementwise, between {interval[0]} and {interval[1]}: pass "
            "another interval or another activation"
        )
    powers = points[:, None] ** torch.arange(numerator_degree + 1, device="cpu")
    roots = points.abs()[:, None] ** torch.arange(1, denominator_degree + 1, device="cpu")
    before, candidates = torch.ones_like(points), []
    for _ in range(_NUM_LINEAR):
        columns = torch.cat([powers, -values[:, None] * roots], 1) / before[:, None]
        candidates.append(_solve(columns, values / before, numerator_degree + 1))
        before = 1 + roots @ candidates[-1][numerator_degree + 1 :]
    errors = [_differentiate(each, powers, roots, values)[0].square().sum() for each in candidates]
    best = candidates[int(torch.stack(errors).argmin())]
    best = _refine(best, powers, roots, values)
    return best[: numerator_degree + 1], best[numerator_degree + 1 :].abs()


def _check_interval(interval: tuple[float, float]) -> None:
    try:
        begin, end = map(float, interval)
        is_right = begin < end and math.isfinite(end - begin)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"interval is {interval!r}, but must be two finite numbers, the first the smaller"
        )


def _solve(columns: Tensor, values: Tensor, num_free: int) -> Tensor:
    """Return the least squares solution; those after `num_free` that would be negative are 0."""
    kept = torch.ones(columns.shape[1], dtype=torch.bool, device="cpu")
    while True:
        found = torch.zeros(columns.shape[1], dtype=torch.float64, device="cpu")
        found[kept] = torch.linalg.lstsq(columns[:, kept], values[:, None]).solution[:, 0]
        negative = found < 0
        negative[:num_free] = False
        if not negative.any():
            return found
        kept &= ~negative


def _differentiate(
    coefficients: Tensor, powers: Tensor, roots: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y - f of each point, and its derivatives: x^i / Q and -sgn(b_j) y |x|^j / Q."""
    a, b = coefficients.split([powers.shape[1], roots.shape[1]])
    q = 1 + roots @ b.abs()
    y = powers @ a / q
    return y - values, torch.cat([powers, -b.sign() * y[:, None] * roots], 1) / q[:, None]


def _refine(coefficients: Tensor, powers: Tensor, roots: Tensor, values: Tensor) -> Tensor:
    """Take damped Gauss-Newton steps: (J'J + damping diag(J'J)) step = -J' (y - f)."""
    damping = 1e-3
    distance, jacobian = _differentiate(coefficients, powers, roots, values)
    for _ in range(_NUM_NEWTON):
        normal = jacobian.T @ jacobian
        normal += torch.diag(damping * normal.diagonal() + 1e-12)
        changed = coefficients - torch.linalg.solve(normal, jacobian.T @ distance)
        moved, derivatives = _differentiate(changed, powers, roots, values)
        if moved.square().sum() < distance.square().sum():
            coefficients, distance, jacobian = changed, moved, derivatives
            damping /= 3
        else:
            damping *= 4
    return coefficients
