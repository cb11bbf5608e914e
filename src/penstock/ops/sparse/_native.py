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
from penstock.ops.sparse._rows import KnownProduct, ProductOperands, Rows, check_count

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


def find_pattern(call: ProductOperands) -> tuple[Tensor, Tensor]:
    """Return offsets, int64, and columns of the product, as `_torch.find_pattern` does."""
    offsets, columns, _ = _find_rows(call, None, None)
    return offsets.long(), columns


def find_product(
    call: ProductOperands, left_values: Tensor, right_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return offsets, columns and values of the product, each row at once."""
    offsets, columns, values = _find_rows(call, left_values, right_values)
    assert values is not None, "there are values of the operands"
    return offsets, columns, values


def _find_rows(
    call: ProductOperands, left_values: Tensor | None, right_values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    library = _library()
    assert library is not None, "there is a path without the library"
    left = call.left
    product = _Product.of(left, call.right, left_values, right_values, call.max_bytes, call.mask)
    struct = _refer(product)
    offsets, count = torch.empty_like(left.offsets), ctypes.c_int64()
    found = library.penstock_find_rows(struct, offsets.data_ptr(), ctypes.byref(count))
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
        library.penstock_copy_rows(struct, found, *addresses)
    return offsets, columns, values


def multiply(product: KnownProduct) -> Tensor:
    """Return the values of the product, as `_torch.multiply` does."""
    library = _library()
    assert library is not None, "there is a path without the library"
    values = product.left_values.new_empty(len(product.result.columns))
    library.penstock_multiply(_refer(_Product.of_known(product, values)))
    return values


def differentiate(
    product: KnownProduct, dvalues: Tensor, is_needed: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both operands' values, as `_torch.differentiate` does."""
    library = _library()
    assert library is not None, "there is a path without the library"
    operands = (product.left_values, product.right_values)
    dleft, dright = (
        torch.zeros_like(each, memory_format=torch.contiguous_format) if needed else None
        for each, needed in zip(operands, is_needed, strict=True)
    )
    call = _Product.of_known(product, dvalues.contiguous())
    call = dataclasses.replace(call, left_gradient=dleft, right_gradient=dright)
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
        max_bytes: int,
        mask: Rows | None = None,
    ) -> _Product:
        """Return a product whose pattern is not known; there may be a mask and values."""
        return cls(
            *(left.offsets, left.columns, _make_contiguous(left_values)),
            *(right.offsets, right.columns, _make_contiguous(right_values)),
            *((None, None) if mask is None else (mask.offsets, mask.columns)),
            *(None, None, None, None, None, left.num_rows, right.num_rows, right.num_columns),
            is_wide=left.columns.dtype == torch.int64,
            is_double=left_values is not None and left_values.dtype == torch.float64,
            is_masked=False,
            window_columns=window_columns(right.num_columns, max_bytes),
            max_bytes=max_bytes // 2,
            num_threads=torch.get_num_threads(),
        )

    @classmethod
    def of_known(cls, known: KnownProduct, values: Tensor) -> _Product:
        """Return a product with its pattern, and its values or their gradient."""
        values_of = (known.left_values, known.right_values)
        return dataclasses.replace(
            cls.of(known.left, known.right, *values_of, known.max_bytes),
            offsets=known.result.offsets,
            columns=known.result.columns,
            values=values,
            is_masked=known.is_masked,
        )


def _make_contiguous(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.contiguous()


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
