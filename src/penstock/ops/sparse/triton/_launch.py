"""Launches of the kernel: lists, tables and patterns of the values and of both gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from penstock.codegen import Run, TritonLaunch, launch, use_device
from penstock.ops.sparse._rows import KnownProduct, Rows, offsets_of, rows_of
from penstock.ops.sparse.triton import _kernels

_BLOCK = 128  # entries of a program


class Entries(NamedTuple):
    """The entries that are computed."""

    rows: Tensor
    columns: Tensor


class Lists(NamedTuple):
    """Numbers by row; `order` says where a number's value is, if `has_order`."""

    offsets: Tensor
    columns: Tensor
    order: Tensor
    numbers: Tensor


class SampledTable(NamedTuple):
    """Numbers by row, with sorted columns."""

    offsets: Tensor
    columns: Tensor
    numbers: Tensor


class SamplingSizes(NamedTuple):
    """Constants of the kernel; each is a `tl.constexpr`.

    Attributes:
        block: Entries of a program.
        steps: Halvings of the table's longest row.
        is_by_column: Whether an entry's list is that of its column.
        has_order: Whether values of lists are in another order.
    """

    block: Any
    steps: Any
    is_by_column: Any
    has_order: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """The operands of one launch.

    Attributes:
        pattern: Entries that are computed.
        lists: Of each row, or of each column if `is_by_column`.
        table: The other factors.
        is_by_column: Whether an entry's list is that of its column.
        has_order: Whether the lists have an order.
    """

    pattern: Rows
    lists: Lists
    table: SampledTable
    is_by_column: bool
    has_order: bool

    @property
    def steps(self) -> int:
        """Halvings that the longest row of the table takes."""
        longest = int(self.table.offsets.diff().max()) if len(self.table.offsets) > 1 else 0
        return max(0, longest - 1).bit_length()

    def compute(self, run: Run) -> Tensor:
        """Return the values of the entries."""
        out = self.lists.numbers.new_empty(len(self.pattern.columns))
        rows = rows_of(self.pattern).to(self.pattern.columns.dtype)
        sizes = SamplingSizes(_BLOCK, self.steps, self.is_by_column, self.has_order)
        entries = Entries(rows, self.pattern.columns)
        with use_device(out.device):
            run(
                TritonLaunch(
                    kernel=_kernels.sample_products,
                    grid=(-(-len(out) // _BLOCK),),
                    arguments=(
                        *(entries, self.lists, self.table, out, len(out)),
                        SamplingSizes(*(tl.constexpr(each) for each in sizes)),
                    ),
                )
            )
        return out


def plan_values(product: KnownProduct) -> Sampling:
    """Return the sampling of the values of a product."""
    left, right = product.left, product.right
    lists = Lists(left.offsets, left.columns, left.columns, product.left_values.contiguous())
    table = SampledTable(right.offsets, right.columns, product.right_values.contiguous())
    return Sampling(product.result, lists, table, is_by_column=False, has_order=False)


def plan_gradients(product: KnownProduct, dvalues: Tensor) -> tuple[Sampling, Sampling]:
    """Return the samplings of the gradients of both operands."""
    left, right, result = product.left, product.right, product.result
    table = SampledTable(result.offsets, result.columns, dvalues.contiguous())
    lists = Lists(right.offsets, right.columns, right.columns, product.right_values.contiguous())
    order = left.columns.argsort(stable=True)
    dtype = left.columns.dtype
    offsets = offsets_of(left.columns[order], left.num_columns).to(dtype)
    values = product.left_values.contiguous()
    transposed = Lists(offsets, rows_of(left)[order].to(dtype), order.to(dtype), values)
    return (
        Sampling(left, lists, table, is_by_column=True, has_order=False),
        Sampling(right, transposed, table, is_by_column=False, has_order=True),
    )


def multiply(product: KnownProduct, *, run: Run = launch) -> Tensor:
    """Return the values of a product as `_torch.multiply` does; `run` takes the launch."""
    return plan_values(product).compute(run)


def differentiate(
    product: KnownProduct,
    dvalues: Tensor,
    is_needed: tuple[bool, bool] = (True, True),
    *,
    run: Run = launch,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients as `_torch.differentiate` does; `run` takes the launches."""
    of_left, of_right = plan_gradients(product, dvalues)
    return (
        of_left.compute(run) if is_needed[0] else None,
        of_right.compute(run) if is_needed[1] else None,
    )
