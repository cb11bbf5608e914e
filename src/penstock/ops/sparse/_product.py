"""Products as one node of autograd, from the values of two sparse matrices to a third.

An operator of torch for each step would take longer than the products of 10,000 short rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from penstock.ops._operands import sum_dtype
from penstock.ops.sparse import _operator
from penstock.ops.sparse._rows import Rows, rows_of
from penstock.units import parse_bytes

_DEFAULT_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class ProductOperands:
    """Patterns of the operands and perhaps of a mask, with indices of one dtype, and a budget."""

    left: Rows
    right: Rows
    mask: Rows | None
    max_bytes: int

    @classmethod
    def of(
        cls, left: Rows, right: Rows, mask: Rows | None, max_bytes: int | str | None
    ) -> ProductOperands:
        """Return the patterns of a call."""
        budget = read_budget(max_bytes)
        dtypes = {each.columns.dtype for each in (left, right)}
        dtype = torch.int64 if torch.int64 in dtypes else torch.int32
        mask = None if mask is None else mask.to(dtype)
        return cls(left.to(dtype), right.to(dtype), mask, budget)

    @property
    def tensors(self) -> list[Tensor]:
        """Offsets and columns of each, as operators take them."""
        given = [each for each in (self.left, self.right, self.mask) if each is not None]
        return [each for rows in given for each in (rows.offsets, rows.columns)]


def read_budget(max_bytes: int | str | None) -> int:
    """Return the bytes of a workspace."""
    budget = _DEFAULT_BYTES if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    if budget < 1:
        raise ValueError(f"max_bytes is {max_bytes!r}, but must be at least 1")
    return budget


def multiply(
    left_values: Tensor, right_values: Tensor, call: ProductOperands, layout: torch.layout
) -> Tensor:
    """Return the product, a sparse tensor, of operands whose stored entries have these values."""
    dtype = sum_dtype(left_values.dtype)
    sums = (
        call.left.sum_values(left_values.to(dtype)),
        call.right.sum_values(right_values.to(dtype)),
    )
    found: Any = _ProductNode.apply(*sums, call, left_values.dtype, layout)
    return found


def assemble(result: Rows, values: Tensor, layout: torch.layout) -> Tensor:
    """Return a sparse tensor of values."""
    found: Any = _Assembly.apply(values, result, layout)
    return found


class _ProductNode(torch.autograd.Function):
    """A product of values that are float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        call: ProductOperands,
        dtype: torch.dtype,
        layout: torch.layout,
    ) -> Tensor:
        """Return the product."""
        offsets, columns, values = _operator.find_product(
            call.left, call.right, call.mask, left, right, call.max_bytes
        )
        ctx.call = call
        ctx.save_for_backward(left, right, offsets, columns)
        result = Rows(offsets, columns, call.left.num_rows, call.right.num_columns)
        return _build(result, values.to(dtype), layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands' values."""
        left, right, offsets, columns = ctx.saved_tensors
        call: ProductOperands = ctx.call
        result = Rows(offsets, columns, call.left.num_rows, call.right.num_columns)
        dvalues = _read_gradient(gradients[0], result).to(left.dtype)
        rest = (call.mask is not None, call.max_bytes)
        if torch.is_grad_enabled():  # an operator, which refuses second derivatives
            indices = [*call.tensors[:4], offsets, columns]
            found = _operator.spgemm_gradients(
                dvalues, left, right, indices, result.num_columns, *rest
            )
        else:
            found = _operator.kernels_for(left).differentiate(
                *(dvalues, call.left, call.right, result, left, right, *rest),
                is_needed=ctx.needs_input_grad[:2],
            )
        return *found, None, None, None


class _Assembly(torch.autograd.Function):
    """A sparse tensor of values, and the values of its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, result: Rows, layout: torch.layout) -> Tensor:
        """Return the tensor."""
        ctx.result = result
        return _build(result, values, layout)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the values."""
        return _read_gradient(gradients[0], ctx.result), None, None


def _build(result: Rows, values: Tensor, layout: torch.layout) -> Tensor:
    shape = (result.num_rows, result.num_columns)
    if layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(
            result.offsets,
            result.columns,
            values,
            shape,
            check_invariants=False,
            device=values.device,
        )
    indices = torch.stack([rows_of(result), result.columns.long()])
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=True, check_invariants=False, device=values.device
    )


def _read_gradient(gradient: Tensor, result: Rows) -> Tensor:
    """Return the gradient of a sparse tensor's values.

    A gradient with the tensor's own pattern has them already; torch would mark the places of all
    elements, also of those that are not stored, to find them.
    """
    if gradient.layout == torch.strided:
        return gradient[rows_of(result), result.columns.long()]
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
    if _has_pattern(gradient, result):
        return gradient.values()
    return _take_entries(gradient, result)


def _take_entries(matrix: Tensor, pattern: Rows) -> Tensor:
    """Return the numbers of a sparse matrix where a pattern has entries; 0 where it has none."""
    found = matrix.to_sparse_coo().coalesce()
    rows, columns = found.indices()
    keys = rows * pattern.num_columns + columns
    wanted = rows_of(pattern) * pattern.num_columns + pattern.columns
    place = torch.searchsorted(keys, wanted).clamp(max=max(0, len(keys) - 1))
    if not len(keys):
        return found.values().new_zeros(len(wanted))
    return found.values()[place].where(keys[place] == wanted, 0.0)


def _has_pattern(gradient: Tensor, result: Rows) -> bool:
    """Return whether a sparse gradient stores the entries of a pattern, in their order."""
    if gradient.layout == torch.sparse_csr:
        offsets, columns = gradient.crow_indices(), gradient.col_indices()
        return _are_equal(offsets, result.offsets) and _are_equal(columns, result.columns)
    rows, columns = gradient.indices()
    return _are_equal(columns, result.columns) and torch.equal(rows, rows_of(result))


def _are_equal(found: Tensor, indices: Tensor) -> bool:
    return torch.equal(found, indices.to(found.dtype))
