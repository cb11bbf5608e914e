"""Patterns of sparse matrices, as rows of sorted and unique columns, and products of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock._lazy import cached_property
from penstock.compat.autograd import outlive_inference
from penstock.units import parse_bytes

_DEFAULT_BYTES = 64 * 2**20
MOST_INDEX = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """The pattern of a matrix: columns by row, sorted and unique.

    Attributes:
        offsets: `(num_rows + 1,)`, int32 or int64: ends of the rows in `columns`.
        columns: Of the same dtype.
        num_rows: Of the matrix.
        num_columns: Of the matrix.
        place: Of each stored entry of the operand its entry here, where they differ; else None.
    """

    offsets: Tensor
    columns: Tensor
    num_rows: int
    num_columns: int
    place: Tensor | None = None

    def outlive_inference(self) -> Rows:
        """Return it with tensors that a backward pass can save."""
        place = None if self.place is None else outlive_inference(self.place)
        offsets, columns = outlive_inference(self.offsets), outlive_inference(self.columns)
        return dataclasses.replace(self, offsets=offsets, columns=columns, place=place)

    def to(self, dtype: torch.dtype) -> Rows:
        """Return it with indices of a dtype."""
        offsets, columns = self.offsets.to(dtype), self.columns.to(dtype)
        return dataclasses.replace(self, offsets=offsets, columns=columns)

    @cached_property
    def longest(self) -> int:
        """Entries of the longest row."""
        return int(self.offsets.diff().max()) if self.num_rows else 0

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the value of each entry here: the sum of those that are stored for it."""
        if self.place is None:
            return values
        sums = values.new_zeros(self.columns.shape)
        if values.device.type == "cpu":  # each has a fixed order there, and not on the other
            return sums.index_add(0, self.place, values)
        return sums.index_put((self.place,), values, accumulate=True)


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


@dataclasses.dataclass(frozen=True, eq=False)
class KnownProduct:
    """A product of values, C = A B, whose pattern is known.

    Attributes:
        left: The pattern of A.
        right: That of B.
        result: That of C.
        left_values: Of A, float32 or float64.
        right_values: Of B, of the same dtype.
        is_masked: Whether products may lie outside of the pattern of C, which are left out.
        max_bytes: Of the workspace.
    """

    left: Rows
    right: Rows
    result: Rows
    left_values: Tensor
    right_values: Tensor
    is_masked: bool
    max_bytes: int


def read_tensors(indices: Sequence[Tensor], num_columns: int) -> list[Rows]:
    """Return A, B and what follows them, which has the shape of C, of `ProductOperands.tensors`."""
    num_rows, num_inner = len(indices[0]) - 1, len(indices[2]) - 1
    shapes = [(num_rows, num_inner), (num_inner, num_columns), (num_rows, num_columns)]
    return [
        Rows(offsets, columns, *shape)
        for offsets, columns, shape in zip(indices[::2], indices[1::2], shapes, strict=False)
    ]


def read_budget(max_bytes: int | str | None) -> int:
    """Return the bytes of a workspace."""
    budget = _DEFAULT_BYTES if max_bytes is None else parse_bytes(max_bytes, name="max_bytes")
    if budget < 1:
        raise ValueError(f"max_bytes is {max_bytes!r}, but must be at least 1")
    return budget


def check_count(count: int, dtype: torch.dtype) -> None:
    """Refuse a matrix that has more entries than its indices can count."""
    if count > MOST_INDEX[dtype]:
        raise ValueError(
            f"the product has {count} entries, but indices of {dtype} count to "
            f"{MOST_INDEX[dtype]}: build the operands with int64 indices"
        )


def rows_of(matrix: Rows) -> Tensor:
    """Return the row of each entry, int64."""
    numbers = torch.arange(matrix.num_rows, device=matrix.offsets.device)
    counts = matrix.offsets.diff().long()
    return numbers.repeat_interleave(counts, output_size=len(matrix.columns))


def offsets_of(rows: Tensor, num_rows: int) -> Tensor:
    """Return where each row begins in a sorted list of rows, and the list's end."""
    numbers = torch.arange(num_rows + 1, device=rows.device, dtype=rows.dtype)
    return torch.searchsorted(rows, numbers)
