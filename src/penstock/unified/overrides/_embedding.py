"""Overrides of `torch.nn.functional.embedding` and `embedding_bag`."""

from __future__ import annotations

import torch
from torch.nn import functional

from penstock.unified._tensor import UnifiedTensor
from penstock.unified.file.writer import change_lock, without_gradients
from penstock.unified.overrides._rows import is_readable_by_torch, write_rows
from penstock.unified.overrides.gather import INTEGERS, check_index, gather
from penstock.unified.overrides.registry import Operation, implements, run


@implements(
    functional.embedding,
    shown=("F.embedding(index, u)", "nn.Embedding.from_pretrained(u)"),
    result="rows, copied by Penstock; sparse gradient, whatever `sparse` says; `max_norm` and "
    "`scale_grad_by_freq` row by row",
)
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
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    if max_norm is not None:
        _renormalize(weight, check_index(input), max_norm, norm_type)
    rows = gather(weight, input, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        _, places, counts = torch.unique(input, return_inverse=True, return_counts=True)
        return _scale_gradient(rows, 1 / counts[places])
    return rows


@without_gradients
def _renormalize(
    table: UnifiedTensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale rows that are longer than `max_norm` down in place, as PyTorch's embeddings do."""
    with change_lock():
        index = torch.unique(index).long().cpu()
        rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
        table._table.read_rows(index, rows, negative=False)
        scaled = rows.clone()
        torch.embedding_renorm_(scaled, torch.arange(len(index)), max_norm, norm_type)
        is_changed = (scaled != rows).flatten(1).any(1)
        if is_changed.any():
            write_rows(table, index[is_changed], scaled[is_changed], negative=False)


def _scale_gradient(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the same rows; their gradients are multiplied by `scale` before the table's."""
    scale = scale.to(rows.device).view(scale.shape + (1,) * (rows.dim() - scale.dim()))
    rows.register_hook(lambda gradient: gradient * scale.to(gradient.dtype))
    return rows.view_as(rows)  # hooks of the user's see gradients that are not scaled


@implements(
    functional.embedding_bag,
    shown=("F.embedding_bag(index, u)",),
    result="of a table in a file, or one that requires a gradient: its rows are gathered, each "
    "once; sparse gradient, whatever `sparse` says",
)
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
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
        at = (index == padding_idx).nonzero().flatten().tolist()
        options["padding_idx"] = at[0] if at else None
    rows = gather(weight, index, padding_index=padding_idx)
    if scale_grad_by_freq and rows.requires_grad:
        rows = _scale_gradient(rows, 1 / counts)
    return func(places, rows, offsets, **options)
