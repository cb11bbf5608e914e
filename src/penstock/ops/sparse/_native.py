"""Products of sparse matrices on the CPU, in C++ (`spgemm.cpp`).

A thread's workspace is a bitmap of the columns of C with its ranks, or a table of all columns where
the pattern of C is known; where those of all threads are beyond the budget, columns are taken in
windows. Rows of C are kept, with columns of 32 bits, until they are counted; their memory is given
back as they are copied: both are no more than the result.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import THREADS, VECTORS, load_optional_library, to_struct
from penstock.compat.dynamo import mark_constant
from penstock.ops.sparse._rows import Rows, check_count

_WORD_COLUMNS, _WORD_BYTES = 64, 13
"""Columns of a word of a bitmap, and its bytes with its rank and its part of the summaries."""
_LEAST_WINDOW = 4096
_FILES = ("columns.cpp", "few.cpp", "spgemm.cpp")


@mark_constant
def is_available() -> bool:
    """Return whether the kernels can be built, or were."""
    return _library() is not None


def check(matrix: Rows) -> int | None:
    """Return 0 for sorted and unique columns, 1 for others, -1 for offsets and -2 for columns
    that are malformed; None where there is no library.
    """
    library = _library()
    if library is None:
        return None
    return library.penstock_check_csr(
        matrix.offsets.data_ptr(),
        matrix.columns.data_ptr(),
        *(matrix.num_rows, matrix.num_columns, len(matrix.columns)),
        matrix.columns.dtype == torch.int64,
    )


def find_pattern(
    left: Rows, right: Rows, mask: Rows | None, max_bytes: int
) -> tuple[Tensor, Tensor]:
    """Return offsets, int64, and columns of the product, as `_torch.find_pattern` does."""
    offsets, columns, _ = _find_rows(left, right, mask, None, None, max_bytes)
    return offsets.long(), columns


def find_product(
    left: Rows,
    right: Rows,
    mask: Rows | None,
    left_values: Tensor,
    right_values: Tensor,
    max_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, columns and values of the product, each row at once."""
    offsets, columns, values = _find_rows(
        left, right, mask, left_values.contiguous(), right_values.contiguous(), max_bytes
    )
    assert values is not None, "there are values of the operands"
    return offsets, columns, values


