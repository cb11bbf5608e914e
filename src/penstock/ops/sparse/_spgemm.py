"""The function `spgemm`, and the pattern of a product, which can be used again."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock.compat.autograd import is_dispatch_watched
from penstock.compat.dynamo import run_uncompiled
from penstock.ops._operands import check_operand, check_together, sum_dtype
from penstock.ops.sparse._operands import read_operand
from penstock.ops.sparse._operator import spgemm_pattern, spgemm_values
from penstock.ops.sparse._product import assemble, multiply
from penstock.ops.sparse._rows import ProductOperands, Rows, read_budget

_UNCOMPILED = "sparse tensors are not traced; `ProductPattern.multiply` has dense operands"


@run_uncompiled(reason=_UNCOMPILED)
def spgemm(
    a: Tensor,
    b: Tensor,
    *,
    mask: Tensor | None = None,
    pattern: ProductPattern | None = None,
    max_bytes: int | str | None = None,
) -> Tensor:
    """Return the product of two sparse matrices, with gradients in the operands' own patterns.

        c_ij = sum_k a_ik b_kj        dA_ik = sum_j dC_ij b_kj        dB_kj = sum_i a_ik dC_ij

    Rows are multiplied as by Gustavson (1978), each in a workspace that a budget holds (SMASH,
    arXiv:2105.14156, section III). Bits do not depend on the run or on the number of threads.

    Example:
        >>> a = torch.eye(3).to_sparse_csr().requires_grad_()
        >>> spgemm(a, a).values()
        tensor([1., 1., 1.], grad_fn=<ValuesBackward0>)

    Args:
        a: `(m, k)`, `torch.sparse_csr` or COO; float16, bfloat16, float32 or float64. Columns in
            any order; an entry that is stored twice counts as the sum of both.
        b: `(k, n)`, of the same dtype and device. It may be `a` itself.
        mask: `(m, n)`, sparse: entries of the product outside of its pattern are not computed.
        pattern: Of this product, by `product_pattern`: the columns of the result are not looked for
            again.
        max_bytes: Of the workspace, a row's at least; None for that of `pattern`, or 64 MiB.

    Returns:
        `(m, n)`, in CSR with sorted columns, or in COO where `a` is. An entry is stored where
        entries of a row and a column meet, if their sum is 0, too. The gradient of an operand has
        the entries that the operand has. There is no second derivative.

    Raises:
        TypeError: An operand is not sparse, or dtypes differ or are not supported.
        ValueError: Shapes or devices do not fit, indices are malformed, `pattern` is of other
            operands, or the result has more entries than indices of 32 bits can count.
    """
    return _multiply(a, b, mask, pattern, max_bytes)


@run_uncompiled(reason=_UNCOMPILED)
def product_pattern(
    a: Tensor, b: Tensor, *, mask: Tensor | None = None, max_bytes: int | str | None = None
) -> ProductPattern:
    """Return the pattern of a product, for products of other values in the same patterns.

    Example:
        >>> a = torch.eye(3).to_sparse_csr()
        >>> pattern = product_pattern(a, a)
        >>> spgemm(2 * a, a, pattern=pattern).values()
        tensor([2., 2., 2.])

    Args:
        a: As of `spgemm`, like all others; values are not read.
        b: The right operand.
        mask: Entries that are computed; None for all.
        max_bytes: Of the workspace, here and when it is used.

    Raises:
        TypeError: As `spgemm`.
        ValueError: As `spgemm`.
    """
    (left, _), (right, _) = _read_both(a, b)
    of_mask = None if mask is None else _read_mask(mask, left, right)
    return _find(ProductOperands.of(left, right, of_mask, max_bytes))


@dataclasses.dataclass(frozen=True, eq=False)
class ProductPattern:
    """The entries of a product, and the patterns of its operands.

    Attributes:
        left: Pattern of the left operand.
        right: Pattern of the right operand.
        result: Pattern of the product.
        is_masked: Whether a mask left entries out.
        max_bytes: Of the workspace of a product.
    """

    left: Rows
    right: Rows
    result: Rows
    is_masked: bool
    max_bytes: int

    @property
    def row_offsets(self) -> Tensor:
        """Ends of the rows in `columns`, as `crow_indices` of CSR."""
        return self.result.offsets

    @property
    def columns(self) -> Tensor:
        """Columns by row, sorted, as `col_indices` of CSR."""
        return self.result.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        return self.result.num_rows, self.result.num_columns

    def multiply(self, left_values: Tensor, right_values: Tensor) -> Tensor:
        """Return the values of the product of operands with these values, in their stored order.

        All tensors are dense, so `torch.compile(fullgraph=True)` takes it whole.

        Raises:
            TypeError: Dtypes differ.
            ValueError: The values are not those of the operands' entries, or are on other devices.
        """
        if left_values.dtype != right_values.dtype:
            raise TypeError(
                f"the operands have the dtypes {left_values.dtype} and {right_values.dtype}, but "
                "must have one: convert them"
            )
        for name, rows, values in (
            ("left_values", self.left, left_values),
            ("right_values", self.right, right_values),
        ):
            check_operand(name, values)
            stored = rows.columns if rows.place is None else rows.place
            if values.shape != stored.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(values.shape)}, but must have a value for each "
                    f"of the operand's {len(stored)} entries"
                )
        check_together(left_values=left_values, right_values=right_values)
        if left_values.device.type != "meta":  # of which there are only shapes
            check_together(left_values=left_values, pattern=self.columns)
        dtype = sum_dtype(left_values.dtype)
        result = spgemm_values(
            self.left.sum_values(left_values.to(dtype)),
            self.right.sum_values(right_values.to(dtype)),
            [each for rows in self._rows for each in (rows.offsets, rows.columns)],
            self.result.num_columns,
            self.is_masked,
            self.max_bytes,
        )
        return result.to(left_values.dtype)

    def of_operands(self, left: Rows, right: Rows) -> ProductPattern:
        """Return it for values in the orders of these operands, and refuse those of others."""
        for name, known, given in (("a", self.left, left), ("b", self.right, right)):
            given = given.to(known.columns.dtype)
            is_same = (
                known.num_columns == given.num_columns
                and known.columns.device == given.columns.device
                and torch.equal(known.offsets, given.offsets)
                and torch.equal(known.columns, given.columns)
            )
            if not is_same:
                raise ValueError(
                    f"pattern is of another {name} than the one that is passed: make it anew by "
                    "product_pattern(a, b)"
                )
        return dataclasses.replace(
            self,
            left=dataclasses.replace(self.left, place=left.place),
            right=dataclasses.replace(self.right, place=right.place),
        )

    @property
    def _rows(self) -> tuple[Rows, Rows, Rows]:
        return self.left, self.right, self.result


def _multiply(
    a: Tensor,
    b: Tensor,
    mask: Tensor | None,
    pattern: ProductPattern | None,
    max_bytes: int | str | None,
) -> Tensor:
    if pattern is not None and not isinstance(pattern, ProductPattern):
        raise TypeError(f"pattern is {type(pattern).__name__}: make it by product_pattern(a, b)")
    if pattern is not None and mask is not None:
        raise ValueError("pattern has its mask in it: pass mask to product_pattern instead")
    (left, left_values), (right, right_values) = _read_both(a, b)
    if pattern is None:
        call = ProductOperands.of(
            left, right, None if mask is None else _read_mask(mask, left, right), max_bytes
        )
        if not is_dispatch_watched():
            return multiply(left_values, right_values, call, a.layout)
        pattern = _find(call)  # made of operators, which are seen
    else:
        pattern = pattern.of_operands(left, right)
        if max_bytes is not None:
            pattern = dataclasses.replace(pattern, max_bytes=read_budget(max_bytes))
    return assemble(pattern.result, pattern.multiply(left_values, right_values), a.layout)


def _find(call: ProductOperands) -> ProductPattern:
    left, right = call.left, call.right
    offsets, columns = spgemm_pattern(call.tensors, right.num_columns, call.max_bytes)
    result = Rows(offsets.to(columns.dtype), columns, left.num_rows, right.num_columns)
    left, right, result = (rows.outlive_inference() for rows in (left, right, result))
    return ProductPattern(left, right, result, call.mask is not None, call.max_bytes)


def _read_both(a: Tensor, b: Tensor) -> tuple[tuple[Rows, Tensor], tuple[Rows, Tensor]]:
    """Return patterns and values of operands that fit each other."""
    left = read_operand("a", a)
    right = left if b is a else read_operand("b", b)
    if a.dtype != b.dtype:
        raise TypeError(f"a and b have the dtypes {a.dtype} and {b.dtype}: convert one of them")
    if a.device != b.device:
        raise ValueError(f"a and b are on {a.device} and {b.device}: move one of them")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a and b have the shapes {tuple(a.shape)} and {tuple(b.shape)}: the columns of a must "
            "be as many as the rows of b"
        )
    return left, right


def _read_mask(mask: Tensor, left: Rows, right: Rows) -> Rows:
    rows, _ = read_operand("mask", mask, is_mask=True)
    if (rows.num_rows, rows.num_columns) != (left.num_rows, right.num_columns):
        raise ValueError(
            f"mask has the shape {tuple(mask.shape)}, but must have that of the product, "
            f"{(left.num_rows, right.num_columns)}"
        )
    if rows.columns.device != left.columns.device:
        raise ValueError(
            f"mask is on {rows.columns.device}, but must be on {left.columns.device}: move it"
        )
    return rows
