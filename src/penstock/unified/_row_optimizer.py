"""What the optimizers of tables share: which rows have a gradient, and where the state lies."""

from __future__ import annotations

import abc
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from penstock.errors import StoreError
from penstock.unified._row_file import split_source
from penstock.unified._row_steps import RowStep
from penstock.unified._row_updates import Groups, group_rows, state_dtype, update_rows
from penstock.unified._row_writer import changing, without_gradients
from penstock.unified._tables import FileTable, HostTable, write_together
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._unify import empty, unify

logger = logging.getLogger(__name__)

_COUNT = "step"  # as torch's optimizers call it in their state
# Behind the step count of a table in a file: rows that the last step changed, each with its number
# and the CRC-32 of its bytes plus one (0: none). Data that was made anew has none of them.
_NUM_WITNESSES = 8
_COUNT_SHAPE = (1 + 2 * _NUM_WITNESSES,)
_HERE = "cpu"  # where steps are made, and so where the state is gathered
_FILL_BYTES = 64 * 2**20  # of a new state in a file, written at a time


class RowOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer of tables: each row that has a gradient is changed once, in place."""

    def __init__(self, tables: Iterable[Any], defaults: dict[str, Any]) -> None:
        _check_not_negative(defaults)
        super().__init__(tables, defaults)

    @abc.abstractmethod
    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """What a table's state consists of, in the order in which the step takes it."""

    @abc.abstractmethod
    def _update(self, group: dict[str, Any], count: int) -> RowStep:
        """The `count`-th step of a table with the options of `group`."""

    def _first_value(self, group: dict[str, Any]) -> float:
        """Of the state."""
        return 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tables with options of their own; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError: one of them is no table of Penstock's.
            ValueError: an option makes no sense.
        """
        _check_not_negative(param_group)
        tables = param_group["params"]
        tables = [tables] if isinstance(tables, torch.Tensor) else list(tables)
        for entry in tables:
            table = entry[1] if isinstance(entry, tuple) else entry  # (name, table)
            if not isinstance(table, UnifiedTensor):
                raise TypeError(
                    f"params: expected tables made by penstock.unify, got "
                    f"{type(table).__name__}; give other parameters to torch.optim"
                )
        super().add_param_group({**param_group, "params": tables})

    @without_gradients
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows that have a gradient.

        Args:
            closure: computes the loss again, as for any `torch.optim.Optimizer`.

        Returns:
            What `closure` returned; None without it.

        Raises:
            TypeError: a gradient is dense: the table was used as a whole, not row by row.
            StoreError: rows of a table in a file could not be read or written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._step_table(table, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state that `state_dict()` gave, as any `torch.optim.Optimizer` does.

        The state of a table in memory comes with its rows. That of a table in a file comes by the
        names of its files, with what they hold by now.
        """
        # PyTorch would convert all state to the table's dtype, but narrow tables have theirs in
        # float: it goes past it, by hand.
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
                    name: _count(each) if name == _COUNT else _checked(table, name, each)
                    for name, each in kept[number].items()
                }

    def _step_table(self, table: UnifiedTensor, group: dict[str, Any]) -> None:
        index, gradients = _rows_of(table)
        groups = group_rows(index, table.shape[0])
        names = self._state_names(group)
        state = self.state[table] if names else {}
        if names and not all(name in state for name in (*names, _COUNT)):
            self._make_state(table, names, group)
        states = [state[name] for name in names]
        count = state[_COUNT] if names else None
        if isinstance(table._table, FileTable):
            self._step_file(table, states, count, groups, gradients, group)
            return
        number = 1
        if count is not None:
            count += 1
            number = int(count)
        tables = [table, *states]
        with ExitStack() as held:
            rows = [held.enter_context(_in_memory(each).writing(groups.rows)) for each in tables]
            update_rows(self._update(group, number), groups, gradients, rows[0], rows[1:])

    def _step_file(
        self,
        table: UnifiedTensor,
        states: list[UnifiedTensor],
        count: UnifiedTensor | None,
        groups: Groups,
        gradients: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Gather the rows and their state, change them, and write all of it or nothing."""
        tables = [table, *states]
        with changing():
            content = [_gathered(each, groups.rows) for each in tables]
            counted = None if count is None else _gathered(count, torch.arange(len(count)))
            number = 1 if counted is None else 1 + int(counted[0])
            before = content[0][:: _witness_stride(groups.rows)].clone()
            step = self._update(group, number)
            update_rows(step, groups, gradients, content[0], content[1:], gathered=True)
            parts = [
                (_in_file(each), groups.rows, new)
                for each, new in zip(tables, content, strict=True)
            ]
            if count is not None and counted is not None:
                counted[0] = number
                _call_witnesses(counted, groups.rows, before, content[0])
                parts.append((_in_file(count), torch.arange(len(count)), counted))
            write_together(parts)
        for each in tables:
            torch.autograd.graph.increment_version(each)

    def _make_state(
        self, table: UnifiedTensor, names: tuple[str, ...], group: dict[str, Any]
    ) -> None:
        """Tables beside the table; those in files may be there from an earlier run."""
        state = self.state[table]
        first, dtype = self._first_value(group), state_dtype(table.dtype)
        if isinstance(table._table, FileTable):
            prefix = state_prefix(table._table.source)
            _check_complete(prefix, names)
            for name in names:
                new = _state_file(prefix + name, tuple(table.shape), dtype, first)
                state[name] = _checked(table, name, new)
            # Made last: where it is, all the others are.
            state[_COUNT] = _state_file(prefix + _COUNT, _COUNT_SHAPE, torch.float64, 0.0)
            try:
                _check_witnesses(table, state[_COUNT], prefix, names)
            except StoreError:
                del self.state[table]  # or the next step would find it
                raise
            return
        for name in names:
            if name not in state:
                state[name] = empty(table.shape, dtype, device=_HERE)
                if first:
                    state[name].cpu().fill_(first)
        state.setdefault(_COUNT, torch.tensor(0.0))


def _witness_stride(rows: torch.Tensor) -> int:
    """So that at most `_NUM_WITNESSES` of a batch's rows are taken, spread over all of them."""
    return max(1, -(-len(rows) // _NUM_WITNESSES))


def _call_witnesses(
    counted: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, content: torch.Tensor
) -> None:
    """Note rows that a step has changed behind its count; none changed: those of earlier stay."""
    stride = _witness_stride(rows)
    found = [
        (float(row), zlib.crc32(_bytes_of(new)) + 1.0)
        for row, old, new in zip(rows[::stride].tolist(), before, content[::stride], strict=True)
        if _bytes_of(old) != _bytes_of(new)
    ]
    if found:
        counted[1:] = 0
        counted[1 : 1 + 2 * len(found)] = torch.tensor(found, dtype=counted.dtype).flatten()


def _check_witnesses(
    table: UnifiedTensor, count: UnifiedTensor, prefix: str, names: tuple[str, ...]
) -> None:
    """Raise unless the state was left with this table, not with one that it took the place of."""
    if tuple(count.shape) != _COUNT_SHAPE:
        problem = "is of another version"
    else:
        counted = _gathered(count, torch.arange(len(count)))
        pairs = [(int(row), int(sum_)) for row, sum_ in counted[1:].view(-1, 2).tolist() if sum_]
        rows = [row for row, _ in pairs]
        if not pairs:
            return
        if max(rows) < len(table):
            content = _gathered(table, torch.tensor(rows))
            if any(
                zlib.crc32(_bytes_of(row)) + 1 == sum_
                for row, (_, sum_) in zip(content, pairs, strict=True)
            ):
                return
        problem = "is not of the table as it is now: of the rows that its last step wrote none is"
    files = ", ".join(prefix + name for name in (*names, _COUNT))
    raise StoreError(
        f"the optimizer's state beside {prefix[:-1]} {problem}. If the table was made anew, delete "
        f"{files}; if its rows were changed by other means, hand the state over by "
        "load_state_dict().",
        path=prefix + _COUNT,
    )


def _bytes_of(row: torch.Tensor) -> bytes:
    return row.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state_prefix(source: str) -> str:
    """What the names of the files begin with that hold the state of a table in a file."""
    file, key = split_source(source)
    return f"{file}.{key}." if key else f"{file}."


def _rows_of(table: UnifiedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and rows of a table's gradient, on the CPU; a row may occur several times."""
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
    return gradient._indices()[0].cpu(), gradient._values().detach().cpu()


def _in_memory(table: UnifiedTensor) -> HostTable:
    assert isinstance(table._table, HostTable)
    return table._table


def _in_file(table: UnifiedTensor) -> FileTable:
    assert isinstance(table._table, FileTable)
    return table._table


def _gathered(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(rows), *table.shape[1:]), dtype=table.dtype)
    table._table.gather(rows, out, negative=False)
    return out


def _count(saved: torch.Tensor) -> torch.Tensor:
    """The step count; one in memory is counted up in place, and belongs to whoever saved it."""
    return saved if isinstance(saved, UnifiedTensor) else saved.detach().clone()


def _checked(table: UnifiedTensor, name: str, state: torch.Tensor) -> UnifiedTensor:
    """State that fits the table; plain tensors, such as torch.optim saves, are copied."""
    dtype = state_dtype(table.dtype)
    if state.shape != table.shape or state.dtype != dtype:
        raise ValueError(
            f"the state {name!r} has shape {tuple(state.shape)} and {state.dtype}, but its table "
            f"needs {tuple(table.shape)} and {dtype}: it is the state of another table"
        )
    in_file = isinstance(table._table, FileTable)
    if not isinstance(state, UnifiedTensor) and not in_file:
        return unify(state, device=_HERE)
    if not isinstance(state, UnifiedTensor) or isinstance(state._table, FileTable) != in_file:
        raise ValueError(
            f"the state {name!r} and its table do not both lie in memory, or both in files; load "
            "the state of such a table"
        )
    return state


def _check_complete(prefix: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not os.path.exists(prefix + name)]
    if missing and os.path.exists(prefix + _COUNT):
        raise StoreError(
            f"{prefix}{_COUNT} is there, but {prefix}{missing[0]} is not: a part of an optimizer's "
            "state is lost. Restore it, or delete the rest of it to begin anew.",
            path=prefix + missing[0],
        )


def _state_file(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, first: float
) -> UnifiedTensor:
    """The state in a file, which is made if it is not there."""
    if os.path.exists(path):
        logger.info("%s: the state of an earlier run is taken up again", path)
        return unify(path, device=_HERE)
    if not first:
        return empty(shape, dtype, path=path, device=_HERE)
    # Under another name until it is whole, because what is found is believed.
    unfinished = f"{path}.unfinished"
    if os.path.exists(unfinished):
        os.unlink(unfinished)
    table = empty(shape, dtype, path=unfinished, device=_HERE)
    row_bytes = max(1, table[:1].nbytes if len(table) > 1 else 1)
    num_rows = max(1, _FILL_BYTES // row_bytes)
    for start in range(0, shape[0], num_rows):
        index = torch.arange(start, min(start + num_rows, shape[0]))
        table[index] = torch.full((len(index), *shape[1:]), first, dtype=dtype)
    _in_file(table).close()
    os.rename(unfinished, path)
    return unify(path, device=_HERE)


def _check_not_negative(options: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps", "lr_decay", "momentum"):
        if not float(options.get(name, 0)) >= 0:
            raise ValueError(f"{name}={options[name]}: expected a number that is not negative")
