"""Rows of models: elements of attention's schedules, and CPU kernels through simulated caches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _attention_layouts import make_layout
from _rows import BenchmarkRow
from penstock import attention
from penstock.attention import Layout
from penstock.iomodel import AccessTrace, matmul, simulate_caches
from penstock.iomodel._attention import flash_forward, two_pass_forward

TOKENS = 8192
HEAD_DIMS = (64, 128, 256, 576)
_ATTENTION = Path(attention.__file__).parent
SHARES = (0.25, 0.5, 0.75, 1.0, 2.0, 4.0)  # of d^2 elements of fast memory


def crossover_rows(where: Any, device: str) -> Iterator[BenchmarkRow]:
    """Elements of both regimes of attention around d^2, each with its best tiles."""
    for head_dim in HEAD_DIMS:
        for share in SHARES:
            elements = int(share * head_dim**2)
            start = time.perf_counter()
            flash = flash_forward(TOKENS, TOKENS, head_dim, elements)
            two_pass = two_pass_forward(TOKENS, TOKENS, head_dim, elements)
            taken = time.perf_counter() - start
            case = f"attention {TOKENS} tokens, head dim {head_dim}, {share:g} d^2 elements"
            for regime, schedule in (("FlashAttention", flash), ("two-pass", two_pass)):
                if schedule is not None:
                    yield BenchmarkRow.of(
                        [taken],
                        topic="iomodel",
                        case=case,
                        arm=regime,
                        moved_bytes={"slow memory": 4 * schedule.moved},
                        extra={"over_two_pass": schedule.moved / two_pass.moved},
                        **where,
                    )


def gather_trace(num_rows: int, row_bytes: int, count: int) -> tuple[AccessTrace, dict[int, int]]:
    """Random rows of a table, each once, and the model's bytes: whole lines, and the result."""
    rows = np.random.default_rng(0).permutation(num_rows)[:count]
    trace = AccessTrace()
    at = np.arange(count) * row_bytes
    trace.interleave([(2**30, rows * row_bytes, row_bytes, False), (0, at, row_bytes, True)])
    lines = (row_bytes + 63) // 64
    moved = count * lines * 64 + 2 * count * row_bytes  # the result is loaded and written back
    return trace, {32 * 1024: moved, 2**20: moved}


