"""Products of sparse matrices against torch's and SciPy's: arms of `ops.py`.

Cases `forward` multiply a matrix by itself: random patterns of 1 to 100 entries a row, and the
graphs of $PENSTOCK_DATA, of which dense ones give some rows only. torch's rows come unsorted, ours
sorted. Cases `step` are forward and backward from a gradient in the result's pattern; torch has `@`
on CSR, whose gradient is filled in. Cases `peak` run in a process of their own: the growth of its
peak over the operands, held against the bytes of the result and of the workspace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from _ops_arms import TOPIC, peak_growth, time_arms
from _rows import BenchmarkRow, Environment, Limit
from penstock.ops import product_pattern, spgemm

OURS, AGAIN, TORCH, SCIPY = "penstock", "penstock, pattern given", "torch.sparse.mm", "scipy"
STEP, FILLED = "penstock", "torch, @ on CSR"
RANDOM = ((10_000, 1), (10_000, 10), (10_000, 30), (10_000, 100), (100_000, 1), (100_000, 3),
          (100_000, 10))  # fmt: skip
GRAPHS = {"soc-Epinions1": None, "gowalla": 4000, "tolokers": 1000}
"""Graphs, and the rows of the left operand where not all."""
STEPS = ((2_000, 12), (10_000, 3), (5_000, 6))
PEAK = (50_000, 20)
WINDOW_BYTES = 64 * 2**20
LEAST_CELL, BAR, STEP_BAR = 0.6, 1.0, 8.0


def draw(num_rows: int, per_row: int, seed: int = 0) -> Tensor:
    """Return a square matrix with some entries a row at random, in CSR."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(num_rows).repeat_interleave(per_row)
    columns = torch.randint(0, num_rows, (num_rows * per_row,), generator=generator)
    values = torch.rand(num_rows * per_row, generator=generator)
    matrix = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (num_rows, num_rows))
    return matrix.coalesce().to_sparse_csr()


def read_graph(name: str) -> Tensor:
    """Return the adjacency of a graph of $PENSTOCK_DATA, in CSR with values at random."""
    folder = Path(os.environ["PENSTOCK_DATA"]) / "graphs"
    if name == "gowalla":
        stored = np.load(folder / "gowalla_adj.npz")
        size = tuple(int(each) for each in stored["shape"])
        offsets, columns = (torch.from_numpy(stored[key]).long() for key in ("indptr", "indices"))
        rows = torch.arange(size[0]).repeat_interleave(offsets.diff())
        edges = torch.stack([rows, columns])
    elif name == "tolokers":
        edges = torch.from_numpy(np.load(folder / "tolokers.npz")["edges"]).long().T
        edges = torch.cat([edges, edges.flip(0)], 1)
    else:
        edges = torch.from_numpy(np.loadtxt(folder / f"{name}.txt", dtype=np.int64)).T
    num_nodes = int(edges.max()) + 1
    values = torch.rand(edges.shape[1], generator=torch.Generator().manual_seed(0))
    matrix = torch.sparse_coo_tensor(edges, values, (num_nodes, num_nodes))
    return matrix.coalesce().to_sparse_csr()


def head(matrix: Tensor, num_rows: int | None) -> Tensor:
    """Return the first rows of a matrix."""
    if num_rows is None:
        return matrix
    offsets = matrix.crow_indices()[: num_rows + 1]
    end = int(offsets[-1])
    return torch.sparse_csr_tensor(
        *(offsets, matrix.col_indices()[:end], matrix.values()[:end]),
        (num_rows, matrix.shape[1]),
    )


def forward_cases() -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor]]]]:
    """Yield the name of each case and a function that makes its operands."""
    for num_rows, per_row in RANDOM:
        label = f"forward: {num_rows} rows of {per_row}"

        def draw_both(n: int = num_rows, d: int = per_row) -> tuple[Tensor, Tensor]:
            matrix = draw(n, d)
            return matrix, matrix

        yield label, draw_both
    for name, rows in GRAPHS.items():
        label = f"forward: {name}" + (f", {rows} rows" if rows else "")

        def make(name: str = name, rows: int | None = rows) -> tuple[Tensor, Tensor]:
            graph = read_graph(name)
            return head(graph, rows), graph

        yield label, make


def forward_rows(
    case: str, a: Tensor, b: Tensor, options: argparse.Namespace, where: Environment
) -> Iterator[BenchmarkRow]:
    """Yield the rows of a forward case."""
    a, b = a.to(options.device), b.to(options.device)
    pattern = product_pattern(a, b)
    arms: dict[str, Callable[[], Any]] = {
        OURS: lambda: spgemm(a, b),
        AGAIN: lambda: spgemm(a, b, pattern=pattern),
        TORCH: lambda: torch.sparse.mm(a, b),
    }
    if options.device == "cpu" and (scipy := find_scipy()) is not None:
        left, right = (to_scipy(scipy, each) for each in (a, b))
        arms[SCIPY] = lambda: left @ right
    times = time_arms(arms, options.rounds, options.device)
    lengths = b.crow_indices().diff()[a.col_indices()]
    extra = {
        "num_products": int(lengths.sum()),
        "num_entries": len(pattern.columns),
        "num_threads": torch.get_num_threads(),
        "largest_error": relative_error(a, b),
    }
    for arm, seconds in times.items():
        ratio = ratio_of(times[TORCH], seconds)
        is_held = arm == OURS
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=f"spgemm {case}",
            arm=arm,
            limit=Limit(name=f"{LEAST_CELL} x the speed of {TORCH}", value=LEAST_CELL, unit="1")
            if is_held
            else None,
            measured=ratio if is_held else None,
            extra={**extra, "speed_over_torch": ratio},
            **where,
        )


