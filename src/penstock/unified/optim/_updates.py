"""Optimizer steps on rows: gradients grouped by row, each row and its state changed once, in place.

`row_updates.cpp` makes them, built at first use; without a compiler torch does. Which of the two is
chosen once per process, and logged. Their results are the same bit by bit where torch's kernels
have fused multiply-add (AVX2, AVX512), but for square roots: those of C++ are rounded right, those
of torch come from MKL, which is one unit in the last place off now and then.

For numbers of 16 bits gradients are added up in float, the state is kept in float, and the row is
rounded once, when it is stored.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from penstock.codegen import THREADS, load_optional_library
from penstock.errors import CapacityError
from penstock.unified._row_index import index_error, resolve_index

_SOURCES = [THREADS, Path(__file__).with_name("row_updates.cpp")]
# Without -fno-math-errno a square root is a call, not an instruction.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_Update = ctypes.c_int64 * 16  # the struct of `row_updates.cpp`
_SINGLE_THREAD_BYTES = 64 * 1024  # fewer bytes are updated before a second thread is awake


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """The positions of a batch, grouped by row."""

    rows: torch.Tensor
    """Unique rows, rising; int64 (n,)."""
    starts: torch.Tensor
    """Place in `order` at which the positions of each row begin, and their end; int64 (n + 1,)."""
    order: torch.Tensor
    """Positions, rising within a row; int64."""


def backend() -> str:
    """Return what updates rows in this process: "cpp" or "torch"."""
    return "torch" if _library() is None else "cpp"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a table's state."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def group_rows(index: torch.Tensor, num_rows: int) -> RowGroups:
    """Group the positions of an index by row.

    Args:
        index: On the CPU, int64 (n,), from 0 to num_rows - 1; in any order, with duplicates.
        num_rows: Rows of the table.

    Raises:
        IndexError: An index is out of range; the message names it.
    """
    index = index.contiguous()
    library = _library()
    bits = num_rows.bit_length() + len(index).bit_length()
    if library is None or bits > 64:  # C++ sorts a row and a position as one number
        values, order = resolve_index(index, num_rows, negative=False).sort(stable=True)
        rows, counts = values.unique_consecutive(return_counts=True)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(counts, 0, out=starts[1:])
        return RowGroups(rows, starts, order)
    rows, order = torch.empty_like(index), torch.empty_like(index)
    starts = torch.empty(len(index) + 1, dtype=torch.int64, device="cpu")
    count = library.penstock_group_rows(
        *(index.data_ptr(), len(index), num_rows),
        *(rows.data_ptr(), starts.data_ptr(), order.data_ptr()),
    )
    if count < 0:
        raise index_error(index, -1 - count, num_rows)
    return RowGroups(rows[:count], starts[: count + 1], order)


def update_rows(
    step: RowStep,
    groups: RowGroups,
    gradients: torch.Tensor,
    table: torch.Tensor,
    states: list[torch.Tensor],
    *,
    gathered: bool = False,
) -> None:
    """Make a step on the rows of `groups`, in place.

    Args:
        step: Step of an optimizer.
        groups: Rows, and the positions of their gradients.
        gradients: On the CPU, shape (number of positions, *row), of the table's dtype.
        table: On the CPU, shape (num_rows, *row), contiguous.
        states: On the CPU, contiguous, of the table's shape, of `state_dtype`.
        gathered: Whether row k of the table and of its states is the k-th of `groups`, as those of
            a table in a file are.
    """
    if table.is_complex():
        table, gradients = torch.view_as_real(table), torch.view_as_real(gradients.resolve_conj())
        states = [torch.view_as_real(each) for each in states]
    if not table.numel() or not len(groups.rows):
        return
    gradients = gradients.resolve_neg().reshape(gradients.shape[0], -1)
    if gradients.stride(1) != 1:
        gradients = gradients.contiguous()
    tables = [each.view(each.shape[0], -1) for each in (table, *states)]
    for each in tables[1:]:  # C++ gets only their addresses
        assert each.shape == tables[0].shape and each.dtype == state_dtype(table.dtype)
    assert gradients.dtype == table.dtype and gradients.shape[1] == tables[0].shape[1]
    library = _library()
    if library is None or (table.dtype == torch.float16 and not library.penstock_has_half()):
        return _update_in_torch(step, groups, gradients, tables, gathered)
    update = _make_struct(step, groups, gradients, tables, gathered)
    numbers = step.numbers()
    values = (ctypes.c_double * len(numbers))(*numbers)
    if getattr(library, step.function)(update, values):
        raise CapacityError("there is not enough memory to add up the gradients of a row")


def _make_struct(
    step: RowStep,
    groups: RowGroups,
    gradients: torch.Tensor,
    tables: list[torch.Tensor],
    gathered: bool,
) -> ctypes.Array[ctypes.c_int64]:
    table, *states = tables
    width = table.shape[1]
    num_bytes = len(groups.rows) * width * table.element_size()
    return _Update(
        _KINDS[table.dtype],
        len(states),
        step.maximize,
        1 if num_bytes < _SINGLE_THREAD_BYTES else torch.get_num_threads(),
        width,
        len(groups.rows),
        len(groups.order),
        0 if gathered else groups.rows.data_ptr(),
        groups.starts.data_ptr(),
        groups.order.data_ptr(),
        gradients.data_ptr(),
        gradients.stride(0) * gradients.element_size(),
        *(each.data_ptr() for each in tables),
    )


def _update_in_torch(
    step: RowStep,
    groups: RowGroups,
    gradients: torch.Tensor,
    tables: list[torch.Tensor],
    gathered: bool,
) -> None:
    wide = state_dtype(gradients.dtype)
    first, later = groups.starts[:-1], torch.ones(len(groups.order), dtype=torch.bool, device="cpu")
    later[first] = False
    sums = gradients[groups.order[first]].to(wide)
    of_position = torch.repeat_interleave(groups.starts.diff())
    sums.index_add_(0, of_position[later], gradients[groups.order[later]].to(wide))
    rows = [each if gathered else each.index_select(0, groups.rows) for each in tables]
    changed = rows[0].to(wide)
    step.run_in_torch(changed, sums, rows[1:])
    rows[0].copy_(changed)
    if not gathered:
        for each, content in zip(tables, rows, strict=True):
            each.index_copy_(0, groups.rows, content)


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    group = [pointer, count, count, pointer, pointer, pointer]
    step = (ctypes.c_int32, [pointer, pointer])
    return load_optional_library(
        "row_updates",
        _SOURCES,
        flags=_FLAGS,
        functions={
            "penstock_group_rows": (count, group),
            "penstock_sgd": step,
            "penstock_adagrad": step,
            "penstock_adam": step,
        },
        work="rows are updated",
        otherwise="by torch",
    )


# --------------------------------------------------------------------------- steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStep(abc.ABC):
    """One step of an optimizer."""

    function: ClassVar[str]
    """Name of the step in the library."""

    lr: float
    weight_decay: float
    maximize: bool
    count: int
    """Number of steps of the table, this one included."""

    @abc.abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the step's constructor in C++ reads, in its order."""

    @abc.abstractmethod
    def run_in_torch(self, rows: Tensor, gradients: Tensor, states: list[Tensor]) -> None:
        """Change `rows` and `states` in place; all of the same shape and dtype."""

    def _options(self) -> dict[str, Any]:
        """Return the keywords of torch's function, which have the names of the fields."""
        options = {**dataclasses.asdict(self), "foreach": False}
        del options["count"]
        return options

    def _steps_before(self) -> list[Tensor]:
        """Return the counts that torch's functions increase."""
        return [torch.tensor(float(self.count - 1), dtype=torch.float64, device="cpu")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdStep(RowStep):
    """A step of `penstock.unified.optim.SGD`; with momentum, `states` are its velocities."""

    function = "penstock_sgd"
    momentum: float
    dampening: float
    nesterov: bool

    def numbers(self) -> tuple[float, ...]:
        is_first = self.count == 1
        numbers = self.lr, self.weight_decay, self.momentum, self.dampening
        return *numbers, is_first, self.nesterov

    def run_in_torch(self, rows: Tensor, gradients: Tensor, states: list[Tensor]) -> None:
        # In the first step the velocity is the gradient itself, undampened.
        is_first = self.count == 1
        velocities: list[Tensor | None] = [None if is_first or not states else states[0]]
        sgd([rows], [gradients], velocities, **self._options())
        if states and velocities[0] is not states[0]:
            assert velocities[0] is not None
            states[0].copy_(velocities[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdagradStep(RowStep):
    """A step of `penstock.unified.optim.Adagrad`; `states` are the sums of squares."""

    function = "penstock_adagrad"
    lr_decay: float
    eps: float

    def numbers(self) -> tuple[float, ...]:
        lr = self.lr / (1 + (self.count - 1) * self.lr_decay)
        return lr, self.weight_decay, self.eps

    def run_in_torch(self, rows: Tensor, gradients: Tensor, states: list[Tensor]) -> None:
        counts = self._steps_before()
        adagrad([rows], [gradients], states, counts, has_sparse_grad=False, **self._options())


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamStep(RowStep):
    """A step of `penstock.unified.optim.Adam`; `states` are both means, and the largest v."""

    function = "penstock_adam"
    betas: tuple[float, float]
    eps: float
    amsgrad: bool

    def numbers(self) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.count)
        correction = (1 - beta2**self.count) ** 0.5
        numbers = step_size, self.weight_decay, self.eps, 1 - beta1, beta2, 1 - beta2
        return *numbers, correction, self.amsgrad

    def run_in_torch(self, rows: Tensor, gradients: Tensor, states: list[Tensor]) -> None:
        options = self._options()
        beta1, beta2 = options.pop("betas")
        means, squares, largest, counts = states[:1], states[1:2], states[2:], self._steps_before()
        lists = [rows], [gradients], means, squares, largest, counts
        adam(*lists, beta1=beta1, beta2=beta2, **options)
