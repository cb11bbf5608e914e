"""Chebyshev filters: polynomials of the operator that enlarge the wanted end of its spectrum.

Where a product costs less than orthogonalising a vector against the basis, Lanczos runs on a
polynomial of the operator: the eigenvectors are the same, and few vectors are orthogonalised (Zhou
and Saad 2007; Li, Xi, Vecharynski, Yang and Saad 2016). Where it costs more, the degree is one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.spectral._basis import gram
from penstock.spectral._operator import LinearOperator, make_random

_MOST_GAIN = 1e3  # of the largest eigenvalue: rounding errors of the others grow with it
_MOST_DEGREE = 400
_SAME = 1e-6  # of the spectrum's width: copies that Lanczos without orthogonality makes


@dataclasses.dataclass(frozen=True)
class ChebyshevFilter:
    """The polynomial T_d((s t - c) / e) of the operator.

    Attributes:
        sign: s; 1 for the largest eigenvalues, -1 for the smallest.
        center: c, of the interval that is damped, in terms of s t.
        half_width: e, half of the interval's width.
        degree: d, at least 1.
    """

    sign: float = 1.0
    center: float = 0.0
    half_width: float = 1.0
    degree: int = 1

    def apply(self, operator: LinearOperator, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the filtered vectors and the free memory; both arguments are overwritten."""
        # y_0 = u, y_1 = (s A - c) u / e, y_{j+1} = 2 (s A - c) y_j / e - y_{j-1}
        scale, shift = self.sign / self.half_width, -self.center / self.half_width
        operator.apply(u, w, alpha=scale, z=u, gamma=shift)
        for _ in range(1, self.degree):
            operator.apply(w, u, alpha=2 * scale, z=w, gamma=2 * shift, beta=-1.0)
            u, w = w, u
        return w, u

    def value(self, eigenvalue: float) -> float:
        """Return the polynomial at an eigenvalue of the operator."""
        x = (self.sign * eigenvalue - self.center) / self.half_width
        if abs(x) <= 1:
            return math.cos(self.degree * math.acos(x))
        return math.copysign(1.0, x) ** self.degree * math.cosh(self.degree * math.acosh(abs(x)))

    def eigenvalue(self, value: float) -> float:
        """Return the eigenvalue of the operator above the damped interval that has this value.

        For degree 1 it is exact everywhere; else a value below 1 gives the interval's end.
        """
        x = value if self.degree == 1 else math.cosh(math.acosh(max(1.0, value)) / self.degree)
        return self.sign * (self.center + self.half_width * x)

    def slope(self, value: float) -> float:
        """Return the polynomial's derivative, as a positive number, where it has this value."""
        if self.degree == 1:
            return 1 / self.half_width
        # T_d'(cosh a) = d sinh(d a) / sinh(a)
        a = math.acosh(max(1.0 + 1e-12, value)) / self.degree
        return self.degree * math.sinh(self.degree * a) / math.sinh(a) / self.half_width

    def eigenvalues(self, values: Sequence[float]) -> Tensor:
        """Return `eigenvalue` of each value, float64 `(len(values),)`."""
        found = [self.eigenvalue(each) for each in values]
        return torch.tensor(found, dtype=torch.float64, device="cpu")

    def slopes(self, values: Sequence[float]) -> Tensor:
        """Return `slope` of each value, float64 `(len(values),)`."""
        return torch.tensor([self.slope(e) for e in values], dtype=torch.float64, device="cpu")


