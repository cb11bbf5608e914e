"""Largest singular values: eigenvalues of A^H A, whose products read A once."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.memory import FileStore, Ledger
from penstock.spectral import _native
from penstock.spectral._basis import wide_dtype
from penstock.spectral._eigs import check_numbers, eigs
from penstock.spectral._matrix import Matrix, open_matrix
from penstock.spectral._operator import LinearOperator, choose_scale, make_random
from penstock.spectral._report import SpectralReport
from penstock.units import parse_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class SingularTriplets:
    """Singular values and vectors; unpacks as `u, s, vh`.

    Attributes:
        u: Left vectors as columns, (m, k).
        s: Singular values, (k,), float64, falling.
        vh: Right vectors as rows, conjugated, (k, n).
        report: The account of the solution.
    """

    u: Tensor
    s: Tensor
    vh: Tensor
    report: SpectralReport

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.u, self.s, self.vh))


def svds(
    matrix: Any,
    k: int = 6,
    *,
    max_bytes: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    tol: float = 0.0,
    seed: int = 0,
) -> SingularTriplets:
    """Return the largest singular values of a matrix, and their vectors.

    Values below about 1e-8 of the largest (1e-4 of it in float32) drown in the rounding of A^H A,
    so that their vectors are orthonormal, but any; the smallest ones are not supported.

    Example:
        >>> import torch
        >>> u, s, vh = svds(torch.diag(torch.arange(1.0, 51.0, dtype=torch.float64)), 2)
        >>> s
        tensor([50., 49.], dtype=torch.float64)

    Args:
        matrix: (m, n): a tensor, dense or sparse, a unified table in memory or in a file, the path
            of a table, a NumPy array, a SciPy sparse matrix, or `penstock.spectral.CSR` in memory.
        k: Values wanted, from 1 to min(m, n) - 1.
        max_bytes: The most bytes on the device for basis, workspace and tiles, as for `eigs`.
        store: Directory or `FileStore` for what of the basis is beyond it.
        tol: Relative accuracy of the eigenvalues of A^H A; 0: that of the dtype.
        seed: Of the random vectors.

    Returns:
        Left vectors, values and right vectors: unpacks as three.

    Raises:
        TypeError: `matrix` is none.
        ValueError: An argument is out of range, or the matrix is not finite.
        NoConvergenceError, CapacityError, StoreError: As `eigs`.
    """
    k = check_numbers(k, tol, seed)
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    with contextlib.ExitStack() as stack:
        found = open_matrix(matrix, None if budget is None else budget // 2, Ledger(), stack)
        # Products in a lower precision would be of another matrix.
        stack.enter_context(torch.autocast(found.device.type, enabled=False))
        rows, columns = found.shape
        if min(rows, columns) < 2:
            raise ValueError(
                f"matrix: has shape {(rows, columns)}; some of the singular values are of at least "
                "two rows and columns"
            )
        if k >= min(rows, columns):
            raise ValueError(
                f"k={k}: a matrix of shape {(rows, columns)} has {min(rows, columns)} singular "
                f"values; expected 1 to {min(rows, columns) - 1}"
            )
        operator = GramOperator(found, seed=seed)
        left = None if budget is None else budget - found.held_bytes
        pairs = eigs(operator, k, max_bytes=left, store=store, tol=tol, seed=seed)
        v = pairs.vectors.T.contiguous().flip(0)
        u = torch.empty(k, rows, dtype=v.dtype, device=v.device)
        for begin, part in found.products(v * operator.scale):
            u[:, begin : begin + part.shape[1]] = part
    # A V = Q R = (Q P) S W^H has orthonormal vectors of values that drown, and of zeroes.
    wide = wide_dtype(u.dtype)
    q, r = torch.linalg.qr(u.T.to(wide))
    p, s, wh = torch.linalg.svd(r)
    vh = (wh @ v.conj().to(wide)).to(v.dtype)
    return SingularTriplets((q @ p).to(u.dtype), s.cpu() / operator.scale, vh, pairs.report)


class GramOperator(LinearOperator):
    """A^H A of A times a power of two, one sweep over the rows of A per product.

    Attributes:
        scale: The power of two, by which the square is in the range of the dtype.
    """

    def __init__(self, matrix: Matrix, mean: Tensor | None = None, *, seed: int) -> None:
        """Make the operator of a matrix; with `mean` of that with it subtracted from rows."""
        super().__init__(matrix.shape[1], matrix.dtype, matrix.device, block=4)
        self._matrix, self._mean = matrix, mean
        x = make_random((1, self.length), self, torch.Generator().manual_seed(seed))
        parts = [part.abs().sum(dtype=torch.float64) for _, part in matrix.products(x)]
        size = float(torch.stack(parts).sum()) / matrix.shape[0]
        self.scale = choose_scale(size / math.sqrt(self.length), self.dtype)

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        total = torch.zeros_like(x)
        self._matrix.add_gram(x * self.scale, total, self._mean)
        _native.add_scaled(out, total, z, alpha * self.scale, gamma, beta)
