"""What stands between the brackets of `u[...]`: which rows it chooses, and what of them."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch

from penstock.unified._gather import INTEGERS

Rows = int | slice | torch.Tensor
_WIDE_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})


def split_key(num_rows: int, key: Any) -> tuple[Rows, tuple[Any, ...]] | None:
    """Which rows `key` chooses, and what it takes of each of them.

    Rows are an int, a slice, or a tensor of integers. None if `key` does not choose rows first, or
    chooses among what they hold by more than numbers, slices, None and `...`.
    """
    first, rest = (key[0], key[1:]) if isinstance(key, tuple) and key else (key, ())
    if not all(type(each) in (int, slice, types.NoneType, types.EllipsisType) for each in rest):
        return None
    rows = _rows(num_rows, first)
    return None if rows is None else (rows, rest)


def refused_key(key: Any) -> IndexError | None:
    """The error of a key that chooses rows in a way that tables in files do not know.

    None if it is for all rows: then that is what is wrong with it.
    """
    parts = key if isinstance(key, tuple) else (key,)
    chosen = isinstance(parts[0], list | torch.Tensor | np.ndarray | int) if parts else False
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


def _rows(num_rows: int, first: Any) -> Rows | None:
    if isinstance(first, slice):
        return first if first.step is None or int(first.step) > 0 else None
    if _is_number(first):
        return int(first)
    if isinstance(first, list | range):
        first = _from_list(first)
    elif isinstance(first, np.ndarray):
        first = _from_array(first)
    if not isinstance(first, torch.Tensor):
        return None
    if first.dim() == 0:
        return int(first) if first.dtype in INTEGERS and first.is_cpu else None
    if first.dtype in (torch.bool, torch.uint8):  # bytes are PyTorch's masks of old
        if first.dim() > 1:
            return None
        if len(first) != num_rows:
            raise IndexError(
                f"the mask has {len(first)} entries, but the table has {num_rows} rows"
            )
        return first.nonzero().flatten()
    if first.dtype in _WIDE_UNSIGNED:  # gathers take none of them
        return first.long()
    return first if first.dtype in INTEGERS else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _from_list(values: list[Any] | range) -> torch.Tensor | None:
    """Row numbers, or a mask; None for what PyTorch takes for a tuple, and for a mixture."""
    if all(_is_number(each) for each in values):
        return torch.tensor(values, dtype=torch.int64)
    if all(isinstance(each, bool | np.bool_) for each in values):
        return torch.tensor(values, dtype=torch.bool)
    return None


def _from_array(values: np.ndarray) -> torch.Tensor | None:
    if values.dtype.kind not in "iub":
        return None
    if values.dtype.kind == "u" and values.itemsize > 1:  # gathers take no wider ones
        values = values.astype(np.int64)
    return torch.from_numpy(values)


def row_numbers(num_rows: int, rows: Rows) -> torch.Tensor:
    """The rows as a tensor of integers; those of a slice in its order."""
    if isinstance(rows, int):
        return torch.tensor([rows])
    if isinstance(rows, slice):
        chosen = range(*rows.indices(num_rows))
        return torch.arange(chosen.start, max(chosen.start, chosen.stop), chosen.step)
    return rows


def within_rows(rows: Rows, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """`rest` for the gathered rows of a slice or of an index, whose dimensions come first."""
    return (slice(None),) * (rows.dim() if isinstance(rows, torch.Tensor) else 1) + rest
