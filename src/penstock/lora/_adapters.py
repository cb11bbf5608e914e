"""Adapters of one layer, and the rows of a batch grouped by adapter."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.compat.autograd import is_eager, outlive_inference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def has_strides(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is neither nested nor sparse nor of a library's own layout."""
    return not (tensor.is_nested or tensor.is_mkldnn) and tensor.layout == torch.strided


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank addition to a layer: `scaling * dropout(x) @ down.T @ up.T` (LoRA, section 4.1).

    Example:
        >>> adapter = Adapter(torch.randn(8, 64), torch.zeros(32, 8), scaling=2.0, dropout=0.1)
        >>> adapter.rank
        8

    Attributes:
        down: The matrix A, of shape `(rank, in_features)`; PEFT's `lora_A.weight`.
        up: The matrix B, of shape `(out_features, rank)` and of `down`'s dtype; `lora_B.weight`.
        scaling: The factor of the addition; alpha / rank, or with rank-stabilised LoRA
            alpha / sqrt(rank).
        dropout: Probability of dropping an element of the input before `down`, in [0, 1).

    Raises:
        TypeError: `down` or `up` is not a tensor, or `scaling` or `dropout` is not a number. (To
            train a scaling, multiply `up` by it.)
        ValueError: Shapes, dtypes or devices do not fit each other, the rank is 0, `scaling` is not
            finite, or `dropout` is outside of [0, 1).
    """

    down: torch.Tensor
    up: torch.Tensor
    scaling: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        down, up = self.down, self.up
        if not isinstance(down, torch.Tensor) or not isinstance(up, torch.Tensor):
            raise TypeError(
                f"down and up are of the types {type(down).__name__} and {type(up).__name__}; "
                "accepted are tensors"
            )
        if down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0]:
            raise ValueError(
                f"down and up have the shapes {tuple(down.shape)} and {tuple(up.shape)}; accepted "
                "are (rank, in_features) and (out_features, rank)"
            )
        if not down.shape[0]:
            raise ValueError("down has rank 0: an adapter needs a rank of at least 1")
        if down.dtype != up.dtype or down.device != up.device or down.dtype not in FLOATS:
            raise ValueError(
                f"down is {down.dtype} on {down.device} and up {up.dtype} on {up.device}; both "
                "must have one floating-point dtype and one device"
            )
        _check_number("scaling", self.scaling)
        _check_number("dropout", self.dropout)
        if not math.isfinite(self.scaling):
            raise ValueError(f"scaling is {self.scaling}; accepted are finite numbers")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; accepted are probabilities in [0, 1)")

    @property
    def rank(self) -> int:
        """Columns between `down` and `up`."""
        return self.down.shape[0]


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """Rows of a batch, grouped by adapter once for all layers of a step.

    The position of a row among its adapter's, in ascending order, is its number, on which the
    dropout mask depends.

    Example:
        >>> rows = AdapterRows.group(torch.tensor([1, 0, 1, -1, 0]), num_adapters=2)
        >>> rows.counts, rows.starts, rows.order.tolist()
        ((2, 2), (-1, -1), [1, 4, 0, 2])

    Attributes:
        num_rows: Rows of the batch, those of no adapter included.
        counts: Rows of each adapter.
        starts: First row of each adapter whose rows lie together in the batch; else -1.
        order: The adapters' rows one after the other, int64 of shape `(sum(counts),)`, no row twice
            for one adapter; None where the rows of each adapter lie together.

    Raises:
        TypeError: `order` is no tensor.
        ValueError: Counts, starts and order do not fit each other or the batch; of the numbers in
            `order` those on the CPU are looked at.
    """

    num_rows: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        runs = list(zip(self.counts, self.starts, strict=False))
        if len(self.counts) != len(self.starts) or any(
            count < 0 or start < -1 or start + count > self.num_rows for count, start in runs
        ):
            raise ValueError(
                f"counts are {self.counts} and starts {self.starts}; accepted is a number of rows "
                f"and a first row for each adapter, within the {self.num_rows} rows of the batch"
            )
        order = self.order
        if order is None:
            if -1 in self.starts:
                raise ValueError("order is None; adapters whose start is -1 need it")
        elif not isinstance(order, torch.Tensor):
            raise TypeError(f"order is a {type(order).__name__}; accepted is a tensor")
        elif order.dtype != torch.int64 or tuple(order.shape) != (sum(self.counts),):
            raise ValueError(
                f"order is {order.dtype} of shape {tuple(order.shape)}; accepted are int64 numbers "
                f"of the adapters' {sum(self.counts)} rows"
            )
        else:
            _check_order(order, self)
            object.__setattr__(self, "order", outlive_inference(order))

    @classmethod
    def group(cls, assignment: torch.Tensor | Sequence[int], num_adapters: int) -> AdapterRows:
        """Group the rows of a batch.

        Args:
            assignment: By row the number of its adapter, integers of shape `(num_rows,)`; -1 for a
                row of no adapter.
            num_adapters: Adapters that there are.

        Returns:
            The rows by adapter, on the assignment's device.

        Raises:
            TypeError: The assignment does not consist of integers.
            ValueError: A number is outside of [-1, num_adapters), or the shape is another.
        """
        by_row = _to_integers(assignment)
        if by_row.dim() != 1:
            raise ValueError(
                f"assignment has the shape {tuple(by_row.shape)}; accepted is one number a row"
            )
        numbers = by_row.detach().to("cpu", torch.int64)
        if len(numbers) and not -1 <= int(numbers.min()) <= int(numbers.max()) < num_adapters:
            wrong = numbers[(numbers < -1) | (numbers >= num_adapters)][0]
            raise ValueError(
                f"assignment has the number {int(wrong)}; accepted are those of the {num_adapters} "
                "adapters, from 0 on, and -1 for rows of no adapter"
            )
        counts = torch.bincount(numbers + 1, minlength=num_adapters + 1).tolist()
        order = numbers.sort(stable=True).indices[counts.pop(0) :]
        starts = [_start_of_run(rows) for rows in order.split(counts)]
        return cls(
            num_rows=len(numbers),
            counts=tuple(counts),
            starts=tuple(starts),
            order=order.to(by_row.device) if -1 in starts else None,
        )

    @classmethod
    def of_runs(cls, counts: Sequence[int], *, num_rows: int | None = None) -> AdapterRows:
        """Give each adapter the next rows of a batch, from row 0 on.

        Args:
            counts: Rows of each adapter.
            num_rows: Rows of the batch; those at its end have no adapter. None: the sum of counts.

        Returns:
            The rows by adapter.

        Raises:
            ValueError: A count is negative, or `num_rows` is less than their sum.
        """
        ends = list(itertools.accumulate(counts))
        total = ends[-1] if ends else 0
        return cls(
            num_rows=total if num_rows is None else num_rows,
            counts=tuple(counts),
            starts=tuple(end - count for end, count in zip(ends, counts, strict=True)),
        )

    @property
    def num_adapters(self) -> int:
        """Adapters among which the rows are divided."""
        return len(self.counts)


def _check_order(order: torch.Tensor, rows: AdapterRows) -> None:
    """Refuse numbers of rows that do not exist or come twice, where they can be read at once."""
    if order.device.type != "cpu" or not order.numel() or not is_eager(order):
        return
    least, most = map(int, order.aminmax())
    if least < 0 or most >= rows.num_rows:
        raise ValueError(
            f"order has the number {least if least < 0 else most}; accepted are the rows of the "
            f"batch, from 0 to {rows.num_rows - 1}"
        )
    for number, part in enumerate(order.split(list(rows.counts))):
        if rows.starts[number] < 0 and len(part) and int(times := part.bincount().max()) > 1:
            raise ValueError(
                f"order has a row {int(times)} times for adapter {number}; accepted is once"
            )


def _check_number(name: str, value: object) -> None:
    """Refuse what is no number of Python's or NumPy's; a tensor's gradient would be lost."""
    if type(value) is not float and not isinstance(value, numbers.Real | torch.SymFloat):
        of_tensor = "; multiply up by it" if isinstance(value, torch.Tensor) else ""
        raise TypeError(f"{name} is a {type(value).__name__}; accepted are numbers{of_tensor}")


def _to_integers(assignment: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return an assignment as a tensor of integers."""
    try:
        numbers = torch.as_tensor(assignment, device=getattr(assignment, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"assignment is {assignment!r}; accepted are integers") from error
    if numbers.dtype == torch.bool or numbers.is_floating_point() or numbers.is_complex():
        if not isinstance(assignment, torch.Tensor) and not numbers.numel():
            return numbers.to(torch.int64)  # an empty list
        raise TypeError(f"assignment has the dtype {numbers.dtype}; accepted are integers")
    return numbers


def _start_of_run(rows: torch.Tensor) -> int:
    """Return the first of ascending numbers if they follow each other; else -1."""
    if not len(rows):
        return 0
    first, last = int(rows[0]), int(rows[-1])
    return first if last - first + 1 == len(rows) else -1
