"""Overrides of `u[key]` and `u[key] = value`: the rows that a key chooses, and parts of them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

from penstock.unified._tensor import FileTensor, UnifiedTensor
from penstock.unified.file.table import FileTable
from penstock.unified.file.writer import change_lock
from penstock.unified.overrides._row_copy import RowCopy
from penstock.unified.overrides._rows import is_plain_write, is_readable_by_torch, write_rows
from penstock.unified.overrides.gather import INTEGERS, check_index, gather, refuse_fake
from penstock.unified.overrides.registry import Operation, implements, run, whole_table_error

Rows = int | slice | torch.Tensor
_VIEWS = (int, slice, tuple)  # keys whose results PyTorch makes as fast, or without a copy
_INDEX_DTYPES = INTEGERS - {torch.uint8}  # of which tensors are PyTorch's masks of old
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


@implements(torch.Tensor.__getitem__)
def _getitem(func: Operation, table: Any, key: Any) -> Any:
    if not isinstance(table, UnifiedTensor):
        return run(func, table, key)
    if isinstance(key, torch.Tensor) and key.dtype in _INDEX_DTYPES and key.dim():
        return gather(table, key, negative=True)
    if isinstance(key, _VIEWS) and is_readable_by_torch(table):
        return run(func, table, key)
    chosen = _split_key(table.shape[0], key)
    if chosen is None and isinstance(table, FileTensor) and (error := _key_error(table, key)):
        raise error
    if chosen is None or (is_readable_by_torch(table) and not _are_whole_rows(*chosen)):
        return run(func, table, key)
    rows, rest = chosen
    if isinstance(rows, slice) and _are_all(rows, len(table)):
        if not isinstance(table, FileTensor):
            return run(func, table, key)
        raise whole_table_error(table, "a slice of all rows", "gather those that are needed")
    if isinstance(rows, torch.Tensor):
        found = gather(table, rows, negative=True)
        return found[_key_within(rows, rest)] if rest else found
    recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    # Tensors of the inference mode have no versions, by which a `RowCopy` sees that it is changed.
    with torch.inference_mode(mode=False), torch.set_grad_enabled(recorded):
        found = gather(table, _row_numbers(len(table), rows), negative=True)
        found = found[_key_within(rows, rest)] if rest or isinstance(rows, int) else found
        return found.as_subclass(RowCopy)


@implements(torch.Tensor.__setitem__)
def _setitem(func: Operation, table: Any, key: Any, value: Any) -> None:
    chosen = _split_key(table.shape[0], key) if isinstance(table, UnifiedTensor) else None
    if isinstance(table, FileTensor) and chosen is not None:
        _write_to_file(table, *chosen, value)
        return
    if isinstance(table, FileTensor) and (error := _key_error(table, key)):
        raise error
    is_plain = isinstance(value, torch.Tensor) and is_plain_write(table, value)
    if chosen is None or not is_plain or not _are_whole_rows(*chosen):
        run(func, table, key, value)
        return
    index = _row_numbers(len(table), chosen[0])
    _check_cast(table, value)
    extra = value.dim() - index.dim() - table.dim() + 1
    if extra > 0 and value.shape[:extra].numel() == 1:  # as PyTorch: a batch of one is no batch
        value = value.flatten(0, extra)
    rows = value.to(table.dtype).expand(*index.shape, *table.shape[1:])
    write_rows(table, index, rows, negative=True)


def _write_to_file(table: FileTensor, rows: Rows, rest: tuple[Any, ...], value: Any) -> None:
    """Write `table[rows, *rest] = value`; rows that keep a part are read first."""
    if isinstance(rows, torch.Tensor):
        _check_cast(table, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
    value = torch.as_tensor(value, dtype=table.dtype, device=getattr(value, "device", "cpu"))
    if not is_plain_write(table, value):
        raise RuntimeError(
            "u[...] = value records no gradient, but the table or the value requires one: write "
            "under torch.no_grad()"
        )
    if isinstance(rows, slice) and _are_all(rows, len(table)):
        raise whole_table_error(table, "writing all rows at once", "write them in blocks")
    index, file = _row_numbers(len(table), rows).cpu(), table._table
    assert isinstance(file, FileTable)
    with torch.no_grad(), change_lock():
        content = torch.empty((*index.shape, *table.shape[1:]), dtype=table.dtype, device="cpu")
        refuse_fake(index, content)
        if rest:
            file.read_rows(index, content, negative=True)
        content[_key_within(rows, rest)] = value
        write_rows(table, index, content, negative=True)


def _check_cast(table: UnifiedTensor, value: Any) -> None:
    """Refuse a tensor of which the table's dtype would keep a part, as PyTorch does."""
    if isinstance(value, torch.Tensor) and not torch.can_cast(value.dtype, table.dtype):
        raise TypeError(
            f"u[rows] = value: the table has {table.dtype}, which does not hold {value.dtype}; "
            f"convert it first: value.to({table.dtype})"
        )