def _find_rows(
    left: Rows,
    right: Rows,
    mask: Rows | None,
    left_values: Tensor | None,
    right_values: Tensor | None,
    max_bytes: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    library = _library()
    assert library is not None, "there is a path without the library"
    call = _refer(
        _Product.of(left, right, left_values, right_values, mask=mask, max_bytes=max_bytes)
    )
    offsets, count = torch.empty_like(left.offsets), ctypes.c_int64()
    found = library.penstock_find_rows(call, offsets.data_ptr(), ctypes.byref(count))
    if not found:
        raise MemoryError("the rows of the product do not fit in memory: take rows in parts")
    parts = (None, None, None)
    try:
        check_count(count.value, left.columns.dtype)
        columns = left.columns.new_empty(count.value)
        values = None if left_values is None else left_values.new_empty(count.value)
        parts = (offsets, columns, values)
    finally:
        addresses = [None if each is None else each.data_ptr() for each in parts]
        library.penstock_copy_rows(call, found, *addresses)
    return offsets, columns, values


def multiply(
    left: Rows,
    right: Rows,
    result: Rows,
    left_values: Tensor,
    right_values: Tensor,
    is_masked: bool,
    max_bytes: int,
) -> Tensor:
    """Return the values of the product, as `_torch.multiply` does."""
    library = _library()
    assert library is not None, "there is a path without the library"
    values = torch.empty(len(result.columns), dtype=left_values.dtype, device="cpu")
    call = _Product.of(
        *(left, right, left_values.contiguous(), right_values.contiguous()),
        result=result,
        values=values,
        is_masked=is_masked,
        max_bytes=max_bytes,
    )
    library.penstock_multiply(_refer(call))
    return values


def differentiate(
    dvalues: Tensor,
    left: Rows,
    right: Rows,
    result: Rows,
    left_values: Tensor,
    right_values: Tensor,
    is_masked: bool,
    max_bytes: int,
    is_needed: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both operands' values, as `_torch.differentiate` does."""
    library = _library()
    assert library is not None, "there is a path without the library"
    operands = (left_values.contiguous(), right_values.contiguous())
    dleft, dright = (
        torch.zeros_like(each) if needed else None
        for each, needed in zip(operands, is_needed, strict=True)
    )
    call = _Product.of(
        *(left, right, *operands),
        result=result,
        values=dvalues.contiguous(),
        gradients=(dleft, dright),
        is_masked=is_masked,
        max_bytes=max_bytes,
    )
    library.penstock_differentiate(_refer(call))
    return dleft, dright


def window_columns(num_columns: int, max_bytes: int) -> int:
    """Return the columns that a thread takes at once, such that all threads keep to a budget."""
    words = max_bytes // torch.get_num_threads() // _WORD_BYTES
    return max(1, min(num_columns, max(_LEAST_WINDOW, words * _WORD_COLUMNS)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Product:
    """`struct Product` of `spgemm.cpp`."""

    left_offsets: Tensor
    left_columns: Tensor
    left_values: Tensor | None
    right_offsets: Tensor
    right_columns: Tensor
    right_values: Tensor | None
    mask_offsets: Tensor | None
    mask_columns: Tensor | None
    offsets: Tensor | None
    columns: Tensor | None
    values: Tensor | None
    left_gradient: Tensor | None
    right_gradient: Tensor | None
    num_rows: int
    num_inner: int
    num_columns: int
    is_wide: bool
    is_double: bool
    is_masked: bool
    window_columns: int
    max_bytes: int
    num_threads: int

    @classmethod
    def of(
        cls,
        left: Rows,
        right: Rows,
        left_values: Tensor | None,
        right_values: Tensor | None,
        *,
        max_bytes: int,
        mask: Rows | None = None,
        result: Rows | None = None,
        values: Tensor | None = None,
        gradients: tuple[Tensor | None, Tensor | None] = (None, None),
        is_masked: bool = False,
    ) -> _Product:
        """Return a product; a mask and the pattern of the result are there or are not."""
        return cls(
            *(left.offsets, left.columns, left_values),
            *(right.offsets, right.columns, right_values),
            *((None, None) if mask is None else (mask.offsets, mask.columns)),
            *((None, None) if result is None else (result.offsets, result.columns)),
            *(values, *gradients, left.num_rows, right.num_rows, right.num_columns),
            is_wide=left.columns.dtype == torch.int64,
            is_double=left_values is not None and left_values.dtype == torch.float64,
            is_masked=is_masked,
            window_columns=window_columns(right.num_columns, max_bytes),
            max_bytes=max_bytes // 2,
            num_threads=torch.get_num_threads(),
        )


def _refer(call: _Product) -> object:
    return ctypes.byref(to_struct(call))


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return load_optional_library(
        "spgemm",
        [THREADS, VECTORS, *(Path(__file__).with_name(name) for name in _FILES)],
        # A sum has the same bits in every way that it is taken, of products that are rounded. Rows
        # are short: loops over them that are made vectors take longer to begin than to run.
        flags=("-fno-tree-vectorize", "-fopenmp-simd", "-march=native", "-ffp-contract=off"),
        functions={
            "penstock_check_csr": (number, [pointer, pointer, number, number, number, number]),
            "penstock_find_rows": (pointer, [pointer, pointer, pointer]),
            "penstock_copy_rows": (None, [pointer, pointer, pointer, pointer, pointer]),
            "penstock_multiply": (None, [pointer]),
            "penstock_differentiate": (None, [pointer]),
        },
        work="products of sparse matrices are computed",
        otherwise="by torch, slower",
    )
