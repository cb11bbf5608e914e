"""Rows of a sparse matrix times vectors on the CPU: `combine.cpp`, or torch without a compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import THREADS, load_optional_library, to_struct

KINDS = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes of values, in the order of `kind` in `combine.cpp`."""


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
        _combine_by_torch(offsets, columns, values, x, out, first_row, alpha, z, gamma, beta)
        return
    call = Combination(
        *(offsets, columns, values, x, z, out, first_row, num_rows, len(x)),
        *(x.shape[1], out.shape[1], alpha, gamma, beta),
        is_wide=offsets.dtype == torch.int64,
        kind=KINDS.index(values.dtype),
        num_threads=torch.get_num_threads() if len(columns) > 1 << 14 else 1,
    )
    library.penstock_combine_rows(ctypes.byref(to_struct(call)))


def _combine_by_torch(
    offsets: Tensor,
    columns: Tensor,
    values: Tensor,
    x: Tensor,
    out: Tensor,
    first_row: int,
    alpha: float,
    z: Tensor,
    gamma: float,
    beta: float,
) -> None:
    num_rows = len(offsets) - 1
    matrix = torch.sparse_csr_tensor(
        offsets - offsets[0], columns, values, (num_rows, x.shape[1]), check_invariants=False
    )
    product = (matrix @ x.T).T
    place = out[:, first_row : first_row + num_rows]
    add_scaled(place, product, z[:, first_row : first_row + num_rows], alpha, gamma, beta)


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
        [THREADS, Path(__file__).with_name("combine.cpp")],
        flags=("-O3", "-march=native"),
        functions={"penstock_combine_rows": (None, [ctypes.c_void_p])},
        work="sparse matrices are multiplied by vectors",
        otherwise="by torch, slower",
    )
