"""Operators of few rows: all eigenvalues of the dense matrix, of which some are returned."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.errors import CapacityError, NoConvergenceError
from penstock.memory import Tier
from penstock.spectral._basis import gram, wide_dtype
from penstock.spectral._operator import LinearOperator
from penstock.spectral._problem import StandardProblem, num_basis_vectors
from penstock.spectral._refinement import average_residual
from penstock.spectral._report import Eigenpairs, make_report
from penstock.spectral._solve import solve_standard
from penstock.units import format_bytes

_FEW_ROWS = 128  # of a matrix whose eigenvalues are all computed for any of them
_MOST_ROWS = 1024  # of a matrix whose eigenvalues are all computed for those around zero
MOST_DENSE_ROWS = 2048  # of one for which that is done where an iteration is slow


def is_dense_better(problem: StandardProblem) -> bool:
    """Return whether eigenvalues are found sooner among all of them, if the budget holds these.

    Those around zero may lie inside of the spectrum, where a Krylov space finds them slowly; and a
    basis of as many vectors as there are rows is no smaller than the dense matrix.
    """
    num_rows = problem.operator.length
    is_small = num_rows <= (_MOST_ROWS if problem.which == "SM" else _FEW_ROWS)
    is_full = num_rows <= min(MOST_DENSE_ROWS, num_basis_vectors(problem.k))
    fits = problem.max_bytes is None or _dense_bytes(problem) <= problem.max_bytes
    return (is_small or is_full) and fits


def check_dense(problem: StandardProblem) -> None:
    """Raise CapacityError unless the budget holds the dense matrix of a problem of few rows."""
    needed = _dense_bytes(problem)
    if problem.max_bytes is not None and needed > problem.max_bytes:
        raise CapacityError(
            f"max_bytes={problem.max_bytes}: all eigenvalues of a dense matrix of "
            f"{problem.operator.length} rows take {format_bytes(needed)}; give at least {needed}"
        )


def solve_or_densify(
    problem: StandardProblem,
    iterate: Callable[[StandardProblem], Eigenpairs],
    most_restarts: int,
    b: LinearOperator | None = None,
) -> Eigenpairs:
    """Solve A v = w B v by an iteration, and if that takes long, by a factorisation.

    Args:
        problem: The problem.
        iterate: Solves it, up to its `max_restarts`.
        most_restarts: Restarts after which the factorisation costs no more than was spent; with it
            all costs at most twice as much as the cheaper one of the two.
        b: The operator B; None: the identity.

    Raises:
        NoConvergenceError: It gave up, at a matrix too large for that, or the operator failed.
        CapacityError, StoreError: The budget or the store has no room.
    """
    # Ranks have no matrix, not even one that has all the rows: the others wait for its products.
    is_possible = problem.operator.num_ranks == 1 and problem.operator.length <= MOST_DENSE_ROWS
    if problem.max_bytes is not None:
        is_possible = is_possible and _dense_bytes(problem) <= problem.max_bytes
    if not is_possible or most_restarts >= problem.max_restarts:
        return iterate(problem)
    try:
        return iterate(dataclasses.replace(problem, max_restarts=most_restarts))
    except NoConvergenceError as error:
        if error.__cause__ is not None:  # of the operator
            raise
        try:
            return solve_dense(problem, b)
        except ValueError:  # B has no factor
            raise
        except Exception as failure:
            raise error from failure  # which has the best iterate


def solve_by_lanczos(problem: StandardProblem) -> Eigenpairs:
    """Solve by Lanczos, or where that takes more products than there are rows, densely."""
    k = problem.k
    block = min(problem.operator.block, k)
    steps = (num_basis_vectors(k, block) - k) / (3 * block)  # the fewest between restarts
    most_restarts = math.ceil(problem.operator.global_length / steps)
    return solve_or_densify(problem, solve_standard, most_restarts)


def _dense_bytes(problem: StandardProblem) -> int:
    """Return the bytes of the identity, its product, the matrix and its eigenvectors."""
    operator = problem.operator
    wide_bytes = wide_dtype(operator.dtype).itemsize
    return 2 * operator.length**2 * (operator.dtype.itemsize + wide_bytes)


def solve_dense(problem: StandardProblem, b: LinearOperator | None = None) -> Eigenpairs:
    """Return the wanted pairs of A v = w B v by a dense factorisation, in float64."""
    started, operator = time.perf_counter(), problem.operator
    problem.ledger.add(Tier.DEVICE, _dense_bytes(problem))
    matrix = _materialize(operator)
    if b is None:
        values, vectors = torch.linalg.eigh(matrix)
    else:  # L^-1 A L^-H y = w y, v = L^-H y
        factor = _factor(_materialize(b))
        left = torch.linalg.solve_triangular(factor, matrix, upper=False)
        reduced = torch.linalg.solve_triangular(factor, left.mH, upper=False).mH
        values, vectors = torch.linalg.eigh((reduced + reduced.mH) / 2)
        vectors = torch.linalg.solve_triangular(factor.mH, vectors, upper=True)
    order = _choose(values, problem.k, problem.which)
    pencil = _Pencil(operator, b)
    found, x = values[order], vectors[:, order].T.to(operator.dtype).contiguous()
    if problem.tol == 0 and operator.dtype == vectors.dtype:
        found, x = pencil.refine(found, x, values, vectors)
    residual = average_residual(lambda scaled: pencil.residual(scaled, found), x)
    norms = gram(residual, residual).diagonal().real.sqrt().cpu()
    values = found.cpu()
    length = operator.length
    report = make_report(
        problem,
        started,
        method="dense",
        degree=1,
        num_steps=0,
        num_restarts=0,
        num_vectors=length,
        num_resident=length,
    )
    problem.ledger.add(Tier.DEVICE, -_dense_bytes(problem))
    return Eigenpairs(values, x.T, norms, report)


@dataclasses.dataclass(frozen=True)
class _Pencil:
    """The operators of A v = w B v; None for B is the identity."""

    a: LinearOperator
    b: LinearOperator | None

    def residual(self, x: Tensor, values: Tensor) -> Tensor:
        """Return A x - w B x, (k, n), of vectors that are rows."""
        product = self.a.apply(x, torch.empty_like(x))
        return product - values[:, None].to(x.dtype) * self._apply_b(x)

    def refine(
        self, values: Tensor, x: Tensor, spectrum: Tensor, vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return pairs with what the factorisation's rounding has left in them of other vectors.

        With r = (A - w B) x it is sum_i v_i (v_i^H r) / (w - w_i), where w_i is not near w.
        """
        r = average_residual(lambda scaled: self.residual(scaled, values), x).T
        parts = vectors.mH @ r
        gaps = values - spectrum[:, None]
        near = gaps.abs() <= torch.finfo(values.dtype).eps ** 0.5 * spectrum.abs().max()
        parts = torch.where(near, 0, parts / gaps)
        found = x + (vectors @ parts).T
        # B-orthonormal to the first order: where eigenvalues are near each other, what rounding
        # adds to one vector is not what it takes from the other.
        overlap = gram(found, self._apply_b(found))
        overlap.diagonal().sub_(1)
        found.addmm_(overlap.T, found.clone(), alpha=-0.5)
        return values + (x.conj() * r.T).sum(1).real, found

    def _apply_b(self, x: Tensor) -> Tensor:
        return x if self.b is None else self.b.apply(x, torch.empty_like(x))


def _materialize(operator: LinearOperator) -> Tensor:
    """Return the matrix of an operator, in float64 or complex128."""
    identity = torch.eye(operator.length, dtype=operator.dtype, device=operator.device)
    columns = operator.apply(identity, torch.empty_like(identity))
    matrix = columns.T.to(wide_dtype(operator.dtype))
    return (matrix + matrix.mH) / 2


def _factor(matrix: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if int(info):
        raise ValueError("B: is not positive definite; swap A and B, or add to its diagonal")
    return factor


def _choose(values: Tensor, k: int, which: str) -> Tensor:
    """Return the places of the wanted values, such that these rise."""
    if which in ("LM", "SM"):
        found = values.abs().argsort(descending=which == "LM")[:k]
        return found[values[found].argsort()]
    places = torch.arange(len(values), device=values.device)
    num_low = {"LA": 0, "SA": k, "BE": k // 2}[which]
    return torch.cat([places[:num_low], places[len(values) - (k - num_low) :]])
