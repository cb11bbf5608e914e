"""Operands of the operator as the kernels take them, and tables that layers of a step share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from penstock.lora.triton._launch import LayerAdapters, backward, forward
from penstock.lora.triton._tables import RowTables, cut_rows, find_parts
from penstock.lora.triton._tiles import choose_tiles

_MOST_TABLES = 64
# By tensor of an order, which the layers of a step share, its tables by everything else.
_tables_by_order: Any = WeakIdKeyDictionary()


def run_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    *operands: Any,
) -> tuple[Tensor, Tensor]:
    """Return the output and the products of rank r; arguments are those of the operator."""
    adapters, rows = _convert(x, *operands)
    return forward(x, weight, bias, adapters, rows, addend=total)


def run_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, hidden: Tensor, *operands: Any
) -> list[Tensor]:
    """Return the gradients that are asked for; arguments are those of the operator."""
    *of_adapters, needs = operands
    adapters, rows = _convert(x, *of_adapters)
    num = len(adapters.downs)
    needs_x, needs_down, needs_up = needs[0], needs[1 : num + 1], needs[num + 1 :]
    dx, downs, ups = backward(
        dy,
        x,
        weight,
        hidden,
        adapters,
        rows,
        needs_x=needs_x,
        needs_down=any(needs_down),
        needs_up=any(needs_up),
    )
    return [
        *([] if dx is None else [dx]),
        *(each for each, need in zip(downs, needs_down, strict=False) if need),
        *(each for each, need in zip(ups, needs_up, strict=False) if need),
    ]


def _convert(
    x: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    order: Tensor | None,
    counts: Sequence[int],
    starts: Sequence[int],
    scalings: Sequence[float],
    dropouts: Sequence[float],
    seeds: Tensor | None,
) -> tuple[LayerAdapters, RowTables]:
    adapters = LayerAdapters(
        downs=tuple(down.contiguous() for down in downs),
        ups=tuple(up.contiguous() for up in ups),
        scalings=tuple(scalings),
        dropouts=tuple(dropouts),
        seeds=(0,) * len(downs) if seeds is None else tuple(seeds.tolist()),
    )
    ranks = tuple(len(down) for down in downs)
    dtype = adapters.dtype or x.dtype
    key = (len(x), tuple(counts), tuple(starts), ranks, x.dtype, dtype, x.device)
    if order is None:
        return adapters, _cut(*key)
    tables = _tables_by_order.setdefault(order, {})
    if key not in tables:
        tables[key] = _cut.__wrapped__(*key, order=order)
    return adapters, tables[key]


@functools.lru_cache(maxsize=_MOST_TABLES)
def _cut(
    num_rows: int,
    counts: tuple[int, ...],
    starts: tuple[int, ...],
    ranks: tuple[int, ...],
    dtype: torch.dtype,
    adapter_dtype: torch.dtype,
    device: torch.device,
    order: Tensor | None = None,
) -> RowTables:
    return cut_rows(
        num_rows,
        find_parts(counts, starts, has_order=order is not None),
        ranks,
        choose_tiles(dtype, adapter_dtype, ranks),
        device=device,
        order=order,
    )
