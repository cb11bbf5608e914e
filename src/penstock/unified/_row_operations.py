"""Rows of a table, gathered and written by whichever of PyTorch's functions."""

from __future__ import annotations

from typing import Any

import torch

from penstock.unified._devices import GPU
from penstock.unified._gather import INTEGERS, check_index, gather
from penstock.unified._indexing import Rows, refused_key, row_numbers, split_key, within_rows
from penstock.unified._operands import Operation, run
from penstock.unified._row_writer import changing, without_gradients
from penstock.unified._table_tensor import copies_everything
from penstock.unified._tables import FileTable
from penstock.unified._tensor import FileTensor, UnifiedTensor

_VIEWS = (int, slice, tuple)  # keys whose results PyTorch makes as fast, or without a copy
_PLAIN_INTEGERS = INTEGERS - {torch.uint8}  # whose tensors are PyTorch's masks of old


def getitem(func: Operation, table: Any, key: Any) -> Any:
    if not isinstance(table, UnifiedTensor):
        return run(func, table, key)
    if isinstance(key, torch.Tensor) and key.dtype in _PLAIN_INTEGERS and key.dim():
        return gather(table, key, negative=True)
    if isinstance(key, _VIEWS) and _is_free(table):
        return run(func, table, key)
    chosen = split_key(table.shape[0], key)
    if chosen is None and isinstance(table, FileTensor) and (error := refused_key(key)):
        raise error
    if chosen is None or (_is_free(table) and not _are_gathered(*chosen)):
        return run(func, table, key)
    rows, rest = chosen
    if isinstance(rows, slice) and _are_all(rows, len(table)):
        if not isinstance(table, FileTensor):
            return run(func, table, key)
        raise copies_everything(table, "a slice of all rows", "gather those that are needed")
    found = gather(table, row_numbers(len(table), rows), negative=True)
    if isinstance(rows, int):
        return found[0][rest] if rest else found[0]
    return found[within_rows(rows, rest)] if rest else found


def _is_free(table: UnifiedTensor) -> bool:
    """Whether PyTorch can read parts of the table: they are in memory, and get no gradient."""
    recorded = torch.is_grad_enabled() and table.requires_grad
    return not recorded and not isinstance(table, FileTensor)


def _are_gathered(rows: Rows, rest: tuple[Any, ...]) -> bool:
    """Whether Penstock gathers them, though PyTorch could do it: whole rows, in any order."""
    return isinstance(rows, torch.Tensor) and not rest


def _are_all(rows: slice, num_rows: int) -> bool:
    return len(range(*rows.indices(num_rows))) == num_rows > 0


def index_select(
    func: Operation, input: Any, dim: int, index: Any, *, out: torch.Tensor | None = None
) -> Any:
    if isinstance(input, UnifiedTensor) and dim in (0, -input.dim()) and index.dim() <= 1:
        if out is not None and not torch.is_grad_enabled():
            out.resize_((index.numel(), *input.shape[1:]))
        return gather(input, index.reshape(-1), out=out)
    return run(func, input, dim, index, **({} if out is None else {"out": out}))


