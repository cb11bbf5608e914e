"""Principal components of a table in any tier.

Of few columns the covariance is summed in one sweep over the rows, in float64; of many, the largest
eigenvalues of its products are found, each block of which is a sweep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory import FileStore, Ledger, Link, Tier
from penstock.spectral._basis import wide_dtype
from penstock.spectral._eigs import check_numbers, eigs
from penstock.spectral._matrix import RowsMatrix, open_matrix
from penstock.spectral._native import CovarianceSum, covariance_bytes
from penstock.spectral._report import SpectralReport
from penstock.spectral._svds import GramOperator
from penstock.spectral._tiles import TileStream
from penstock.unified import unify
from penstock.units import format_bytes, parse_bytes

_MOST_COLUMNS = 4096  # whose covariance is factored densely
_FIRST_ROWS = 1024  # whose mean is subtracted from all


@dataclasses.dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Principal components of a table; unpacks as `variances, components`.

    Attributes:
        variances: Variances along the components, (k,), float64, falling.
        components: Orthonormal rows, (k, num_columns), float64 (complex128), each with its largest
            entry positive.
        mean: Mean of the rows, (num_columns,), float64 (complex128).
        report: The account of the solution; `num_steps` are sweeps over the table.
    """

    variances: Tensor
    components: Tensor
    mean: Tensor
    report: SpectralReport

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.variances, self.components))

    def transform(self, rows: Tensor) -> Tensor:
        """Return the coordinates of rows, (b, k), for rows (b, num_columns)."""
        return (rows.to(self.mean) - self.mean) @ self.components.mH


def pca(
    table: Any,
    k: int,
    *,
    max_bytes: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    tol: float = 0.0,
    seed: int = 0,
) -> PrincipalComponents:
    """Return the first principal components of the rows of a table.

    Example:
        >>> import torch
        >>> table = torch.randn(500, 8) * torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1])
        >>> variances, components = pca(table, 2)
        >>> int(components[0].argmax())
        0

    Args:
        table: Rows, (num_rows, num_columns), of float32 or float64: a tensor, a unified table in
            memory or in a file, the path of a table, or a NumPy array.
        k: Components, from 1 to num_columns.
        max_bytes: The most bytes of tiles, covariance and basis, as an int or text; None: what it
            takes, all of a table in a file.
        store: Directory for the basis of very wide tables, as for `eigs`.
        tol: Relative accuracy where components are iterated for; 0: that of the dtype.
        seed: Of the random vectors.

    Returns:
        Variances and components: unpacks as two, and has `mean`, `transform` and a `report`.

    Raises:
        TypeError: `table` is none, or is sparse.
        ValueError: An argument is out of range, or the table is not finite.
        CapacityError: `max_bytes` is not enough.
    """
    started, ledger, k = time.perf_counter(), Ledger(), check_numbers(k, tol, seed)
    budget = None if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    with contextlib.ExitStack() as stack:
        num_columns = _count_columns(table)
        wide_bytes = 16 if getattr(table, "dtype", None) == torch.complex128 else 8
        # The sums, and the covariance with its eigenvectors.
        gram_bytes = covariance_bytes(num_columns, wide_bytes) + 2 * num_columns**2 * wide_bytes
        is_small = num_columns <= _MOST_COLUMNS and (budget is None or 2 * gram_bytes <= budget)
        if k == num_columns and not is_small:
            raise _error_of_all(k, 2 * gram_bytes)
        room = None if budget is None else budget - gram_bytes if is_small else budget // 2
        rows = open_matrix(table, room, ledger, stack, is_read_once=is_small)
        # Products in a lower precision would be of another matrix.
        stack.enter_context(torch.autocast(rows.device.type, enabled=False))
        if not isinstance(rows, RowsMatrix):
            raise TypeError(
                "table: is sparse, and centred it is dense; use svds, which centres not"
            )
        if rows.shape[0] < 2:
            raise ValueError(f"table: has {rows.shape[0]} rows; a variance is of at least two")
        if k > num_columns:
            raise ValueError(
                f"k={k}: a table of shape {rows.shape} has {num_columns} components; expected 1 to "
                "as many"
            )
        if is_small:
            ledger.add(Tier.DEVICE, gram_bytes)
            mean, covariance = _sum_covariance(rows)
            values, y = torch.linalg.eigh(covariance)
            variances, components = values.flip(0)[:k], y.T.flip(0)[:k].conj()
            report = _report(ledger, rows, started)
        else:
            mean = _sum_mean(rows)
            left = None if budget is None else budget - rows.held_bytes
            if left is not None and left < 0:
                raise CapacityError(
                    f"max_bytes={format_bytes(budget or 0)} is not enough for tiles"
                )
            operator = GramOperator(rows, mean.to(rows.dtype), seed=seed)
            pairs = eigs(operator, k, max_bytes=left, store=store, tol=tol, seed=seed)
            variances = pairs.values.flip(0) / (rows.shape[0] - 1) / operator.scale / operator.scale
            _check_range(variances)
            components = pairs.vectors.T.flip(0).to(mean.dtype).conj()
            report = pairs.report
    return PrincipalComponents(variances.cpu(), _orient(components), mean, report)