def ratio_of(others: list[float], ours: list[float]) -> float:
    """Return the median over rounds of how much longer others take."""
    return statistics.median(a / b for a, b in zip(others, ours, strict=True))


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of our values to those in float64, of the largest value."""
    exact = spgemm(a.double(), b.double()).values()
    return float((spgemm(a, b).values() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def find_scipy() -> Any:
    """Return SciPy's sparse matrices, or None where it is not installed."""
    try:
        import scipy.sparse  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return scipy.sparse


def to_scipy(sparse: Any, matrix: Tensor) -> Any:
    """Return a matrix as SciPy has it."""
    parts = (matrix.values(), matrix.col_indices(), matrix.crow_indices())
    return sparse.csr_matrix(tuple(each.numpy() for each in parts), shape=tuple(matrix.shape))


def step_rows(
    num_rows: int, per_row: int, options: argparse.Namespace, where: Environment
) -> Iterator[BenchmarkRow]:
    """Yield the rows of forward and backward."""
    a = draw(num_rows, per_row).to(options.device).requires_grad_()
    b = draw(num_rows, per_row, seed=1).to(options.device).requires_grad_()
    with torch.no_grad():
        dc = spgemm(a, b)
    counts = {}

    def step(arm: str, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        da, db = torch.autograd.grad(multiply(a, b), (a, b), dc)
        counts[arm] = (da.values().numel(), db.values().numel())

    arms = {
        STEP: lambda: step(STEP, spgemm),
        FILLED: lambda: step(FILLED, lambda a, b: a @ b),
    }
    times = time_arms(arms, options.rounds, options.device)
    assert counts[STEP] == (a.values().numel(), b.values().numel()), "a gradient fills in"
    limit = Limit(name=f"{STEP_BAR} x the speed of {FILLED}", value=STEP_BAR, unit="1")
    for arm, seconds in times.items():
        ratio = ratio_of(times[FILLED], seconds)
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=f"spgemm step: {num_rows} rows of {per_row}",
            arm=arm,
            limit=limit if arm == STEP else None,
            measured=ratio if arm == STEP else None,
            extra={
                "speed_over_torch": ratio,
                "num_entries": a.values().numel(),
                "num_gradient_entries": counts[arm][0],
            },
            **where,
        )


def measure_peak() -> tuple[float, int, int]:
    """Return seconds, growth of this process's peak, and bytes of the result and the workspace."""
    a = draw(*PEAK)
    spgemm(draw(1000, 3), draw(1000, 3))  # what is loaded once
    results: list[Tensor] = []
    start = time.perf_counter()
    grown = peak_growth(lambda: results.append(spgemm(a, a, max_bytes=WINDOW_BYTES)), "cpu")
    seconds, (c,) = time.perf_counter() - start, results
    parts = (c.crow_indices(), c.col_indices(), c.values())
    return seconds, grown, sum(each.numel() * each.element_size() for each in parts)


def peak_row(where: Environment) -> BenchmarkRow:
    """Return the row of a product in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, check=True, env=os.environ
    )
    seconds, grown, result = json.loads(done.stdout)
    bound = result + WINDOW_BYTES
    return BenchmarkRow.of(
        [seconds],
        topic=TOPIC,
        case=f"spgemm peak: {PEAK[0]} rows of {PEAK[1]}",
        arm=OURS,
        peak_bytes={"device": grown},
        limit=Limit(name="result and workspace", value=bound, unit="B"),
        measured=grown,
        extra={"result_bytes": result, "window_bytes": WINDOW_BYTES},
        **where,
    )


def announce_rows(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the cases and arms."""
    rows = [(f"spgemm {case}", arm) for case, _ in forward_cases() for arm in (OURS, AGAIN, TORCH)]
    rows += [(f"spgemm step: {n} rows of {d}", arm) for n, d in STEPS for arm in (STEP, FILLED)]
    rows += [(f"spgemm peak: {PEAK[0]} rows of {PEAK[1]}", OURS)] * (options.device == "cpu")
    return [row for row in rows if options.match in row[0]]


def measure_rows(options: argparse.Namespace, where: Environment) -> Iterator[BenchmarkRow]:
    """Yield the rows of the cases that the options name."""
    has_graphs = "PENSTOCK_DATA" in os.environ
    for case, make in forward_cases():
        if options.match in f"spgemm {case}" and (has_graphs or " rows of " in case):
            yield from forward_rows(case, *make(), options, where)
    for num_rows, per_row in STEPS:
        if options.match in f"spgemm step: {num_rows} rows of {per_row}":
            yield from step_rows(num_rows, per_row, options, where)
    if options.device == "cpu" and options.match in f"spgemm peak: {PEAK[0]} rows of {PEAK[1]}":
        yield peak_row(where)


if __name__ == "__main__":
    print(json.dumps(measure_peak()))