def embedding(
    func: Operation,
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if not isinstance(weight, UnifiedTensor):
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return run(func, input, weight, *options)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    if max_norm is not None:
        _renormalize(weight, check_index(input), max_norm, norm_type)
    rows = gather(weight, input, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        _, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
        return _with_scaled_gradient(rows, 1 / counts[places])
    return rows


@without_gradients
def _renormalize(
    table: UnifiedTensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale rows that are longer than `max_norm` down in place, as PyTorch's embeddings do."""
    with changing():
        index = torch.unique(index).long().cpu()
        rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
        table._table.gather(index, rows, negative=False)
        scaled = rows.clone()
        torch.embedding_renorm_(scaled, torch.arange(len(index)), max_norm, norm_type)
        is_changed = (scaled != rows).flatten(1).any(1)
        if is_changed.any():
            _put(table, index[is_changed], scaled[is_changed], negative=False)


def _with_scaled_gradient(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same rows, the gradients of which are multiplied by `scale` on their way to the table."""
    scale = scale.to(rows.device).view(scale.shape + (1,) * (rows.dim() - scale.dim()))
    rows.register_hook(lambda gradient: gradient * scale.to(gradient.dtype))
    return rows.view_as(rows)  # hooks of the user's see gradients that are not scaled


def embedding_bag(
    func: Operation,
    input: torch.Tensor,
    weight: Any,
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
    """Bags of the rows that occur, each gathered once."""
    options = {
        **{"mode": mode, "per_sample_weights": per_sample_weights},
        **{"include_last_offset": include_last_offset},
    }
    is_table = isinstance(weight, UnifiedTensor) and input.dtype in INTEGERS
    is_plain = max_norm is None and not scale_grad_by_freq
    if not is_table or (_is_free(weight) and is_plain):
        options.update(max_norm=max_norm, norm_type=norm_type, padding_idx=padding_idx)
        options.update(scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        return run(func, input, weight, offsets, **options)
    if max_norm is not None:
        _renormalize(weight, input, max_norm, norm_type)
    index, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
        at = (index == padding_idx).nonzero().flatten().tolist()
        options["padding_idx"] = at[0] if at else None
    rows = gather(weight, index, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        rows = _with_scaled_gradient(rows, 1 / counts)
    return func(places, rows, offsets, **options)


# ---------------------------------------------------------------------- writes


def _is_plain_write(table: Any, source: Any) -> bool:
    """Whether autograd has no interest: else PyTorch does what it does, or raises."""
    if not isinstance(table, UnifiedTensor) or not isinstance(source, torch.Tensor):
        return False
    if source.device.type not in ("cpu", GPU) or source.layout != torch.strided:
        return False
    return not (torch.is_grad_enabled() and (table.requires_grad or source.requires_grad))


def _as_stored(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows as bytes that can be copied: contiguous, conjugated in fact, not in the table."""
    rows = rows.contiguous().resolve_conj().resolve_neg()
    return rows.clone() if table._table.holds(rows) else rows


def _wrote(table: Any) -> Any:
    if isinstance(table, FileTensor):  # tables in memory count their versions themselves
        torch.autograd.graph.increment_version(table)
    return table


def setitem(func: Operation, table: Any, key: Any, value: Any) -> None:
    chosen = split_key(table.shape[0], key) if isinstance(table, UnifiedTensor) else None
    if isinstance(table, FileTensor) and chosen is not None:
        _write_to_file(table, *chosen, value)
        return
    if isinstance(table, FileTensor) and (error := refused_key(key)):
        raise error
    is_plain = isinstance(value, torch.Tensor) and _is_plain_write(table, value)
    if chosen is None or not is_plain or not _are_gathered(*chosen):
        run(func, table, key, value)
        return
    index = row_numbers(len(table), chosen[0])
    rows = value.to(table.dtype).expand(*index.shape, *table.shape[1:])
    _put(table, index, rows, negative=True)


def _write_to_file(table: FileTensor, rows: Rows, rest: tuple[Any, ...], value: Any) -> None:
    """`table[rows, *rest] = value`: rows of which a part stays are read before."""
    value = torch.as_tensor(value, dtype=table.dtype)
    if not _is_plain_write(table, value):
        raise RuntimeError(
            "u[...] = value records no gradient, but the table or the value requires one: write "
            "under torch.no_grad()"
        )
    if isinstance(rows, slice) and _are_all(rows, len(table)):
        raise copies_everything(table, "writing all rows at once", "write them in blocks")
    index, file = row_numbers(len(table), rows).cpu(), table._table
    assert isinstance(file, FileTable)
    with torch.no_grad(), changing():
        content = torch.empty((*index.shape, *table.shape[1:]), dtype=table.dtype)
        if rest:
            file.gather(index, content, negative=True)
        if isinstance(rows, int):
            content[0][rest or ...] = value
        else:
            content[within_rows(rows, rest)] = value
        _put(table, index, content, negative=True)


def _put(table: UnifiedTensor, index: torch.Tensor, rows: torch.Tensor, *, negative: bool) -> Any:
    rows = _as_stored(table, rows.reshape(index.numel(), *table.shape[1:]))
    check_index(index)
    table._table.put(index.reshape(-1), rows, negative=negative)
    return _wrote(table)


def index_copy(func: Operation, input: Any, dim: int, index: Any, source: Any) -> Any:
    if _is_plain_row_write(input, dim, index, source):
        return _put(input, index, source, negative=False)
    return run(func, input, dim, index, source)


def index_add(
    func: Operation, input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1
) -> Any:
    if _is_plain_row_write(input, dim, index, source):
        rows = _as_stored(input, source)
        input._table.add(check_index(index).reshape(-1), rows, alpha=alpha, negative=False)
        return _wrote(input)
    return run(func, input, dim, index, source, alpha=alpha)


def _is_plain_row_write(table: Any, dim: int, index: torch.Tensor, source: Any) -> bool:
    """Whether rows are written whole; what is wrong in shape or dtype is for PyTorch to refuse."""
    if not _is_plain_write(table, source) or dim not in (0, -table.dim()) or index.dim() != 1:
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
