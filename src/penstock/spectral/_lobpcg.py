"""Locally optimal block preconditioned conjugate gradients, for A v = w B v with a preconditioner.

The basis [X, W, P] of iterates, preconditioned residuals and directions is made orthonormal in the
inner product of B before it is used, so that its Gram matrix is the identity and a small standard
problem is left (Hetmaniuk and Lehoucq 2006; Duersch, Shao, Yang and Gu 2018). Vectors that have
converged stay in X and get no residual: soft locking (Knyazev 2004).
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from penstock.errors import CapacityError, NoConvergenceError
from penstock.memory import Tier
from penstock.spectral._basis import gram, wide_dtype
from penstock.spectral._dense import (
    MOST_DENSE_ROWS,
    check_dense,
    solve_dense,
    solve_or_densify,
)
from penstock.spectral._filter import check_finite
from penstock.spectral._operator import LinearOperator, make_random
from penstock.spectral._problem import StandardProblem, num_basis_vectors
from penstock.spectral._refinement import average_residual, find_turn
from penstock.spectral._report import Eigenpairs, SpectralReport, make_report
from penstock.units import format_bytes

_ROUNDING = 8.0  # times the rounding unit and the norms: residuals are not asked to be less
_MOST_REFINEMENTS = 2  # by which residuals become those of the rounding of a product
_MORE = 48  # steps after convergence, at most, until residuals are of one rounding unit
_SMALL = 128  # rows of a problem that is solved densely
_SINGULAR = 0.1  # reciprocal condition of B in rounding units: below, B may have a kernel
_NEARLY = 0.9  # of the largest eigenvalue of a Gram matrix: then another turn adds nothing
_REFRESH = 20  # iterations after which products are computed anew
_ITERATIONS_PER_RESTART = 20
_BLOCKS, _BLOCKS_WITH_B = 8, 11  # X, W, P and their products, and the memory of rotations


def prefers_lobpcg(problem: StandardProblem) -> bool:
    """Return whether LOBPCG fits into a budget into which no basis of Lanczos does."""
    operator, budget = problem.operator, problem.max_bytes
    if budget is None or problem.file is not None or operator.device.type != "cpu":
        return False
    if problem.which not in ("LA", "SA") or operator.num_ranks > 1:
        return False
    vector_bytes = operator.length * operator.dtype.itemsize
    lanczos_bytes = (min(num_basis_vectors(problem.k), operator.length) + 2) * vector_bytes
    return budget < lanczos_bytes and _needed_bytes(problem, has_b=False) <= budget


def solve_generalized(
    problem: StandardProblem, b: LinearOperator | None, m: LinearOperator | None
) -> Eigenpairs:
    """Return the wanted pairs of A v = w B v.

    Raises:
        ValueError: `which` is not an end, k is above what blocks find of many rows, or B is not
            positive definite.
        CapacityError: The budget does not hold the blocks.
        NoConvergenceError: It gave up; the error has the best iterate.
    """
    if problem.which not in ("LA", "SA"):
        raise ValueError(
            f"which={problem.which!r}: with B= or M= it is 'LA' or 'SA'; the magnitudes of a "
            "generalised problem are not supported"
        )
    num_rows = problem.operator.length
    if num_rows <= _SMALL or problem.k > _block_size(problem):
        _check_rows(problem)
        check_dense(problem)
        return solve_dense(problem, b)
    needed = _needed_bytes(problem, has_b=b is not None)
    if problem.max_bytes is not None and needed > problem.max_bytes:
        raise CapacityError(
            f"max_bytes={problem.max_bytes}: LOBPCG keeps its blocks on the device, which are "
            f"{format_bytes(needed)}; give at least {needed}, or fewer eigenvalues"
        )

    def iterate(problem: StandardProblem) -> Eigenpairs:
        problem.ledger.add(Tier.DEVICE, needed)
        try:
            return BlockConjugateGradients(problem, b, m).solve()
        finally:
            problem.ledger.add(Tier.DEVICE, -needed)

    # A step takes a product for each vector of the block, and work on all of it.
    most_restarts = math.ceil(num_rows / _ITERATIONS_PER_RESTART)
    return solve_or_densify(problem, iterate, most_restarts, b)


def _check_rows(problem: StandardProblem) -> None:
    """Raise ValueError if there are too many rows for a dense factorisation."""
    num_rows = problem.operator.length
    if num_rows > MOST_DENSE_ROWS:
        raise ValueError(
            f"k={problem.k}: of {num_rows} rows LOBPCG, which has room for three blocks, finds at "
            f"most {_block_size(problem)} pairs; ask for fewer"
        )


def _needed_bytes(problem: StandardProblem, *, has_b: bool) -> int:
    operator = problem.operator
    blocks = _BLOCKS_WITH_B if has_b else _BLOCKS
    return blocks * _block_size(problem) * operator.length * operator.dtype.itemsize


def _block_size(problem: StandardProblem) -> int:
    return min(problem.k + max(2, problem.k // 4), problem.operator.length // 4)


class BlockConjugateGradients:
    """The iteration; vectors are rows, and products with A and B go along with them."""

    def __init__(
        self, problem: StandardProblem, b: LinearOperator | None, m: LinearOperator | None
    ) -> None:
        self.problem, self.a, self.b = problem, problem.operator, b
        self._sign = 1.0 if problem.which == "SA" else -1.0  # the smallest of sign A are iterated
        self._precondition = m
        self._diagonal = self._choose_diagonal()
        self._started = time.perf_counter()
        self._num_steps = 0
        self._norm_a = self._norm_b = 0.0

    def _choose_diagonal(self) -> Tensor | None:
        """Return the reciprocal diagonal of A, or of B for the largest, as preconditioner."""
        source = self.a if self._sign > 0 else self.b
        diagonal = None if self._precondition is not None or source is None else source.diagonal()
        if diagonal is None or not bool((diagonal.real > 0).all()):
            return None
        return diagonal.real.reciprocal().to(self.a.dtype)

    def solve(self) -> Eigenpairs:
        """Return the wanted pairs, rising."""
        problem = self.problem
        x, ax, bx, values = self._refresh(self._first_block())
        empty = x[:0]
        p, ap, bp = empty, empty, empty
        norms = torch.full_like(values, torch.inf)
        best, least = (values, x.clone(), norms, norms), math.inf
        num_more, has_converged = _MORE if problem.tol == 0 else 0, False
        for self._num_steps in range(1, _ITERATIONS_PER_RESTART * problem.max_restarts + 1):
            if self._num_steps % _REFRESH == 0:
                x, ax, bx, values = self._refresh(x)
                p, ap, bp = empty, empty, empty
            residual = ax - values[:, None].to(x.dtype) * bx
            norms = _norms(residual)
            check_finite(float(norms.sum()))
            wanted = slice(0, problem.k)
            allowed = self._tolerances(values, x, bx)
            good = norms <= allowed
            # As shares of what is allowed: vectors of B-norm one may become longer and longer.
            excess = float((norms / allowed.clamp(min=1e-300))[wanted].max())
            if excess <= least:
                best, least = (values.clone(), x.clone(), norms, allowed), excess
            if bool(good[wanted].all()):
                # A few steps more for residuals of one rounding unit, where all digits are wanted.
                better = norms <= allowed / _ROUNDING
                if not num_more or bool(better[wanted].all()):
                    return self._finish(best[1])
                num_more, has_converged, good = num_more - 1, True, better
            w = self._apply_m(residual[~good])
            w, _, bw = self._orthonormalize(w, [(x, bx), (p, bp)])
            if not len(w):  # nothing new is left: the rounding errors of products are the limit
                if not len(p):
                    break
                p, ap, bp = empty, empty, empty
                continue
            aw = self._apply_a(w)
            x, ax, bx, values, p, ap, bp = self._step(
                torch.cat([x, w, p]), torch.cat([ax, aw, ap]), torch.cat([bx, bw, bp]), len(x)
            )
        if has_converged:
            return self._finish(best[1])
        raise self._give_up(best)

    def _refresh(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Ritz vectors of a span with products that are computed anew, and their values."""
        x, _, bx = self._orthonormalize(x, [])
        return self._rayleigh_ritz(x, self._apply_a(x), bx)

    def _first_block(self) -> Tensor:
        problem = self.problem
        x = make_random((_block_size(problem), self.a.length), self.a, problem.generator)
        if problem.start is not None:
            count = min(len(problem.start), len(x))
            x[:count] = problem.start[:count]
        return x

    def _step(
        self, s: Tensor, a_s: Tensor, b_s: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the best combinations of a basis S, and the directions in which they moved."""
        h = gram(s, a_s)  # S^H A S, where S^H B S = 1
        values, y = torch.linalg.eigh((h + h.mH) / 2)
        values, y = values[:count], y[:, :count]
        # Directions: the part of y outside of X, orthonormal to y.
        moved = y.clone()
        moved[:count] = 0
        moved -= y @ (y.mH @ moved)
        u, singular, _ = torch.linalg.svd(moved, full_matrices=False)
        moved = u[:, singular > 1e-10 * max(1.0, float(singular.max()))]
        moved = moved - y @ (y.mH @ moved)
        moved = torch.linalg.qr(moved).Q if moved.shape[1] else moved
        kept = [(y.T.to(s.dtype) @ each) for each in (s, a_s, b_s)]
        ahead = [(moved.T.to(s.dtype) @ each) for each in (s, a_s, b_s)]
        return kept[0], kept[1], kept[2], values, ahead[0], ahead[1], ahead[2]

    def _rayleigh_ritz(
        self, x: Tensor, ax: Tensor, bx: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = gram(x, ax)
        values, y = torch.linalg.eigh((h + h.mH) / 2)
        turn = y.T.to(x.dtype)
        return turn @ x, turn @ ax, turn @ bx, values

    def _orthonormalize(
        self, w: Tensor, against: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, B-orthonormal to itself and to blocks, without what depends on them; and B w.

        The Gram matrix is scaled and its eigenvalues near rounding are dropped (Stathopoulos and
        Wu 2002).
        """
        unit = torch.finfo(w.dtype).eps
        w = w / _norms(w).clamp(min=1e-300)[:, None].to(w.dtype)
        bw = w
        for turn in range(3):
            for vectors, products in against:
                if len(vectors):
                    w = w - gram(products, w).T.to(w.dtype) @ vectors
            bw = self._apply_b(w)
            g = gram(w, bw)
            check_finite(float(g.abs().sum()))
            scale = g.diagonal().real
            if bool((scale < 0).any()):
                raise ValueError(
                    "B: is not positive definite; swap A and B, or add to its diagonal"
                )
            scale = scale.clamp(min=1e-300).rsqrt()
            values, y = torch.linalg.eigh(scale[:, None] * g * scale)
            kept = values > (1e3 * unit if turn == 0 else 0.1) * float(values.max())
            y = (scale[:, None] * y[:, kept]) * values[kept].rsqrt()
            w, bw = y.T.to(w.dtype) @ w, y.T.to(w.dtype) @ bw
            if not len(w) or (turn and float(values.min()) > _NEARLY * float(values.max())):
                break
        return w, w, bw

    def _apply_a(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        product = self.a.apply(x, torch.empty_like(x), alpha=self._sign)
        lengths = _norms(x).clamp(min=1e-300)
        self._norm_a = max(self._norm_a, float((_norms(product) / lengths).max()))
        return product

    def _apply_b(self, x: Tensor) -> Tensor:
        if self.b is None:
            self._norm_b = 1.0
            return x
        x = x.contiguous()
        product = self.b.apply(x, torch.empty_like(x))
        lengths = _norms(x).clamp(min=1e-300)
        self._norm_b = max(self._norm_b, float((_norms(product) / lengths).max()))
        return product

    def _apply_m(self, residual: Tensor) -> Tensor:
        if self._precondition is not None:
            residual = residual.contiguous()
            return self._precondition.apply(residual, torch.empty_like(residual))
        return residual if self._diagonal is None else residual * self._diagonal

    def _tolerances(self, values: Tensor, x: Tensor, bx: Tensor) -> Tensor:
        """Return how large residuals A x - w B x may be: in terms of w B x, and of rounding."""
        unit = torch.finfo(self.a.dtype).eps
        floor = _ROUNDING * unit * (self._norm_a + values.abs() * self._norm_b) * _norms(x)
        return torch.maximum(self.problem.tol * values.abs() * _norms(bx), floor)

    def _finish(self, x: Tensor) -> Eigenpairs:
        """Return the pairs with products that are computed anew."""
        k, unit = self.problem.k, torch.finfo(x.dtype).eps
        x, _, _, values = self._refresh(x)
        if self.b is not None and float(_norms(x[:k]).max()) ** 2 * self._norm_b * unit > _SINGULAR:
            raise ValueError(
                "B: is not positive definite, up to rounding; swap A and B, or add to its diagonal"
            )
        residuals = _norms(self._average_residual(x, values))
        is_refined = self.problem.tol == 0 and self.problem.max_bytes is None
        for _ in range(_MOST_REFINEMENTS if is_refined else 0):
            # With the vectors next to those that are asked for, whose parts these have most of.
            better, shifted = self._refine(x, values)
            norms = _norms(self._average_residual(better, shifted))
            if not float(norms[:k].max()) < float(residuals[:k].max()):  # nor where not finite
                break
            x, values, residuals = better, shifted, norms
        return Eigenpairs(*self._order(values[:k], x[:k], residuals[:k]), self._report())

    def _residual(self, x: Tensor, values: Tensor) -> Tensor:
        return self._apply_a(x) - values[:, None].to(x.dtype) * self._apply_b(x)

    def _average_residual(self, x: Tensor, values: Tensor) -> Tensor:
        if self.problem.tol > 0:
            return self._residual(x, values)
        return average_residual(lambda scaled: self._residual(scaled, values), x)

    def _refine(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return Ritz vectors plus corrections of the first order, and their values.

        What is added is as small as the residual, and so is its rounding: X (Y - 1) + W C, where
        Y are the eigenvectors of X^H A X, and W^H (A - w B) W C = -W^H R.
        """
        r = self._average_residual(x, values)
        g = gram(x, r)
        center = values.mean()
        h = torch.diag(values - center).to(g.dtype) + (g + g.mH) / 2
        shifted, y = torch.linalg.eigh(h)
        r = r - g.T.to(r.dtype) @ self._apply_b(x)
        w, _, _ = self._orthonormalize(self._apply_m(r), [(x, self._apply_b(x))])
        found = x + find_turn(y).T.to(x.dtype) @ x
        if len(w):
            projected = gram(w, self._apply_a(w))
            others, q = torch.linalg.eigh((projected + projected.mH) / 2)
            c = q @ ((q.mH @ gram(w, r)) / (values[None] - others[:, None]))
            found += c.T.to(x.dtype) @ w
        # B-orthonormal to the first order.
        overlap = gram(found, self._apply_b(found))
        overlap.diagonal().sub_(1)
        return found - overlap.T.to(x.dtype) @ found / 2, shifted + center

    def _order(self, values: Tensor, x: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = (self._sign * values).cpu()
        order = values.argsort()
        return values[order], x[order.to(x.device)].T, residuals.cpu()[order]

    def _give_up(self, best: tuple[Tensor, Tensor, Tensor, Tensor]) -> NoConvergenceError:
        k = self.problem.k
        values, vectors, residuals = self._order(*(each[:k] for each in best[:3]))
        good = best[2][:k] <= best[3][:k]
        return NoConvergenceError(
            f"eigs: {int(good.sum())} of {k} eigenpairs converged after {self._num_steps} "
            "iterations of LOBPCG; the error has the best iterate: values, vectors and residuals. "
            "Give a preconditioner M=, raise max_restarts or tol, or pass the vectors as start=",
            values=values,
            vectors=vectors,
            residuals=residuals,
        )

    def _report(self) -> SpectralReport:
        count = _block_size(self.problem)
        return make_report(
            self.problem,
            self._started,
            method="lobpcg",
            degree=1,
            num_steps=self._num_steps,
            num_restarts=0,
            num_vectors=3 * count,
            num_resident=3 * count,
        )


def _norms(vectors: Tensor) -> Tensor:
    """Return the norms of rows, in float64."""
    if vectors.dtype == wide_dtype(vectors.dtype):
        return torch.linalg.vector_norm(vectors, dim=1)
    if not len(vectors):
        return torch.zeros(0, dtype=torch.float64, device=vectors.device)
    return torch.stack([gram(each[None], each[None])[0, 0].real for each in vectors]).sqrt()
