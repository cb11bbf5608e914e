"""Rows of verdicts: 20 pairs of variants of Penstock's kernels, each predicted and measured.

A verdict is right where prediction and measurement agree on whether the variant is faster by 5 %.
The pairs were written down before they were measured. Gathers and writes of rows are those of
`penstock.unified`, chains those of `iomodel.run_chain`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from _rows import BenchmarkRow, Limit
from penstock.iomodel import declare_access, explain, run_chain
from penstock.unified import unify

Call = Callable[[], object]
Make = Callable[[], Call]
bind = functools.partial
TABLE_ROWS = 2**21
COUNT = 2**17


def gather(
    width: int, dtype: Any = torch.float32, *, most: int = TABLE_ROWS, **options: Any
) -> Call:
    """Random rows of a table into a result that stays."""
    count, index_dtype = options.get("count", COUNT), options.get("index", torch.int64)
    source = torch.zeros(TABLE_ROWS, width, dtype=dtype)
    table, out = unify(source), torch.zeros(count, width, dtype=dtype)
    index = torch.randint(0, most, (count,)).to(index_dtype)
    row_bytes = width * dtype.itemsize

    def access(trace: Any) -> None:
        at = np.arange(count)
        size = index.element_size()
        trace.interleave(
            [
                (index, at * size, size, False),
                (source, index.numpy().astype(np.int64) * row_bytes, row_bytes, False),
                (out, at * row_bytes, row_bytes, True),
            ]
        )

    return _named(f"gather {width} x {dtype}", access, lambda: table.gather_rows(index, out=out))


def write(
    width: int, dtype: Any = torch.float32, *, most: int = TABLE_ROWS, count: int = COUNT
) -> Call:
    """Rows that are written to random places."""
    target = torch.zeros(TABLE_ROWS, width, dtype=dtype)
    table, rows = unify(target), torch.ones(count, width, dtype=dtype)
    index = torch.randint(0, most, (count,))
    row_bytes = width * dtype.itemsize

    def access(trace: Any) -> None:
        at = np.arange(count)
        trace.interleave(
            [
                (index, at * 8, 8, False),
                (rows, at * row_bytes, row_bytes, False),
                (target, index.numpy() * row_bytes, row_bytes, True),
            ]
        )

    def run() -> None:
        table[index] = rows

    return _named(f"write {width} x {dtype}", access, run)


def _named(name: str, access: Any, run: Call) -> Call:
    def call() -> object:
        return run()

    call.__qualname__ = name
    return declare_access(access)(call)


def chained(modules: list[Any], rows: int, chunk_rows: int | None = None) -> Call:
    """A chain of modules in chunks; of all rows where they are as many."""
    x = torch.randn(rows, 1024)

    def call() -> object:
        with torch.no_grad():
            return run_chain(modules, x, chunk_rows=chunk_rows or rows)

    call.__qualname__ = f"chain in chunks of {chunk_rows}"
    return call


def pairs() -> Iterator[tuple[str, Make, Make]]:
    """Yield a name, and what makes a variant and its base."""
    half = torch.float16
    yield "gather: half the bytes of 256 B rows", bind(gather, 64, half), bind(gather, 64)
    yield "gather: half the bytes of 1 KiB rows", bind(gather, 256, half), bind(gather, 256)
    yield "gather: rows of 64 B instead of 128 B", bind(gather, 16), bind(gather, 32)
    yield "gather: rows of 32 B instead of 64 B", bind(gather, 8), bind(gather, 16)
    yield "gather: hot rows, 256 KiB of them", bind(gather, 64, most=1024), bind(gather, 64)
    yield "gather: hot rows, 4 MiB of them", bind(gather, 64, most=16384), bind(gather, 64)
    yield "gather: half as many", bind(gather, 64, count=COUNT // 2), bind(gather, 64)
    yield "gather: int32 indices", bind(gather, 64, index=torch.int32), bind(gather, 64)
    short = torch.int32
    yield "gather: int32 indices of 1 KiB rows", bind(gather, 256, index=short), bind(gather, 256)
    yield "write: half the bytes of 256 B rows", bind(write, 64, half), bind(write, 64)
    yield "write: hot rows, 256 KiB of them", bind(write, 64, most=1024), bind(write, 64)
    yield "write: half as many", bind(write, 64, count=COUNT // 2), bind(write, 64)
    for name, modules, rows, chunk in chains():
        chain = bind(chained, modules, rows)
        yield f"chain: {name}", bind(chain, chunk), chain
    mlp = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)]
    narrow = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)]
    yield "chain: MLP of half the width", bind(chained, narrow, 4096), bind(chained, mlp, 4096)
    relu = [nn.ReLU()] * 4
    yield (
        "chain: two ReLU instead of four",
        bind(chained, relu[:2], 2**16),
        bind(chained, relu, 2**16),
    )


def chains() -> Iterator[tuple[str, list[Any], int, int]]:
    """Yield chains of modules on rows of 1024 features, and the rows of a chunk."""
    relu = [nn.ReLU()] * 4
    yield "ReLU four times, 256 MiB", relu, 2**16, 128
    yield "ReLU four times, 512 KiB", relu, 128, 16
    yield "norms, 128 MiB", [nn.LayerNorm(1024), nn.ReLU(), nn.LayerNorm(1024)], 2**15, 128
    gate = [nn.ReLU(), lambda x: x[:, :512] * x[:, 512:], nn.ReLU()]
    yield "gate, 128 MiB", gate, 2**15, 256
    yield "softmax, 128 MiB", [functools.partial(F.softmax, dim=-1), nn.ReLU()], 2**15, 256
    mlp = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)]
    yield "MLP, chunks of 1024", mlp, 4096, 1024


def verdict_rows(where: Any, device: str, match: str = "") -> Iterator[BenchmarkRow]:
    """A row for each pair."""
    for name, make, make_base in pairs():
        if match not in name:
            continue
        report = explain(make(), base=make_base(), repetitions=9)
        gain, measured = report.predicted_gain, report.measured_gain
        assert report.base is not None and gain and measured
        assert report.function.measured_seconds and report.base.measured_seconds
        yield BenchmarkRow.of(
            [report.function.measured_seconds],
            topic="iomodel",
            case=f"verdict, {name}",
            arm="variant",
            limit=Limit(name="its base", value=report.base.measured_seconds, unit="s"),
            moved_bytes=report.function.moved_bytes,
            extra={
                "base_bytes": report.base.moved_bytes,
                "binding_level": report.base.binding_level,
                "predicted_gain": gain,
                "measured_gain": measured,
                "predicted_seconds": report.function.predicted_seconds,
                "false_lead": report.false_lead,
                "is_right": report.is_faster == (measured >= 1.05),
            },
            **where,
        )
