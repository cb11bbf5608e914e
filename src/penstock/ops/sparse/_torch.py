"""Products of sparse matrices by torch: the way without kernels, and on GPUs the pattern.

Products of numbers are expanded for some rows at once, in windows that a budget holds, and found in
the pattern of the result by their keys, row and column in one number, which are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.ops.sparse._rows import (
    KnownProduct,
    ProductOperands,
    Rows,
    check_count,
    rows_of,
)

_PRODUCT_BYTES = 64
"""Of an expanded product: its entries in both operands, its key, and what sorting it takes."""


class _Products(NamedTuple):
    """Products of the rows `[first, end)`: their entries in A and B, and their keys."""

    first: int
    end: int
    left: Tensor
    right: Tensor
    keys: Tensor


def find_pattern(call: ProductOperands) -> tuple[Tensor, Tensor]:
    """Return the pattern of a product: offsets, int64, and sorted columns of each row.

    Entries outside of the mask are left out. One row of the result is taken at least.
    """
    left, right, mask = call.left, call.right, call.mask
    counts = left.offsets.new_zeros(left.num_rows + 1, dtype=torch.int64)
    columns = []
    mask_keys = None if mask is None else _keys(mask)
    for window in _expand(left, right, call.max_bytes):
        keys = window.keys.unique()
        if mask_keys is not None:
            keys = keys[_find(mask_keys, keys)[1]]
        rows = keys // right.num_columns
        counts[window.first + 1 : window.end + 1] = torch.bincount(
            rows - window.first, minlength=window.end - window.first
        )
        columns.append((keys % right.num_columns).to(left.columns.dtype))
    if not columns:
        return counts, left.columns.new_empty(0)
    counts = counts.cumsum(0)
    check_count(int(counts[-1]), left.columns.dtype)
    return counts, torch.cat(columns)


def multiply(product: KnownProduct) -> Tensor:
    """Return the values of a product, c_ij = sum_k a_ik b_kj."""
    left_values, right_values = product.left_values, product.right_values
    values, keys = left_values.new_zeros(len(product.result.columns)), _keys(product.result)
    for window in _expand(product.left, product.right, product.max_bytes):
        place, is_found = _find(keys, window.keys)
        products = left_values[window.left] * right_values[window.right]
        _add_at(values, place, products.where(is_found, 0.0))
    return values


def differentiate(
    product: KnownProduct, dvalues: Tensor, is_needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both operands' values, None for one that is not needed.

        dA_ik = sum_j dC_ij b_kj        dB_kj = sum_i a_ik dC_ij

    `dvalues` is the gradient of the result's values.
    """
    left_values, right_values = product.left_values, product.right_values
    dleft, dright = torch.zeros_like(left_values), torch.zeros_like(right_values)
    keys = _keys(product.result)
    windows = _expand(product.left, product.right, product.max_bytes)
    for window in windows if len(keys) else ():
        place, is_found = _find(keys, window.keys)
        given = dvalues[place].where(is_found, 0.0)
        _add_at(dleft, window.left, given * right_values[window.right])
        _add_at(dright, window.right, given * left_values[window.left])
    return dleft if is_needed[0] else None, dright if is_needed[1] else None


def _expand(left: Rows, right: Rows, max_bytes: int) -> Iterator[_Products]:
    """Yield the products of a few rows at a time."""
    lengths = right.offsets.diff().long()[left.columns.long()]
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])[left.offsets.long()].tolist()
    first, most = 0, max(1, max_bytes // _PRODUCT_BYTES)
    while first < left.num_rows:
        end = first + 1
        while end < left.num_rows and ends[end + 1] - ends[first] <= most:
            end += 1
        yield _expand_rows(left, right, lengths, first, end)
        first = end


def _expand_rows(left: Rows, right: Rows, lengths: Tensor, first: int, end: int) -> _Products:
    begin, stop = int(left.offsets[first]), int(left.offsets[end])
    lengths = lengths[begin:stop]
    entry = torch.arange(begin, stop, device=lengths.device)
    starts = lengths.cumsum(0) - lengths
    of_left = entry.repeat_interleave(lengths)
    begins = right.offsets.long()[left.columns[begin:stop].long()] - starts
    of_right = torch.arange(len(of_left), device=lengths.device)
    of_right = of_right + begins.repeat_interleave(lengths)
    numbers = torch.arange(first, end, device=lengths.device)
    rows = numbers.repeat_interleave(left.offsets[first : end + 1].diff().long())
    keys = rows.repeat_interleave(lengths) * right.num_columns + right.columns.long()[of_right]
    return _Products(first, end, of_left, of_right, keys)


def _keys(matrix: Rows) -> Tensor:
    return rows_of(matrix) * matrix.num_columns + matrix.columns.long()


def _find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return where keys are in a sorted list, and which are there."""
    if not len(keys):
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return place, keys[place] == wanted


def _add_at(sums: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values in a fixed order, which each function has on its device alone."""
    if not len(sums):
        return
    if sums.device.type == "cpu":
        sums.index_add_(0, index, values)
    else:
        sums.index_put_((index,), values, accumulate=True)
