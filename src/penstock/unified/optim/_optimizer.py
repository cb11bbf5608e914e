"""The base of optimizers of tables: rows that have a gradient, and the state of the optimizer."""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch

from penstock.errors import StoreError
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._unify import empty, unify
from penstock.unified.file.layout import split_source
from penstock.unified.file.table import FileTable, HostTable, write_file, write_tables
from penstock.unified.file.writer import change_lock, without_gradients
from penstock.unified.optim._updates import RowGroups, RowStep, group_rows, state_dtype, update_rows

logger = logging.getLogger(__name__)

_STEP = "step"  # as torch's optimizers call it in their state
# Behind the step count of a table in a file: rows that the last step changed, each with its number
# and the CRC-32 of its bytes plus one (0: none). Data that was made anew has none of them.
_NUM_WITNESSES = 8
_STEP_SHAPE = (1 + 2 * _NUM_WITNESSES,)
_NOT_NEGATIVE = (
    *("lr", "weight_decay", "eps", "lr_decay", "momentum"),
    "initial_accumulator_value",
)
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.complex128),
)
_CPU = "cpu"  # on which steps are made, and so state is gathered


class RowOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer of tables: each row that has a gradient is changed once, in place."""

    @abc.abstractmethod
    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of a table's state, in the order in which the step takes it."""

    _step_class: ClassVar[type[RowStep]]

    def _make_step(self, group: dict[str, Any], count: int) -> RowStep:
        """Return the `count`-th step of a table with the options of `group`."""
        names = {each.name for each in dataclasses.fields(self._step_class)} - {"count"}
        options = {name: group[name] for name in names}
        for name in ("lr", "weight_decay"):  # which may be tensors
            options[name] = float(options[name])
        return self._step_class(count=count, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables with options of their own; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError: One of them is no table of Penstock's.
            ValueError: An option makes no sense.
        """
        self._check_options({**self.defaults, **param_group})
        tables = param_group["params"]
        tables = [tables] if isinstance(tables, torch.Tensor) else list(tables)
        for entry in tables:
            table = entry[1] if isinstance(entry, tuple) else entry  # (name, table)
            if not isinstance(table, UnifiedTensor):
                raise TypeError(
                    f"params: expected tables made by penstock.unify, got "
                    f"{type(table).__name__}; give other parameters to torch.optim"
                )
            if table.dtype not in _DTYPES:
                raise TypeError(
                    f"params: a table has {table.dtype}, of which no step is made; expected one of "
                    f"{', '.join(map(str, _DTYPES))}"
                )
        super().add_param_group({**param_group, "params": tables})

    def _check_options(self, options: dict[str, Any]) -> None:
        """Refuse options of a group that make no sense."""
        for name in _NOT_NEGATIVE:
            value = options.get(name, 0)
            try:
                is_right = float(value) >= 0
            except (TypeError, ValueError, RuntimeError):
                is_right = False
            if not is_right:
                raise ValueError(f"{name}={value}: expected a number that is not negative")

    @without_gradients
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows that have a gradient.

        Args:
            closure: Function that computes the loss again, as for any `torch.optim.Optimizer`.

        Returns:
            The result of `closure`; None without it.

        Raises:
            TypeError: A gradient is dense: the table was used as a whole, not row by row.
            StoreError: Rows of a table in a file could not be read or written. A note of it says
                how many tables, in the order of the groups, had made the step before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [
            (table, group)
            for group in self.param_groups
            for table in group["params"]
            if table.grad is not None
        ]
        for table, _ in parts:  # before any of them is changed
            _check_gradient(table)
        for number, (table, group) in enumerate(parts):
            try:
                self._step_table(table, group)
            except StoreError as error:
                if number:
                    error.add_note(
                        f"The first {number} of {len(parts)} tables with a gradient had made this "
                        "step before: set their grad to None before another attempt."
                    )
                raise
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that `state_dict()` returned, as any `torch.optim.Optimizer` does.

        The state of a table in memory is saved with its rows. That of a table in a file is saved as
        the names of its files, and loaded with the rows that they have by now.
        """
        # PyTorch would convert all state to the table's dtype, but narrow tables have theirs in
        # float32: the state is set by hand.
        kept = {
            number: {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
            for number, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [each for group in state_dict["param_groups"] for each in group["params"]]
        tables = [each for group in self.param_groups for each in group["params"]]
        for number, table in zip(numbers, tables, strict=True):
            if number in kept:
                self.state[table] = {
                    name: _check_state(table, name, each) for name, each in kept[number].items()
                }

    def _step_table(self, table: UnifiedTensor, group: dict[str, Any]) -> None:
        index, gradients = _read_gradient(table)
        groups = group_rows(index, table.shape[0])
        names = self._state_names(group)
        state = self.state[table] if names else {}
        if names and not all(name in state for name in (*names, _STEP)):
            self._make_state(table, names, group)
        tables = [table, *(state[name] for name in names)]
        count = state.get(_STEP)
        if isinstance(table._table, FileTable):
            self._step_file(tables, count, groups, gradients, group)
            return
        number = 1
        if count is not None:
            count += 1
            number = int(count)
        with ExitStack() as held:
            rows: list[torch.Tensor] = []
            for each in tables:
                assert isinstance(each._table, HostTable)
                rows.append(held.enter_context(each._table.write_access(groups.rows)))
            update_rows(self._make_step(group, number), groups, gradients, rows[0], rows[1:])

    def _step_file(
        self,
        tables: list[UnifiedTensor],
        count: UnifiedTensor | None,
        groups: RowGroups,
        gradients: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Read the rows and their state, change them, and write all of it or nothing."""
        with change_lock():
            content = [_read_rows(each, groups.rows) for each in tables]
            counted = None if count is None else _read_all(count)
            number = 1 if counted is None else 1 + int(counted[0])
            before = content[0][:: _witness_stride(groups.rows)].clone()
            step = self._make_step(group, number)
            update_rows(step, groups, gradients, content[0], content[1:], gathered=True)
            parts: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
                (each._table, groups.rows, new) for each, new in zip(tables, content, strict=True)
            ]
            if count is not None and counted is not None:
                counted[0] = number
                _record_witnesses(counted, groups.rows, before, content[0])
                parts.append((count._table, torch.arange(len(count), device="cpu"), counted))
            write_tables(parts)
        for each in tables:
            torch.autograd.graph.increment_version(each)

    def _make_state(
        self, table: UnifiedTensor, names: tuple[str, ...], group: dict[str, Any]
    ) -> None:
        """Make state beside the table; that in files may be there from an earlier run."""
        state = self.state[table]
        first = float(group.get("initial_accumulator_value", 0))
        dtype = state_dtype(table.dtype)
        if isinstance(table._table, FileTable):
            file, key = split_source(table._table.source)
            prefix = f"{file}.{key}." if key else f"{file}."
            missing = [name for name in names if not os.path.exists(prefix + name)]
            if missing and os.path.exists(prefix + _STEP):
                raise StoreError(
                    f"{prefix}{_STEP} is there, but {prefix}{missing[0]} is not: a part of an "
                    "optimizer's state is lost. Restore it, or delete the rest of it to begin "
                    "anew.",
                    path=prefix + missing[0],
                )
            for name in names:
                new = _open_state(prefix + name, tuple(table.shape), dtype, first)
                state[name] = _check_state(table, name, new)
            # Made last: if it exists, all the others do.
            state[_STEP] = _open_state(prefix + _STEP, _STEP_SHAPE, torch.float64, 0.0)
            try:
                _check_witnesses(table, state[_STEP], prefix, names)
            except StoreError:
                del self.state[table]  # or the next step would find it
                raise
            return
        for name in names:
            if name not in state:
                state[name] = empty(table.shape, dtype, device=_CPU)
                if first:
                    state[name].cpu().fill_(first)
        state.setdefault(_STEP, torch.tensor(0.0, dtype=torch.float32, device="cpu"))


def _witness_stride(rows: torch.Tensor) -> int:
    """Return the stride at which at most `_NUM_WITNESSES` of a batch's rows are taken."""
    return max(1, -(-len(rows) // _NUM_WITNESSES))


def _record_witnesses(
    counted: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, content: torch.Tensor
) -> None:
    """Record rows that a step has changed behind its count; if none has, earlier ones stay."""
    stride = _witness_stride(rows)
    found = [
        (float(row), zlib.crc32(_to_bytes(new)) + 1.0)
        for row, old, new in zip(rows[::stride].tolist(), before, content[::stride], strict=True)
        if _to_bytes(old) != _to_bytes(new)
    ]
    if found:
        counted[1:] = 0
        counted[1 : 1 + 2 * len(found)] = torch.tensor(
            found, dtype=counted.dtype, device="cpu"
        ).flatten()


def _check_witnesses(
    table: UnifiedTensor, count: UnifiedTensor, prefix: str, names: tuple[str, ...]
) -> None:
    """Raise unless the state was written with this table, not with an older one of its name."""
    if tuple(count.shape) != _STEP_SHAPE:
        problem = "is of another version"
    else:
        counted = _read_all(count)
        pairs = [(int(row), int(sum_)) for row, sum_ in counted[1:].view(-1, 2).tolist() if sum_]
        rows = [row for row, _ in pairs]
        if not pairs:
            return
        if max(rows) < len(table):
            content = _read_rows(table, torch.tensor(rows, device="cpu"))
            if any(
                zlib.crc32(_to_bytes(row)) + 1 == sum_
                for row, (_, sum_) in zip(content, pairs, strict=True)
            ):
                return
        problem = "is not of the table as it is now: of the rows that its last step wrote none is"
    files = ", ".join(prefix + name for name in (*names, _STEP))
    raise StoreError(
        f"the optimizer's state beside {prefix[:-1]} {problem}. If the table was made anew, delete "
        f"{files}; if its rows were changed by other means, load the state with "
        "load_state_dict().",
        path=prefix + _STEP,
    )


def _to_bytes(row: torch.Tensor) -> bytes:
    return row.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _check_gradient(table: UnifiedTensor) -> torch.Tensor:
    """Return a table's gradient, if it is one of rows."""
    gradient = table.grad
    assert gradient is not None
    if gradient.layout != torch.sparse_coo:
        raise TypeError(
            f"{table!r} has a dense gradient, because it was used as a whole. Use it row by "
            "row, or update it with an optimizer of torch.optim."
        )
    if gradient.sparse_dim() != 1:
        raise TypeError(
            f"{table!r} has a gradient with {gradient.sparse_dim()} sparse dimensions; expected "
            "one, that of the rows: tensor.to_sparse(1)"
        )
    return gradient


def _read_gradient(table: UnifiedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and rows of a table's gradient, on the CPU; a row may occur several times."""
    gradient = _check_gradient(table)
    return gradient._indices()[0].cpu(), gradient._values().detach().cpu()


def _read_rows(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype, device="cpu")
    table._table.read_rows(rows, out, negative=False)
    return out


def _read_all(count: UnifiedTensor) -> torch.Tensor:
    """Return a step count in a file, with its witnesses."""
    return _read_rows(count, torch.arange(len(count), device="cpu"))


def _check_state(table: UnifiedTensor, name: str, state: torch.Tensor) -> torch.Tensor:
    """Return state that fits the table; plain tensors, such as torch.optim saves, are copied."""
    if name == _STEP:  # in memory it is counted up in place
        return state if isinstance(state, UnifiedTensor) else state.detach().clone()
    dtype = state_dtype(table.dtype)
    if state.shape != table.shape or state.dtype != dtype:
        raise ValueError(
            f"the state {name!r} has shape {tuple(state.shape)} and {state.dtype}, but its table "
            f"needs {tuple(table.shape)} and {dtype}: it is the state of another table"
        )
    in_file = isinstance(table._table, FileTable)
    if not isinstance(state, UnifiedTensor) and not in_file:
        return unify(state, device=_CPU)
    if not isinstance(state, UnifiedTensor) or isinstance(state._table, FileTable) != in_file:
        raise ValueError(
            f"the state {name!r} and its table do not both lie in memory, or both in files; load "
            "the state of such a table"
        )
    return state


def _open_state(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, first: float
) -> UnifiedTensor:
    """Open the state in a file, which is made if it is not there."""
    if os.path.exists(path):
        logger.info("%s: the state of an earlier run is taken up again", path)
        return unify(path, device=_CPU)
    if not first:
        return empty(shape, dtype, path=path, device=_CPU)
    write_file(path, shape, dtype, lambda index, out: out.fill_(first))
    return unify(path, device=_CPU)