def product_trace(
    rows: int, columns: int, inner: int, cache_bytes: int
) -> tuple[AccessTrace, dict[int, int]]:
    """A product with a tile of the result at hand, in blocks of a line along the inner elements."""
    model = matmul(rows, columns, inner, cache_bytes // 2)
    tall, wide = model.tiles["rows"] // 16 * 16, model.tiles["columns"] // 16 * 16
    trace, line = AccessTrace(), 16  # elements
    bases = (0, 2**30, 2**31)  # A by rows, B and C by rows
    moved = 0
    for i in range(0, rows, tall):
        for j in range(0, columns, wide):
            height, width = min(tall, rows - i), min(wide, columns - j)
            down, across = np.arange(i, i + height), np.arange(j, j + width, line)
            for k in range(0, inner, line):
                trace.read(bases[0], (down * inner + k) * 4, 64)
                inside = (np.arange(k, k + line)[:, None] * columns + across[None, :]) * 4
                trace.read(bases[1], inside.ravel(), 64)
                trace.write(bases[2], ((down[:, None] * columns + across) * 4).ravel(), 64)
            moved += 4 * (height * inner + inner * width) + 8 * height * width
    return trace, {cache_bytes: moved}


def attend_trace(
    tokens: int, dim: int, heads: int, group: int
) -> tuple[AccessTrace, dict[int, int]]:
    """One-token decoding of a KV cache: keys and values once for all query heads of a group."""
    trace = AccessTrace()
    per_head = tokens * dim * 4
    for head in range(heads):
        for block in range(0, tokens, 64):
            count = min(64, tokens - block)
            for part in range(2):
                base = (2 * head + part) * 2**28
                for _ in range(group):  # the block stays at hand for the heads of a group
                    trace.read(base, block * dim * 4, count * dim * 4)
    return trace, {2**20: 2 * heads * per_head}


def read_constant(source: Path, name: str) -> int:
    """Return a whole number that a kernel's C++ has as a constant, so that a trace follows it."""
    found = re.search(rf"constexpr \w+ {name} = (\d+);", source.read_text())
    if found is None:
        raise ValueError(f"{source.name} has no constant {name}: say what its loops are now")
    return int(found[1])


def block_attention_trace(
    layout: Layout, dim: int, heads: int, cache_bytes: int
) -> tuple[AccessTrace, dict[int, int]]:
    """The forward pass of `penstock.attention` in C++, over the lists that the kernel gets.

    Loops are those of `query_pass.cpp`: of each panel of a query block's queries, with their
    scores and sums in a thread's own memory, over the keys and values of each listed block. Behind
    a cache that holds all of this, keys and values come once for each listed block.
    """
    lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    wide = read_constant(_ATTENTION / "tiles.cpp", "kVecs") * lanes
    block, rows = layout.block, layout.num_query_blocks
    size, panel, scores = block * dim * 4, wide * dim * 4, block * wide * 4
    q, k, v, out, queries, sums, weights = (number * 2**30 for number in range(7))
    trace, panels = AccessTrace(), range(block // wide)
    for head in range(heads):
        offsets = layout.row_offsets[head % layout.num_heads].tolist()
        for row in range(rows):
            at = (head * rows + row) * size
            trace.read(q, at, size)
            trace.write(queries, 0, size)
            for column in layout.key_blocks[offsets[row] : offsets[row + 1]].tolist():
                key = (head * layout.num_key_blocks + column) * size
                for number in panels:
                    trace.read(k, key, size)
                    trace.read(queries, number * panel, panel)
                    trace.write(weights, 0, scores)
                    trace.read(v, key, size)
                    trace.read(weights, 0, scores)
                    trace.write(sums, number * panel, panel)
            trace.write(out, at, size)
    blocks = int(layout.row_offsets[:, -1].sum()) * heads // layout.num_heads
    return trace, {cache_bytes: 2 * blocks * size + 3 * heads * rows * size}


def copied_trace(num_bytes: int) -> tuple[AccessTrace, dict[int, int]]:
    """An elementwise operator on vectors larger than the cache."""
    trace, x, y = AccessTrace(), torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
    trace.stream([x], [y])
    return trace, {32 * 1024: 3 * num_bytes, 2**20: 3 * num_bytes}


def cache_rows(where: Any, device: str) -> Iterator[BenchmarkRow]:
    """Bytes behind simulated caches, beside the models of the CPU kernels."""
    cases = {
        "gather 50000 of 200000 rows of 256 B": gather_trace(200_000, 256, 50_000),
        "gather 50000 of 200000 rows of 400 B": gather_trace(200_000, 400, 50_000),
        "product 768 x 768 x 768, 256 KiB": product_trace(768, 768, 768, 2**18),
        "decode 8192 tokens, head dim 128, 4 x 4 heads": attend_trace(8192, 128, 4, 4),
        "elementwise, 16 MiB": copied_trace(2**24),
        "attention 4096 tokens, random blocks": block_attention_trace(
            make_layout("random 0.25", 4096), 64, 2, 2**18
        ),
    }
    for case, (trace, expected) in cases.items():
        start = time.perf_counter()
        counted = simulate_caches(trace, sorted(expected))
        taken = time.perf_counter() - start
        for each in counted:
            model = expected[each.fast_memory_bytes]
            yield BenchmarkRow.of(
                [taken],
                topic="iomodel",
                case=f"caches, {case}",
                arm=f"behind {each.fast_memory_bytes} bytes",
                moved_bytes={"counted": each.moved_bytes, "model": model},
                extra={"counted_over_model": each.moved_bytes / model},
                **where,
            )
