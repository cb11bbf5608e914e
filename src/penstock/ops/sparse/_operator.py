"""The operators of sparse products, with gradients and fake kernels.

Patterns reach them as lists of tensors: offsets and columns of A, of B and of C. The pattern has no
gradient; the values have one in the patterns of the operands.
"""

# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.compat.dispatch import loop_over_batches, refuse_batched
from penstock.compat.dynamo import mark_constant
from penstock.compat.packages import is_installed
from penstock.ops.sparse import _native, _torch
from penstock.ops.sparse._rows import KnownProduct, ProductOperands, Rows, read_tensors


def name_kernels(values: Tensor) -> str:
    """Return "C++", "Triton" or "torch": what multiplies values of this dtype and device."""
    if values.device.type == "cpu":
        return "C++" if _native.is_available() else "torch"
    has_kernels = values.device.type == "cuda" and values.dtype != torch.float64
    return "Triton" if has_kernels and _has_triton() else "torch"


@mark_constant
def _has_triton() -> bool:
    return is_installed("triton")


def kernels_for(values: Tensor) -> ModuleType:
    """Return the module that multiplies; Triton is imported by the first call on a GPU."""
    name = name_kernels(values)
    if name == "Triton":
        return import_module("penstock.ops.sparse.triton")
    return _native if name == "C++" else _torch


@torch.library.custom_op("penstock::spgemm_pattern", mutates_args=())
def spgemm_pattern(indices: Sequence[Tensor], num_columns: int, max_bytes: int) -> list[Tensor]:
    """Return the offsets, int64, and the columns of a product, in the columns of a mask if given.

    Args:
        indices: Offsets and columns of A, of B and perhaps of a mask.
        num_columns: Of B.
        max_bytes: Of the workspace.
    """
    left, right, *masks = read_tensors(indices, num_columns)
    call = ProductOperands(left, right, masks[0] if masks else None, max_bytes)
    is_native = left.columns.device.type == "cpu" and _native.is_available()
    return list((_native if is_native else _torch).find_pattern(call))


@spgemm_pattern.register_fake
def _(indices, num_columns, max_bytes):
    offsets, columns = indices[0], indices[1]
    count = torch.library.get_ctx().new_dynamic_size()
    return [offsets.new_empty(offsets.shape, dtype=torch.int64), columns.new_empty(count)]


def find_product(
    call: ProductOperands, left_values: Tensor, right_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, columns and values of a product, whose rows are found and summed at once."""
    module = kernels_for(left_values)
    if module is _native:
        return _native.find_product(call, left_values, right_values)
    left, right = call.left, call.right
    offsets, columns = _torch.find_pattern(call)
    result = Rows(offsets.to(columns.dtype), columns, left.num_rows, right.num_columns)
    rest = (call.mask is not None, call.max_bytes)
    product = KnownProduct(left, right, result, left_values, right_values, *rest)
    return result.offsets, columns, module.multiply(product)


@torch.library.custom_op("penstock::spgemm_values", mutates_args=())
def spgemm_values(
    left_values: Tensor,
    right_values: Tensor,
    indices: Sequence[Tensor],
    num_columns: int,
    is_masked: bool,
    max_bytes: int,
) -> Tensor:
    """Return the values of a product, as `_torch.multiply` says."""
    left, right, result = read_tensors(indices, num_columns)
    values = (left_values, right_values)
    product = KnownProduct(left, right, result, *values, is_masked, max_bytes)
    return kernels_for(left_values).multiply(product)


@torch.library.custom_op("penstock::spgemm_gradients", mutates_args=())
def spgemm_gradients(
    dvalues: Tensor,
    left_values: Tensor,
    right_values: Tensor,
    indices: Sequence[Tensor],
    num_columns: int,
    is_masked: bool,
    max_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both operands' values, as `_torch.differentiate` says."""
    left, right, result = read_tensors(indices, num_columns)
    values = (left_values, right_values)
    product = KnownProduct(left, right, result, *values, is_masked, max_bytes)
    return kernels_for(left_values).differentiate(product, dvalues)


@spgemm_values.register_fake
def _(left_values, right_values, indices, num_columns, is_masked, max_bytes):
    return left_values.new_empty(indices[5].shape)


@spgemm_gradients.register_fake
def _(dvalues, left_values, right_values, indices, num_columns, is_masked, max_bytes):
    return torch.empty_like(left_values), torch.empty_like(right_values)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left_values, right_values, indices, *ctx.rest = inputs
    ctx.save_for_backward(left_values, right_values, *indices)


def _differentiate(ctx: Any, dvalues: Tensor) -> tuple[Any, ...]:
    refuse_batched("penstock.ops.ProductPattern.multiply", dvalues)
    left_values, right_values, *indices = ctx.saved_tensors
    grads = spgemm_gradients(dvalues, left_values, right_values, indices, *ctx.rest)
    return *grads, [None] * len(indices), None, None, None


spgemm_values.register_autograd(_differentiate, setup_context=_keep)
loop_over_batches(spgemm_values)


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the gradient of penstock.ops.spgemm has no gradient of its own: for second derivatives "
        "multiply dense matrices"
    )


spgemm_gradients.register_autograd(_refuse)
loop_over_batches(spgemm_gradients)
