"""Eigenvalues and eigenvectors of symmetric and Hermitian operators in any tier."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import NoConvergenceError, RankError
from penstock.memory import ExtentFile, FileStore, Ledger
from penstock.spectral._basis import gram
from penstock.spectral._dense import is_dense_better, solve_by_lanczos, solve_dense
from penstock.spectral._ends import solve_ends
from penstock.spectral._filter import check_finite
from penstock.spectral._lobpcg import prefers_lobpcg, solve_generalized
from penstock.spectral._operator import (
    CallableOperator,
    LinearOperator,
    ScaledOperator,
    choose_scale,
    make_random,
)
from penstock.spectral._problem import StandardProblem, num_basis_vectors
from penstock.spectral._ranks import RowsOfRanks, count_rows, rank_of, reduce_over
from penstock.spectral._report import Eigenpairs, sort_pairs
from penstock.spectral._sources import Surroundings, as_operator
from penstock.spectral._tiles import TILE_BLOCK, TiledOperator
from penstock.units import parse_bytes, parse_count

Which = Literal["LA", "SA", "LM", "SM", "BE"]
_WHICH = ("LA", "SA", "LM", "SM", "BE")
_MOST_RESTARTS = 3000


def eigs(
    operator: Any,
    k: int = 6,
    *,
    which: Which = "LA",
    B: Any = None,
    M: Any = None,
    max_bytes: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    tol: float = 0.0,
    start: Tensor | None = None,
    max_restarts: int = _MOST_RESTARTS,
    seed: int = 0,
    group: Any = None,
) -> Eigenpairs:
    """Return some eigenvalues and eigenvectors of a symmetric or Hermitian operator.

    Example:
        >>> import torch
        >>> matrix = torch.diag(torch.arange(1.0, 201.0, dtype=torch.float64))
        >>> values, vectors = eigs(matrix, 2)
        >>> values.round(decimals=6)
        tensor([199., 200.], dtype=torch.float64)

    Args:
        operator: A square matrix: a tensor, dense or sparse, a unified table in memory or a file,
            the path of a table, a NumPy array, a SciPy sparse matrix, or `penstock.spectral.CSR`
            with lists in memory or files. Or a function, as
            `penstock.spectral.SymmetricOperator`, or what `penstock.spectral.hessian` and `fisher`
            return. Float32, float64, complex64 or complex128.
        k: Eigenvalues wanted, from 1 to n - 1.
        which: "LA" the largest, "SA" the smallest, "LM" those of the largest magnitude, "SM" of the
            smallest, "BE" half of them from each end, the odd one from the high end.
        B: Positive definite matrix or operator of the problem A v = w B v; None: the identity.
        M: Preconditioner, an approximation of the inverse of A (of B for which="LA"): any operator
            as above, positive definite. It chooses LOBPCG.
        max_bytes: The most bytes of basis, workspace and tiles on the device, as an int or text
            such as "2GiB"; on a machine without a GPU the device is RAM. Tensors that the caller
            holds do not count, nor do the vectors that are returned. None: all it takes.
        store: Directory or `FileStore` for what of the basis is beyond `max_bytes`; without one it
            goes to host memory, if the device is a GPU.
        tol: Residuals at most `tol` times the eigenvalue's magnitude, with B= times the norm of
            w B v; 0: as good as the dtype's rounding of the operator's norm. Where rounding keeps
            residuals above four times that, a warning says so.
        start: Vectors to begin with, (n,) or (n, b), such as those of a similar operator.
        max_restarts: Restarts of the basis before it gives up. Of at most 2,048 rows all
            eigenvalues are computed before that, where the budget holds the dense matrix.
        seed: Of the random vectors.
        group: Process group whose ranks each have rows of the operator, and of all vectors.

    Returns:
        Eigenvalues (k,), float64, rising, and eigenvectors (n, k) as columns: unpacks as two, and
        has `residuals` and a `report`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The operator is not symmetric, not square, not finite, or an argument is out of
            range.
        NoConvergenceError: It gave up, or the operator failed; the error has the best iterate.
        CapacityError: `max_bytes` is not enough.
        StoreError: The store cannot be used, or is full.
        RankError: Another rank of the group has ended, or does not answer; its `best` has this
            rank's rows of the best iterate.
    """
    k = check_numbers(k, tol, seed)
    if which not in _WHICH:
        raise ValueError(f"which={which!r}: expected one of {', '.join(_WHICH)}")
    max_restarts = parse_count(max_restarts, name="max_restarts", least=1)
    if which == "BE" and k == 1:
        which = "LA"
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    most = k - k // 2 if which == "BE" else k  # of one end
    num_vectors = 10 if store is not None else num_basis_vectors(most, min(most, TILE_BLOCK)) + 8
    around = Surroundings(
        budget_bytes=budget,
        num_reserved=num_vectors,
        ledger=Ledger(),
        num_columns=None if group is None else count_rows(operator, group),
    )
    generator = torch.Generator().manual_seed(seed + rank_of(group))
    with contextlib.ExitStack() as stack:
        found = as_operator(operator, around)
        if group is not None:
            found = RowsOfRanks(found, group)
        stack.callback(found.close)
        check_count(k, found.global_length)
        reduce = reduce_over(group)
        scale = check_symmetric(found, generator, reduce)
        if isinstance(found, TiledOperator) and budget is not None:
            budget -= found.held_bytes
        file = None
        if store is not None and budget is not None:
            file = stack.enter_context(contextlib.closing(ExtentFile(store)))
        problem = StandardProblem(
            operator=ScaledOperator(found, scale),
            unit=1 / scale,
            k=k,
            which=which,
            tol=float(tol),
            max_bytes=budget,
            file=file,
            max_restarts=max_restarts,
            start=_read_start(start, found, reduce),
            reduce=reduce,
            generator=generator,
            ledger=around.ledger,
        )
        with _scale_back(problem.unit):
            if B is not None or M is not None:
                pair = _open_pair(B, M, found, around, stack, generator)
                pairs = solve_generalized(problem, *pair)
            else:
                pairs = _solve(problem)
        pairs = sort_pairs(pairs)
        values, residuals = pairs.values * problem.unit, pairs.residuals * problem.unit
        return dataclasses.replace(pairs, values=values, residuals=residuals)


@contextlib.contextmanager
def _scale_back(unit: float) -> Iterator[None]:
    """Multiply by a unit the values and residuals that an error carries."""
    try:
        yield
    except (NoConvergenceError, RankError) as error:
        best = error.best if isinstance(error, RankError) else error
        if isinstance(best, NoConvergenceError):
            best.values = best.values * unit
            if best.residuals is not None:
                best.residuals = best.residuals * unit
        raise


def _open_pair(
    b: Any,
    m: Any,
    operator: LinearOperator,
    around: Surroundings,
    stack: contextlib.ExitStack,
    generator: torch.Generator,
) -> tuple[LinearOperator | None, LinearOperator | None]:
    """Return B and M as operators of the same vectors as A."""
    if isinstance(operator, RowsOfRanks):
        raise ValueError("group: problems with B= or M= are solved in one process only")
    found = []
    for name, source in (("B", b), ("M", m)):
        each = None if source is None else as_operator(source, around)
        if each is not None:
            stack.callback(each.close)
            is_same = each.length == operator.length and each.dtype == operator.dtype
            if not is_same or each.device != operator.device:
                raise ValueError(
                    f"{name}: has {each.length} rows of {each.dtype} on {each.device}, but the "
                    f"operator has {operator.length} of {operator.dtype} on {operator.device}"
                )
            check_symmetric(each, generator, reduce_over(None), name)
        found.append(each)
    return found[0], found[1]


def _solve(problem: StandardProblem) -> Eigenpairs:
    """Solve a standard problem by the method that suits it."""
    if problem.operator.num_ranks == 1 and is_dense_better(problem):
        return solve_dense(problem)
    if problem.which == "BE":
        return solve_ends(problem, _solve)
    if prefers_lobpcg(problem):
        return solve_generalized(problem, None, None)
    return solve_by_lanczos(problem)


def check_numbers(k: int, tol: float, seed: int) -> int:
    """Raise unless the numbers that all solvers take make sense.

    Returns:
        `k` as an int.
    """
    if not isinstance(tol, numbers.Real):
        raise TypeError(f"tol={tol!r}: expected a relative accuracy from 0 to 1, such as 1e-8")
    if not 0 <= tol < 1:
        raise ValueError(f"tol={tol}: expected a relative accuracy from 0 to 1, such as 1e-8")
    if parse_count(seed, name="seed") >= 2**63:
        raise ValueError(f"seed={seed}: expected a number below 2^63")
    return parse_count(k, name="k", least=1)


def check_count(k: int, num_rows: int) -> None:
    """Raise unless an operator has more than k eigenvalues."""
    if num_rows < 2:
        raise ValueError(
            f"operator: has {num_rows} rows; some of the eigenvalues are of at least two rows"
        )
    if k >= num_rows:
        raise ValueError(
            f"k={k}: an operator of {num_rows} rows has {num_rows} eigenvalues, and some of them "
            f"are from 1 to {num_rows - 1}; for all of them there is torch.linalg.eigh"
        )


def check_symmetric(
    operator: LinearOperator,
    generator: torch.Generator,
    reduce: Callable[[Tensor], Tensor],
    name: str = "operator",
) -> float:
    """Raise unless <A x, y> = <x, A y> for random x and y, up to rounding.

    Returns:
        The power of two by which the operator's norm is about one, the same on all ranks.

    Raises:
        ValueError: The operator is not symmetric, or a product is not finite.
    """
    x = make_random((2, operator.length), operator, generator)
    product = operator.apply(x, torch.empty_like(x))
    sums = [each.abs().sum(dtype=torch.float64) for each in (product, x)]
    size, of_x = reduce(torch.stack(sums)).tolist()
    try:
        check_finite(size)
    except FloatingPointError as error:
        raise ValueError(str(error).replace("operator", name, 1)) from None
    if name == "B" and size == 0:
        raise ValueError("B: is zero, and must be positive definite")
    factor = choose_scale(size / of_x, operator.dtype)
    product *= factor
    g = reduce(torch.stack([gram(x, product), gram(product, product), gram(x, x)]))
    difference = abs(complex(g[0, 0, 1] - g[0, 1, 0].conj()))
    scale = float((g[1].diagonal().real * g[2].diagonal().real).max().sqrt())
    unit = torch.finfo(operator.dtype).eps
    if difference > unit ** (2 / 3) * max(scale, 1e-300):
        word = "Hermitian" if operator.dtype.is_complex else "symmetric"
        raise ValueError(
            f"{name}: it is not {word}: for random x and y, <x, A y> and <A x, y> differ by "
            f"{difference / factor:.3g} of {scale / factor:.3g}; {_advise(operator)}"
        )
    return factor


def _advise(operator: LinearOperator) -> str:
    """Return what to do about an operator that is not symmetric."""
    if isinstance(operator, CallableOperator):
        return (
            "a function must return the same for the same vector, in the precision of its dtype: "
            "no dropout, the same batches in each call, no autocast"
        )
    return "pass (A + A^H) / 2 if that is what you mean"


def _read_start(
    start: Tensor | None, operator: LinearOperator, reduce: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return the vectors to begin with as rows."""
    if start is None:
        return None
    if not isinstance(start, Tensor):
        raise TypeError(
            f"start: got {type(start).__name__}; expected a tensor, as of torch.from_numpy"
        )
    if start.is_complex() and not operator.dtype.is_complex:
        raise TypeError(f"start: is complex, but the operator is {operator.dtype}; give real ones")
    vectors = start[:, None] if start.dim() == 1 else start
    if vectors.dim() != 2 or vectors.shape[0] != operator.length:
        raise ValueError(
            f"start: has shape {tuple(start.shape)}, but must be ({operator.length},) or "
            f"({operator.length}, b)"
        )
    vectors = vectors.detach().T.to(device=operator.device, dtype=operator.dtype).contiguous()
    # Over all ranks, of which one may have a part of zeroes, or no rows.
    sums = reduce(vectors.abs().sum(1, dtype=torch.float64))
    if not bool(torch.isfinite(sums).all()) or not bool(sums.all()):
        raise ValueError("start: holds NaN, infinity or a vector of zeroes")
    return vectors
