"""Rows from host memory to a GPU: gathered by the CPU and copied, or read where they lie.

The limit is what the GPU's processors read when they go through all of the same memory in order,
measured in the same process: over the link, reads come from the same tables of pages and wait for
the same memory. Bytes count once per batch, however often a row is asked for.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from _rows import BenchmarkRow, Limit
from _unified_arms import fill, indices, rows_of
from penstock.units import format_bytes

GPU_ROW_BYTES = (64, 128, 256, 400, 512, 1024, 2052, 2064, 2112, 4096, 16384)
NUM_INDICES = (1 << 10, 1 << 13, 1 << 15, 1 << 18, 1 << 20)
FOOTPRINT_BYTES = (1 << 30, 10 << 30, 40 << 30)  # of tables of rows of 512 B, beside the grid
FOOTPRINT_ROW_BYTES = 512
MAX_RESULT_BYTES = 1 << 30
CACHE_FRACTION = 0.2
NUM_CACHE_WARM_UPS = 30
REPETITIONS = 9

GpuArm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Gathers the rows of an index, which is given on the CPU and on the GPU, into the third one."""


def gpu_rows(row_bytes: int, table_bytes: int, device: str, where: Any) -> list[BenchmarkRow]:
    """All arms for one width of rows, in a table of one size."""
    from penstock.unified import empty, unify

    num_rows, width = table_bytes // row_bytes, row_bytes // 4
    unified = empty((num_rows, width), device=device)
    table = unified.cpu()
    fill(table)
    cached = unify(unified, device=device, cache=int(CACHE_FRACTION * table_bytes))
    arms = gather_arms(unified, cached, table.to(device))
    limit = link_limit(alias_of(unified), table_bytes)
    generator = np.random.default_rng(0)
    rows = []
    for count in NUM_INDICES:
        if count * row_bytes > MAX_RESULT_BYTES:
            continue
        out = torch.zeros(count, width, device=device)
        for kind in ("uniform", "zipf"):
            draw = functools.partial(indices, kind, count, num_rows, generator)
            for _ in range(NUM_CACHE_WARM_UPS):
                cached.gather_rows(draw().to(device), out=out)
            seconds, num_unique = measured_on_gpu(arms(count), draw, out, device)
            case = f"{format_bytes(table_bytes)} table, {row_bytes} B rows, {count} {kind}"
            rows += rows_of(
                case,
                seconds,
                "CPU gather + copy",
                count * row_bytes,
                where,
                limit,
                num_unique * row_bytes,
            )
    return rows


def gather_arms(
    unified: Any, cached: Any, on_gpu: torch.Tensor
) -> Callable[[int], dict[str, GpuArm]]:
    """What gathers batches of so many rows."""
    from penstock.unified.device import _rows as device_rows

    table = unified.cpu()
    alias = alias_of(unified)

    def copied(cpu: torch.Tensor, gpu: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.index_select(table, 0, cpu))

    def unsorted(cpu: torch.Tensor, gpu: torch.Tensor, out: torch.Tensor) -> None:
        device_rows.copy_rows(table, gpu, out, None, None, False, True, 0)

    def in_order(cpu: torch.Tensor, gpu: torch.Tensor, out: torch.Tensor) -> None:
        rows, places = torch.sort(gpu)
        device_rows.copy_rows(table, rows, out, places, None, False, True, 0)

    def arms(count: int) -> dict[str, GpuArm]:
        pinned = torch.empty((count, *table.shape[1:]), dtype=table.dtype, pin_memory=True)

        def staged(cpu: torch.Tensor, gpu: torch.Tensor, out: torch.Tensor) -> None:
            torch.index_select(table, 0, cpu, out=pinned)
            out.copy_(pinned, non_blocking=True)

        return {
            "CPU gather + copy": copied,
            "CPU gather into page-locked memory + copy": staged,
            "index_select over the link": lambda cpu, gpu, out: torch.index_select(
                alias, 0, gpu, out=out
            ),
            "kernel, aligned": unsorted,
            "kernel, aligned, sorted": in_order,
            "gather_rows": lambda cpu, gpu, out: unified.gather_rows(gpu, out=out),
            "gather_rows, 20 % cached": lambda cpu, gpu, out: cached.gather_rows(gpu, out=out),
            "all on the GPU": lambda cpu, gpu, out: torch.index_select(on_gpu, 0, gpu, out=out),
        }

    return arms


def measured_on_gpu(
    arms: dict[str, GpuArm], draw: Callable[[], torch.Tensor], out: torch.Tensor, device: str
) -> tuple[dict[str, list[float]], float]:
    """Seconds of every arm, and how many different rows a batch had in the mean."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    num_unique = []
    for number in range(REPETITIONS + 1):
        for name in list(arms) if number % 2 else list(reversed(arms)):
            index = draw()
            num_unique.append(len(torch.unique(index)))
            on_gpu = index.to(device)
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            arms[name](index, on_gpu, out)
            torch.cuda.synchronize(device)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds, statistics.mean(num_unique)


def alias_of(unified: Any) -> torch.Tensor:
    """The table as a tensor on the GPU, over the same host memory."""
    alias = unified._table.device_table(unified._table.device).alias()
    if alias is None:
        raise RuntimeError(
            "CUDA refused to register the table's memory: there is nothing to measure"
        )
    return alias


def link_limit(alias: torch.Tensor, num_bytes: int) -> Limit:
    """What the GPU reads of the table per second, going through it in order."""
    words = alias.view(torch.int32).view(-1)
    seconds = []
    for number in range(6):
        torch.cuda.synchronize(alias.device)
        start = time.perf_counter()
        words.max()
        torch.cuda.synchronize(alias.device)
        if number:
            seconds.append(time.perf_counter() - start)
    rate = words.numel() * words.element_size() / statistics.median(seconds)
    name = f"reads of the GPU's processors, in order, over {format_bytes(num_bytes)}"
    return Limit(name=name, value=rate, unit="B/s")
