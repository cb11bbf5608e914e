"""Overrides of PyTorch's functions on whole rows, and of its embeddings; writes of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from penstock.compat.dispatch import functions
from penstock.unified._devices import GPU
from penstock.unified._tensor import FileTensor, UnifiedTensor
from penstock.unified.file.writer import change_lock, without_gradients
from penstock.unified.overrides.gather import INTEGERS, check_index, gather, refuse_fake
from penstock.unified.overrides.registry import Operation, implements, run

# Not `torch.index_select`, which PyTorch Geometric replaces with a function of its own that calls
# this one: imported after it, we would not see the calls.
_INDEX_SELECT: Operation = functions.index_select


@implements(_INDEX_SELECT, torch.Tensor.index_select)
def _index_select(
    func: Operation, input: Any, dim: int, index: Any, *, out: torch.Tensor | None = None
) -> Any:
    if isinstance(input, UnifiedTensor) and dim in (0, -input.dim()) and index.dim() <= 1:
        shape = (index.numel(), *input.shape[1:])
        recorded = torch.is_grad_enabled() and input.requires_grad  # then the gather raises
        if out is not None and out.shape != shape and not recorded:
            out.resize_(shape)
        return gather(input, index.reshape(-1), out=out)
    return run(func, input, dim, index, **({} if out is None else {"out": out}))


@implements(torch.Tensor.index_copy_)
def _index_copy(func: Operation, input: Any, dim: int, index: Any, source: Any) -> Any:
    if _writes_whole_rows(input, dim, index, source):
        return write_rows(input, index, source, negative=False)
    return run(func, input, dim, index, source)


@implements(torch.Tensor.index_add_)
def _index_add(
    func: Operation, input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1
) -> Any:
    if _writes_whole_rows(input, dim, index, source):
        refuse_fake(check_index(index), source)
        rows = _materialise(input, source)
        input._table.write_rows(index.reshape(-1), rows, alpha=alpha, negative=False)
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
    refuse_fake(check_index(index), rows)
    rows = _materialise(table, rows.reshape(index.numel(), *table.shape[1:]))
    table._table.write_rows(index.reshape(-1), rows, alpha=None, negative=negative)
    return _count_version(table)


def _materialise(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows as bytes to copy: contiguous, conjugated in fact, not in the table."""
    rows = rows.contiguous().resolve_conj().resolve_neg()
    return rows.clone() if table._table.contains(rows) else rows


def _count_version(table: Any) -> Any:
    if isinstance(table, FileTensor):  # tables in memory count their versions themselves
        torch.autograd.graph.increment_version(table)
    return table


# ------------------------------------------------------------------------ embeddings


@implements(functional.embedding)
def _embedding(
    func: Operation,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if not isinstance(weight, UnifiedTensor):
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return run(func, input, weight, *options)
    padding_idx = _resolve_padding(padding_idx, len(weight))
    if max_norm is not None:
        _renormalize(weight, check_index(input), max_norm, norm_type)
    rows = gather(weight, input, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        _, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
        return _scale_gradient(rows, 1 / counts[places])
    return rows


def _resolve_padding(padding_idx: int | None, num_rows: int) -> int | None:
    """Return the row without gradient; one below zero counts from the end."""
    if padding_idx is None:
        return None
    if not -num_rows <= padding_idx < num_rows:
        raise ValueError(
            f"padding_idx={padding_idx}: expected one of the table's {num_rows} rows, from "
            f"{-num_rows} to {num_rows - 1}; leave it out for no padding"
        )
    return padding_idx % num_rows


@without_gradients
def _renormalize(
    table: UnifiedTensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale rows that are longer than `max_norm` down in place, as PyTorch's embeddings do."""
    with change_lock():
        index = torch.unique(index).long().cpu()
        rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype, device="cpu")
        table._table.read_rows(index, rows, negative=False)
        scaled = rows.clone()
        torch.embedding_renorm_(scaled, torch.arange(len(index), device="cpu"), max_norm, norm_type)
        is_changed = (scaled != rows).flatten(1).any(1)
        if is_changed.any():
            write_rows(table, index[is_changed], scaled[is_changed], negative=False)


def _scale_gradient(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the same rows; their gradients are multiplied by `scale` before the table's."""
    scale = scale.to(rows.device).view(scale.shape + (1,) * (rows.dim() - scale.dim()))
    rows.register_hook(lambda gradient: gradient * scale.to(gradient.dtype))
    return rows.view_as(rows)  # hooks of the user's see gradients that are not scaled


@implements(functional.embedding_bag)
def _embedding_bag(
    func: Operation,
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Gather each row of the bags once, and let PyTorch add them up."""
    options = {
        **{"mode": mode, "per_sample_weights": per_sample_weights},
        **{"include_last_offset": include_last_offset},
        "scale_grad_by_freq": scale_grad_by_freq and mode == "max",  # which PyTorch refuses
    }
    is_plain = max_norm is None and not scale_grad_by_freq
    if (
        not isinstance(weight, UnifiedTensor)
        or input.dtype not in INTEGERS
        or (is_readable_by_torch(weight) and is_plain)
    ):
        options.update(max_norm=max_norm, norm_type=norm_type, padding_idx=padding_idx)
        options.update(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        return run(func, input, weight, offsets, **options)
    if max_norm is not None:
        _renormalize(weight, input, max_norm, norm_type)
    index, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
    padding_idx = _resolve_padding(padding_idx, len(weight))
    if padding_idx is not None:
        at = (index == padding_idx).nonzero().flatten().tolist()
        options["padding_idx"] = at[0] if at else None
    rows = gather(weight, index, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        rows = _scale_gradient(rows, 1 / counts)
    return func(places, rows, offsets, **options)
