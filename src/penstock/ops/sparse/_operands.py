"""Operands of products: sparse matrices of any layout and order, read as sorted rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops.sparse import _native
from penstock.ops.sparse._rows import Rows, offsets_of, rows_of

MOST_ROWS = 2**31 - 1
"""Rows and columns of a matrix: more would need 64 bits each in the workspace."""
_VALUES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def read_operand(name: str, operand: Tensor, *, is_mask: bool = False) -> tuple[Rows, Tensor]:
    """Return the pattern of a sparse matrix and its values as they are stored, with gradient.

    The values of a mask may have any dtype.

    Raises:
        TypeError: It is no sparse tensor in CSR or COO, or its values are not floating.
        ValueError: It is no matrix of numbers, or its indices are malformed.
    """
    _require_matrix(name, operand, is_mask)
    drops_graph = operand.layout == torch.sparse_csr or not operand.is_leaf
    if operand.layout == torch.sparse_coo:
        # Coalescing sums what is stored twice, with a gradient for each.
        operand = operand.coalesce()
        offsets, columns = offsets_of(operand.indices()[0], operand.shape[0]), operand.indices()[1]
    else:
        offsets, columns = operand.crow_indices(), operand.col_indices()
    values = operand.values()
    if values.requires_grad and drops_graph:
        values.register_hook(_refuse_graph)
    return sort_rows(name, offsets, columns, *operand.shape), values


def _require_matrix(name: str, operand: Any, is_mask: bool) -> None:
    if not isinstance(operand, Tensor) or operand.layout not in (
        torch.sparse_csr,
        torch.sparse_coo,
    ):
        found = operand.layout if isinstance(operand, Tensor) else type(operand).__name__
        raise TypeError(
            f"{name} is {found}, but must be a matrix in torch.sparse_csr or torch.sparse_coo: "
            "convert it, as by tensor.to_sparse_csr()"
        )
    if operand.dim() != 2 or operand.dense_dim():
        raise ValueError(
            f"{name} has the shape {tuple(operand.shape)} with {operand.dense_dim()} dense "
            "dimensions, but must be one matrix of numbers"
        )
    if operand.dtype not in _VALUES and not is_mask:
        raise TypeError(
            f"{name} has the dtype {operand.dtype}, but must have float16, bfloat16, float32 or "
            "float64: convert it"
        )
    if max(operand.shape) > MOST_ROWS:
        raise ValueError(
            f"{name} has the shape {tuple(operand.shape)}, but at most {MOST_ROWS} rows and "
            "columns are supported: take it in parts"
        )


def _refuse_graph(grad: Tensor) -> None:
    """Refuse second derivatives: torch drops the graph of the gradient.

    It does where it makes a matrix in CSR of it, and where one in COO was made of values.
    """
    if grad.requires_grad:
        raise RuntimeError(
            "the gradient of an operand of penstock.ops.spgemm has no gradient of its own: leave "
            "create_graph out; for second derivatives multiply dense matrices"
        )


def sort_rows(name: str, offsets: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Rows:
    """Return rows with their columns sorted and each once.

    Raises:
        ValueError: Offsets do not rise from 0 to the number of columns, or a column is outside.
    """
    found = Rows(offsets.contiguous(), columns.contiguous(), num_rows, num_columns)
    verdict = _native.check(found) if columns.device.type == "cpu" else None
    verdict = _check(found) if verdict is None else verdict
    if verdict == -1:
        raise ValueError(
            f"{name} has row offsets that do not rise from 0 to its {len(columns)} entries: build "
            "it with torch.sparse.check_sparse_tensor_invariants()"
        )
    if verdict == -2:
        raise ValueError(
            f"{name} has columns outside of 0 to {num_columns - 1}: build it with "
            "torch.sparse.check_sparse_tensor_invariants()"
        )
    if verdict == 0:
        return found
    rows = rows_of(found)
    keys, place = torch.unique(rows * num_columns + columns, return_inverse=True)
    offsets = offsets_of(keys // num_columns, num_rows).to(columns.dtype)
    return Rows(offsets, (keys % num_columns).to(columns.dtype), num_rows, num_columns, place)


def _check(matrix: Rows) -> int:
    """Return what `_native.check` does, by torch."""
    offsets, columns = matrix.offsets.long(), matrix.columns
    is_rising = offsets[0] == 0 and offsets[-1] == len(columns) and (offsets.diff() >= 0).all()
    if not bool(is_rising):
        return -1
    if not len(columns):
        return 0
    if int(columns.min()) < 0 or int(columns.max()) >= matrix.num_columns:
        return -2
    keys = rows_of(matrix) * matrix.num_columns + columns
    return int(not bool((keys.diff() > 0).all()))