@dataclasses.dataclass(frozen=True)
class SpectrumEstimate:
    """Bounds and Ritz values of an operator, from Lanczos without a basis.

    Attributes:
        low: Below all eigenvalues, but for rounding and bad luck.
        high: Above all eigenvalues, likewise.
        ritz: Ritz values, each once, rising.
    """

    low: float
    high: float
    ritz: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The largest magnitude of an eigenvalue."""
        return max(abs(self.low), abs(self.high))


def estimate_spectrum(
    operator: LinearOperator,
    num_steps: int,
    generator: torch.Generator,
    reduce: Callable[[Tensor], Tensor],
) -> SpectrumEstimate:
    """Run Lanczos with three vectors and no orthogonalisation.

    Its Ritz values at the ends are right; some come several times (Paige 1972), and are merged.

    Raises:
        FloatingPointError: A product is not finite.
    """
    v = make_random((1, operator.length), operator, generator)
    v /= _norm(v, reduce)
    before, w = torch.zeros_like(v), torch.empty_like(v)
    alphas, betas = [], [0.0]
    for _ in range(num_steps):
        operator.apply(v, w, z=before, gamma=-betas[-1])
        alpha = float(reduce(gram(v, w))[0, 0].real)
        w.add_(v, alpha=-alpha)
        beta = _norm(w, reduce)
        check_finite(alpha + beta)
        alphas.append(alpha)
        betas.append(beta)
        if beta <= 1e-14 * (abs(alpha) + betas[-2]):
            break
        before, v, w = v, w.div_(beta), before
    t = torch.diag(torch.tensor(alphas, dtype=torch.float64, device="cpu"))
    off = torch.tensor(betas[1:-1], dtype=torch.float64, device="cpu")
    t += torch.diag(off, 1) + torch.diag(off, -1)
    ritz, y = torch.linalg.eigh(t)
    residuals = betas[-1] * y[-1].abs()
    low, high = float(ritz[0] - residuals[0]), float(ritz[-1] + residuals[-1])
    width = max(high - low, 1e-300)
    distinct = [float(ritz[0])]
    for value in ritz.tolist():
        if value - distinct[-1] > _SAME * width:
            distinct.append(value)
    return SpectrumEstimate(low - 1e-3 * width, high + 1e-3 * width, tuple(distinct))


def check_finite(value: float) -> None:
    """Raise FloatingPointError unless a number is finite."""
    if not math.isfinite(value):
        raise FloatingPointError(
            "operator: a product holds NaN or infinity, or overflowed; look at its entries with "
            "torch.isfinite"
        )


def _norm(v: Tensor, reduce: Callable[[Tensor], Tensor]) -> float:
    return math.sqrt(float(reduce(gram(v, v))[0, 0].real))


def choose_filter(
    estimate: SpectrumEstimate,
    k: int,
    sign: float,
    *,
    product_cost: float,
    sweep_cost: float,
    growth: float,
) -> ChebyshevFilter:
    """Choose the degree at which the bytes of products and of orthogonalisation are the fewest.

    Args:
        estimate: Bounds and Ritz values of the operator.
        k: Eigenvalues that are wanted.
        sign: 1 for the largest, -1 for the smallest.
        product_cost: Bytes of one product.
        sweep_cost: Bytes of orthogonalising one vector.
        growth: Natural logarithm of what a wanted component has to grow by beside the others.
    """
    ritz = sorted((sign * each for each in estimate.ritz), reverse=True)
    low = min(sign * estimate.low, sign * estimate.high)
    # The end of what is damped: behind the last wanted value, with a few between.
    cut = ritz[min(len(ritz) - 1, k + 2)]
    if len(ritz) < k + 3 or cut <= low:
        return ChebyshevFilter(sign, 0.0, max(estimate.norm, 1e-300), 1)
    center, half_width = (cut + low) / 2, (cut - low) / 2
    a, most = (math.acosh(max(1 + 1e-14, (ritz[at] - center) / half_width)) for at in (k - 1, 0))
    # Steps: L / (d a) to converge and k to tell the vectors apart, each of d P + S bytes, are the
    # fewest bytes at d = sqrt(L S / (a k P)).
    degree = math.sqrt(growth * sweep_cost / (max(a, 1e-9) * k * product_cost))
    degree = min(degree, math.acosh(_MOST_GAIN) / most, _MOST_DEGREE)
    return ChebyshevFilter(sign, center, half_width, max(1, round(degree)))
