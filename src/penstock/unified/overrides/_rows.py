"""Overrides of PyTorch's functions on whole rows, and the writes that they share with others."""

from __future__ import annotations

from typing import Any

import torch

from penstock.compat.dispatch import functions
from penstock.unified._devices import GPU
from penstock.unified._tensor import FileTensor, UnifiedTensor
from penstock.unified.overrides.gather import check_index, gather
from penstock.unified.overrides.registry import Operation, implements, run

# Not `torch.index_select`, which PyTorch Geometric replaces with a function of its own that calls
# this one: imported after it, we would not see the calls.
_INDEX_SELECT: Operation = functions.index_select


@implements(
    _INDEX_SELECT,
    torch.Tensor.index_select,
    shown=("torch.index_select(u, 0, index)", "u.index_select(0, index)"),
    result="rows, copied by Penstock; sparse gradient",
)
def _index_select(
    func: Operation, input: Any, dim: int, index: Any, *, out: torch.Tensor | None = None
) -> Any:
    if isinstance(input, UnifiedTensor) and dim in (0, -input.dim()) and index.dim() <= 1:
        if out is not None and not torch.is_grad_enabled():
            out.resize_((index.numel(), *input.shape[1:]))
        return gather(input, index.reshape(-1), out=out)
    return run(func, input, dim, index, **({} if out is None else {"out": out}))


@implements(
    torch.Tensor.index_copy_,
    shown=("u.index_copy_(0, index, rows)",),
    result="rows written in place; of several for one row the last one stays",
)
def _index_copy(func: Operation, input: Any, dim: int, index: Any, source: Any) -> Any:
    if _writes_whole_rows(input, dim, index, source):
        return write_rows(input, index, source, negative=False)
    return run(func, input, dim, index, source)


@implements(
    torch.Tensor.index_add_,
    shown=("u.index_add_(0, index, rows)",),
    result="rows added in place, in the order of `index`",
)
def _index_add(
    func: Operation, input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1
) -> Any:
    if _writes_whole_rows(input, dim, index, source):
        rows = _materialise(input, source)
        input._table.write_rows(check_index(index).reshape(-1), rows, alpha=alpha, negative=False)
        return _count_version(input)
    return run(func, input, dim, index, source, alpha=alpha)


def is_readable_by_torch(table: UnifiedTensor) -> bool:
    """Return whether the table is in memory, and gets no gradient."""
    recorded = torch.is_grad_enabled() and table.requires_grad
    return not recorded and not isinstance(table, FileTensor)


def is_plain_write(table: Any, source: Any) -> bool:
    """Return whether no gradient is recorded of a write: else PyTorch writes, or raises."""
    if not isinstance(table, UnifiedTensor) or not isinstance(source, torch.Tensor):
        return False
    if source.device.type not in ("cpu", GPU) or source.layout != torch.strided:
        return False
    return not (torch.is_grad_enabled() and (table.requires_grad or source.requires_grad))


def _writes_whole_rows(table: Any, dim: int, index: torch.Tensor, source: Any) -> bool:
    """Return whether rows are written whole; PyTorch refuses a wrong shape or dtype."""
    if not is_plain_write(table, source) or dim not in (0, -table.dim()) or index.dim() != 1:
        return False
    shape = (index.numel(), *table.shape[1:])
    if source.dtype == table.dtype and source.shape == shape:
        return True
    if isinstance(table, FileTensor):  # without memory, PyTorch would not get as far
        raise ValueError(
            f"source: expected {table.dtype} of shape {shape}, by the index and the table, got "
            f"{source.dtype} of shape {tuple(source.shape)}"
        )
    return False


def write_rows(
    table: UnifiedTensor, index: torch.Tensor, rows: torch.Tensor, *, negative: bool
) -> UnifiedTensor:
    """Write rows of a table, and count its version; returns the table."""
    rows = _materialise(table, rows.reshape(index.numel(), *table.shape[1:]))
    check_index(index)
    table._table.write_rows(index.reshape(-1), rows, negative=negative)
    return _count_version(table)


def _materialise(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows as bytes to copy: contiguous, conjugated in fact, not in the table."""
    rows = rows.contiguous().resolve_conj().resolve_neg()
    return rows.clone() if table._table.contains(rows) else rows


def _count_version(table: Any) -> Any:
    if isinstance(table, FileTensor):  # tables in memory count their versions themselves
        torch.autograd.graph.increment_version(table)
    return table
