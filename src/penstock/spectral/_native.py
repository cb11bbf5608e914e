"""Products, combinations and covariances on the CPU in C++, or by torch without a compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import THREADS, load_optional_library, to_struct
from penstock.memory.pages import round_up

KINDS = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes of values, in the order of `kind` in `combine.cpp`."""
_SOURCES = ("combine", "covariance", "rotate")
_ROOM_BYTES = 2**19  # of rows in float64, which stay in a cache
_LEAST_ROOM_ROWS = 64
_PIECE = 2048  # elements: of `rotate.cpp`
_ROTATED_ELEMENTS = 1 << 19  # of vectors that torch rotates at once
_PANEL = 8  # columns: a multiple of the numbers in a register


@dataclasses.dataclass(frozen=True, eq=False)
class Combination:
    """`struct Combination` of `combine.cpp`."""

    offsets: Tensor
    columns: Tensor
    values: Tensor
    x: Tensor
    z: Tensor
    out: Tensor
    first_row: int
    num_rows: int
    num_vectors: int
    x_stride: int
    out_stride: int
    alpha: float
    gamma: float
    beta: float
    is_wide: bool
    kind: int
    num_threads: int


@dataclasses.dataclass(frozen=True, eq=False)
class Covariance:
    """`struct Covariance` of `covariance.cpp`; rows may lie apart, so `rows` is their address."""

    rows: int
    shift: Tensor
    total: Tensor
    squares: Tensor
    room: Tensor
    num_rows: int
    num_columns: int
    row_stride: int
    padded: int
    room_rows: int
    is_double: bool
    num_threads: int


@dataclasses.dataclass(frozen=True, eq=False)
class Rotation:
    """`struct Rotation` of `rotate.cpp`; rows lie apart, so these are addresses."""

    rows: int
    out: int
    y: Tensor
    grams: Tensor
    num_vectors: int
    num_kept: int
    length: int
    from_stride: int
    to_stride: int
    num_threads: int