def _error_of_all(k: int, num_bytes: int) -> Exception:
    """Return the error of components that an iteration, which finds some, is asked for."""
    if k > _MOST_COLUMNS:
        return ValueError(
            f"k={k}: of more than {_MOST_COLUMNS} columns some of the components are found; ask "
            f"for at most {k - 1}"
        )
    return CapacityError(
        f"max_bytes: all of {k} components are found by their covariance, which takes "
        f"{format_bytes(num_bytes)}; give at least {num_bytes}, or ask for fewer components"
    )


def _count_columns(table: Any) -> int:
    if isinstance(table, str | os.PathLike):
        table = unify(table, device="cpu", cache=0)
    shape = getattr(table, "shape", None)
    if shape is None or len(shape) != 2:
        found = type(table).__name__ if shape is None else f"shape {tuple(shape)}"
        raise TypeError(f"table: got {found}; expected rows (num_rows, num_columns)")
    if not shape[1]:
        raise ValueError(f"table: has shape {tuple(shape)}; components are of at least one column")
    return int(shape[1])


def _sum_covariance(rows: RowsMatrix) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of all rows, in float64, by one sweep.

    Rows are shifted by the mean of the first ones, so that sums of squares lose no digits to a mean
    that is far from zero.
    """
    # One processor is left to the reader, which a second thread would slow by more than it saves.
    num_threads = max(1, torch.get_num_threads() - isinstance(rows.tiles, TileStream))
    found: CovarianceSum | None = None
    for _, (tile,) in rows.tiles:
        if found is None:
            first = tile[:_FIRST_ROWS].to(wide_dtype(rows.dtype)).mean(0)
            found = CovarianceSum(first, num_threads)
        found.add(tile)
    assert found is not None, "there are rows"
    total, squares = found.sums()
    count = rows.shape[0]
    _check_range(squares.diagonal().real)
    # sum (x - m)^H (x - m) = sum x^H x - n m^H m, of shifted rows x with the mean m
    mean = total / count
    squares -= count * torch.outer(mean.conj(), mean)
    return mean + found.shift, squares / (count - 1)


def _check_range(squares: Tensor) -> None:
    if not bool(torch.isfinite(squares).all()):
        raise ValueError("table: holds NaN or infinity, or overflows; look with torch.isfinite")


def _sum_mean(rows: RowsMatrix) -> Tensor:
    wide = wide_dtype(rows.dtype)
    total = torch.zeros(rows.shape[1], dtype=wide, device=rows.device)
    for _, (tile,) in rows.tiles:
        total += tile.sum(0, dtype=wide)
    return total / rows.shape[0]


def _orient(components: Tensor) -> Tensor:
    """Turn each component such that its largest entry is positive."""
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return components * (largest.conj() / largest.abs())


def _report(ledger: Ledger, rows: RowsMatrix, started: float) -> SpectralReport:
    return SpectralReport(
        method="dense",
        degree=1,
        num_products=0,
        num_steps=1,
        num_restarts=0,
        num_basis_vectors=rows.shape[1],
        num_resident_vectors=rows.shape[1],
        basis_bytes=rows.shape[1] ** 2 * wide_dtype(rows.dtype).itemsize,
        peak_device_bytes=ledger.peak(Tier.DEVICE),
        bytes_read=ledger.moved(Link.FILE_TO_DEVICE),
        bytes_written=0,
        stall_seconds=ledger.stall_seconds,
        total_seconds=time.perf_counter() - started,
    )
