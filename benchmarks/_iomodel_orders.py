"""Rows of tile orders: simulated bytes, and on a GPU the times of lora's base product in each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from _rows import BenchmarkRow
from penstock.iomodel import TiledProduct, TileOrder, simulate_order

ORDERS = (
    TileOrder(name="row", group=1),
    *(TileOrder(name="grouped", group=group) for group in (2, 4, 8, 16)),
    TileOrder(name="morton"),
)
SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (4096, 14336, 4096))
RANK = 16


def order_rows(where: Any, device: str) -> Iterator[BenchmarkRow]:
    """Bytes that each order reads from memory; on a GPU with times and their rank correlation."""
    for rows, columns, inner in SHAPES:
        found = []
        for order in ORDERS:
            start = time.perf_counter()
            num_bytes = simulate_order(product_of(rows, columns, inner, device), order)
            seconds = [time.perf_counter() - start]
            if device != "cpu":
                seconds = time_order(rows, columns, inner, order, device)
            found.append((order, num_bytes, seconds))
        medians = [statistics.median(seconds) for *_, seconds in found]
        correlation = None
        if device != "cpu":
            correlation = rank_correlation([num_bytes for _, num_bytes, _ in found], medians)
        for order, num_bytes, seconds in found:
            yield BenchmarkRow.of(
                seconds,
                topic="iomodel",
                case=f"order, product {rows} x {columns} x {inner}",
                arm=f"{order.name} {order.group}" if order.name == "grouped" else order.name,
                moved_bytes={"memory": num_bytes},
                extra={"is_simulated_only": device == "cpu", "rank_correlation": correlation},
                **where,
            )


def product_of(rows: int, columns: int, inner: int, device: str) -> TiledProduct:
    """The product on the GPU at hand, or on an H100 where there is none."""
    if device == "cpu":
        return TiledProduct(rows=rows, columns=columns, inner=inner)
    properties = torch.cuda.get_device_properties(device)
    return TiledProduct(
        rows=rows,
        columns=columns,
        inner=inner,
        cache_bytes=properties.L2_cache_size,
        num_programs=properties.multi_processor_count,
    )


def time_order(rows: int, columns: int, inner: int, order: TileOrder, device: str) -> list[float]:
    """Times of the forward pass of a layer with one adapter of rank 16, in bfloat16."""
    from penstock.lora.triton import LayerAdapters, Part, choose_tiles, cut_rows, forward

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    x, weight = normal(rows, inner), normal(columns, inner)
    adapters = LayerAdapters(
        downs=(normal(RANK, inner),), ups=(normal(columns, RANK),), scalings=(1.0,),
        dropouts=(0.0,), seeds=(0,),
    )  # fmt: skip
    tiles = choose_tiles(x.dtype, x.dtype, (RANK,))
    tables = cut_rows(rows, [Part(0, 0, rows, 0)], (RANK,), tiles, device=x.device)
    seconds = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward(x, weight, None, adapters, tables, tile_order=order)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def rank_correlation(left: list[float], right: list[float]) -> float:
    """Spearman's correlation of two lists."""
    ranks = [np.argsort(np.argsort(each)) for each in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