class CovarianceSum:
    """Sums of rows and of their products in float64 (complex128), of rows minus a shift.

    Args:
        shift: Row that is subtracted from all, (n,), float64 (complex128).
        num_threads: Threads that sum.
    """

    def __init__(self, shift: Tensor, num_threads: int) -> None:
        self.shift, self._num_threads, (width,) = shift, num_threads, shift.shape
        self._library = _library() if shift.device.type == "cpu" else None
        if shift.dtype.is_complex:
            self._library = None
        padded = round_up(width, _PANEL)
        self._room_rows = _room_rows(padded, shift.dtype.itemsize)
        self._room = shift.new_empty(self._room_rows, padded)
        self._total, self._squares = shift.new_zeros(padded), shift.new_zeros(padded, padded)

    def add(self, rows: Tensor) -> None:
        """Add rows, (m, n), of any floating dtype."""
        is_read_as_it_is = rows.dtype in KINDS[:2] and rows.stride(1) == 1 and not rows.is_neg()
        if self._library is None or not is_read_as_it_is:
            self._add_by_torch(rows)
            return
        call = Covariance(
            *(rows.data_ptr(), self.shift, self._total, self._squares, self._room),
            *(len(rows), rows.shape[1], rows.stride(0), len(self._total), self._room_rows),
            is_double=rows.dtype == torch.float64,
            num_threads=self._num_threads,
        )
        self._library.penstock_add_covariance(ctypes.byref(to_struct(call)))

    def _add_by_torch(self, rows: Tensor) -> None:
        width = rows.shape[1]
        for part in rows.split(self._room_rows):
            chunk = torch.sub(part, self.shift, out=self._room[: len(part), :width])
            self._total[:width] += chunk.sum(0)
            self._squares[:width, :width].addmm_(chunk.mH, chunk)

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sum of the rows, (n,), and of x^H x over them, (n, n)."""
        width = len(self.shift)
        upper = self._squares[:width, :width].triu()
        return self._total[:width], upper + upper.triu(1).mH


def covariance_bytes(width: int, item: int) -> int:
    """Return the bytes that a `CovarianceSum` holds, of so many columns and bytes a number."""
    padded = round_up(width, _PANEL)
    return (padded + _room_rows(padded, item)) * padded * item


def _room_rows(padded: int, item: int) -> int:
    return max(_LEAST_ROOM_ROWS, _ROOM_BYTES // (item * padded))


def combine_rows(
    offsets: Tensor,
    columns: Tensor,
    values: Tensor,
    x: Tensor,
    out: Tensor,
    *,
    first_row: int,
    alpha: float,
    z: Tensor,
    gamma: float,
    beta: float,
) -> None:
    """Compute `out = alpha A x + gamma z + beta out` for some rows of A.

    Args:
        offsets: Offsets of the rows, (num_rows + 1,); the first one belongs to `columns[0]`.
        columns: Columns of their entries, of the dtype of the offsets.
        values: Values of their entries.
        x: Vectors, (b, num_columns), contiguous.
        out: Result, (b, n); changed from `first_row` on.
        first_row: Element of `z` and `out` that belongs to the first row.
        alpha: Factor of the product.
        z: Vectors of the shape of `out`.
        gamma: Factor of `z`.
        beta: Factor of the old content of `out`; 0 overwrites it, whatever it is.
    """
    library = _library() if x.device.type == "cpu" else None
    num_rows = len(offsets) - 1
    if library is None or values.dtype not in KINDS:
        lists, shape = (offsets - offsets[0], columns, values), (num_rows, x.shape[1])
        matrix = torch.sparse_csr_tensor(
            *lists, shape, check_invariants=False, device=values.device
        )
        rows = slice(first_row, first_row + num_rows)
        add_scaled(out[:, rows], (matrix @ x.T).T, z[:, rows], alpha, gamma, beta)
        return
    call = Combination(
        *(offsets, columns, values, x, z, out, first_row, num_rows, len(x)),
        *(x.shape[1], out.shape[1], alpha, gamma, beta),
        is_wide=offsets.dtype == torch.int64,
        kind=KINDS.index(values.dtype),
        num_threads=torch.get_num_threads() if len(columns) > 1 << 14 else 1,
    )
    library.penstock_combine_rows(ctypes.byref(to_struct(call)))


def rotate_rows(y: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Compute combinations of vectors, `out_j = sum_i y_ij v_i`, and their Gram matrix.

    Args:
        y: Coefficients, (m, q), float64 or complex128.
        rows: Vectors, (m, n), each contiguous.
        out: Result, (q, n), each contiguous; it may be the first of the vectors.

    Returns:
        <out_a, out_b>, (q, q), of the dtype of `y`.
    """
    library = _library() if rows.device.type == "cpu" else None
    kept, length = out.shape
    if library is None or rows.dtype != torch.float64 or y.dtype != torch.float64 or not kept:
        return _rotate_by_torch(y, rows, out)
    grams = torch.zeros(-(-length // _PIECE), kept, kept, dtype=torch.float64, device="cpu")
    call = Rotation(
        *(rows.data_ptr(), out.data_ptr(), y.contiguous(), grams, len(rows), kept, length),
        *(rows.stride(0), out.stride(0)),
        num_threads=torch.get_num_threads() if rows.numel() > 1 << 16 else 1,
    )
    library.penstock_rotate_rows(ctypes.byref(to_struct(call)))
    upper = grams.sum(0).triu()
    return upper + upper.triu(1).T


def _rotate_by_torch(y: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(len(out), len(out), dtype=y.dtype, device=rows.device)
    width = max(1, _ROTATED_ELEMENTS // max(1, len(rows)))
    for begin in range(0, rows.shape[1], width):
        part = slice(begin, begin + width)
        rotated = (y.T @ rows[:, part].to(y.dtype)).to(out.dtype)
        out[:, part] = rotated
        rotated = rotated.to(y.dtype)
        total += rotated.conj() @ rotated.T
    return total


def add_scaled(
    out: Tensor, product: Tensor, z: Tensor, alpha: float, gamma: float, beta: float
) -> None:
    """Compute `out = alpha product + gamma z + beta out` elementwise."""
    if beta:
        out.mul_(beta)
        out.add_(product, alpha=alpha)
    else:
        torch.mul(product, alpha, out=out)
    if gamma:
        out.add_(z, alpha=gamma)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "spectral",
        [THREADS, *(Path(__file__).with_name(f"{name}.cpp") for name in _SOURCES)],
        flags=("-O3", "-march=native"),
        functions={
            "penstock_combine_rows": (None, [ctypes.c_void_p]),
            "penstock_add_covariance": (None, [ctypes.c_void_p]),
            "penstock_rotate_rows": (None, [ctypes.c_void_p]),
        },
        work="sparse matrices are multiplied by vectors, and vectors combined",
        otherwise="by torch, slower",
    )