def _are_whole_rows(rows: Rows, rest: tuple[Any, ...]) -> bool:
    """Return whether Penstock copies the rows although PyTorch could: whole, in any order."""
    return isinstance(rows, torch.Tensor) and not rest


def _are_all(rows: slice, num_rows: int) -> bool:
    return len(range(*rows.indices(num_rows))) == num_rows > 0


def _split_key(num_rows: int, key: Any) -> tuple[Rows, tuple[Any, ...]] | None:
    """Return the rows that `key` chooses, and the key within each of them.

    Rows are an int, a slice, or a tensor of integers. None if `key` does not choose rows first, or
    chooses among what they hold by more than numbers, slices, None and `...`.
    """
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    rest = tuple(_to_number(each) if _is_number(each) else each for each in rest)
    if not all(type(each) in (int, slice, types.NoneType, types.EllipsisType) for each in rest):
        return None
    rows = _choose_rows(num_rows, first)
    return None if rows is None else (rows, rest)


def _key_error(table: FileTensor, key: Any) -> IndexError | None:
    """Return the error of a key by which tables in files do not choose rows.

    None if the key is for all rows: then that is the error.
    """
    parts = key if isinstance(key, tuple) else (key,)
    first = parts[0] if parts else None
    if isinstance(first, slice):
        chosen = (first.step is None or first.step > 0) and not _are_all(first, len(table))
    else:
        chosen = isinstance(first, list | tuple | torch.Tensor | np.ndarray | int)
    if not chosen:
        return None
    names = [
        f"{type(each).__name__} of {each.dtype}, {each.ndim}-dimensional"
        if isinstance(each, torch.Tensor | np.ndarray)
        else repr(each)[:40]
        for each in parts
    ]
    return IndexError(
        f"u[{', '.join(names)}]: rows of a table in a file are chosen first, by a number, a slice "
        "with a step above 0, a list of numbers, a mask of one dimension or a tensor of integers, "
        "then parts of them by numbers, slices, None and `...`. Gather the rows and index them: "
        "u[rows][...]; give nested lists as a tensor"
    )


def _choose_rows(num_rows: int, first: Any) -> Rows | None:
    if isinstance(first, slice):
        return first if first.step is None or int(first.step) > 0 else None
    if _is_number(first):
        return _to_number(first)
    if isinstance(first, list | range):
        first = _list_to_tensor(first)
    elif isinstance(first, np.ndarray):
        native = first.astype(first.dtype.newbyteorder("="), copy=False)
        first = torch.from_numpy(native) if first.dtype.kind in "iub" else None
    if not isinstance(first, torch.Tensor):
        return None
    if first.dtype in _WIDE_UNSIGNED:  # gathers take none of them
        first = first.long()
    if first.dim() == 0:
        return _to_number(first) if _is_number(first) else None
    if first.dtype in (torch.bool, torch.uint8):  # bytes are PyTorch's masks of old
        if first.dim() > 1:
            return None
        if len(first) != num_rows:
            raise IndexError(
                f"the mask has {len(first)} entries, but the table has {num_rows} rows"
            )
        return first.nonzero().flatten()
    return first if first.dtype in INTEGERS else None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype in _INDEX_DTYPES and value.is_cpu
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _to_number(value: Any) -> int:
    return int(check_index(value) if isinstance(value, torch.Tensor) else value)


def _list_to_tensor(values: list[Any] | range) -> torch.Tensor | None:
    """Return row numbers or a mask; None for what PyTorch takes for a tuple, and for a mixture."""
    if all(_is_number(each) and not isinstance(each, torch.Tensor) for each in values):
        return torch.tensor(values, dtype=torch.int64, device="cpu")
    if all(isinstance(each, bool | np.bool_) for each in values):
        return torch.tensor(values, dtype=torch.bool, device="cpu")
    return None


def _row_numbers(num_rows: int, rows: Rows) -> torch.Tensor:
    """Return the rows as a tensor of integers; those of a slice in its order."""
    if isinstance(rows, int):
        return torch.tensor([rows], device="cpu")
    if isinstance(rows, slice):
        chosen = range(*rows.indices(num_rows))
        return torch.arange(chosen.start, max(chosen.start, chosen.stop), chosen.step, device="cpu")
    return rows


def _key_within(rows: Rows, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of `rest` in gathered rows, behind the dimensions that `rows` has."""
    if isinstance(rows, int):
        return (0, *rest)
    return (slice(None),) * (rows.dim() if isinstance(rows, torch.Tensor) else 1) + rest
