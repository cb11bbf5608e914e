"""Products as one node of autograd, from the values of two sparse matrices to a third.

An operator of torch for each step would take longer than the products of 10,000 short rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.ops._operands import sum_dtype
from penstock.ops.sparse import _operator
from penstock.ops.sparse._rows import KnownProduct, ProductOperands, Rows, rows_of


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
        offsets, columns, values = _operator.find_product(call, left, right)
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
        dvalues = _read_gradient(gradients[0], result).to(left.dtype).resolve_neg()
        rest = (call.mask is not None, call.max_bytes)
        if torch.is_grad_enabled():  # an operator, which refuses second derivatives
            indices = [*call.tensors[:4], offsets, columns]
            found = _operator.spgemm_gradients(
                dvalues, left, right, indices, result.num_columns, *rest
            )
        else:
            product = KnownProduct(call.left, call.right, result, left, right, *rest)
            found = _operator.kernels_for(left).differentiate(
                product, dvalues, ctx.needs_input_grad[:2]
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
