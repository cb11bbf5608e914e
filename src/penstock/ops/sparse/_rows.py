"""The pattern of a sparse matrix, as rows of sorted and unique columns."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from penstock._lazy import cached_property
from penstock.compat.autograd import outlive_inference

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
