"""A step of an optimizer on the rows of a table that have a gradient, against PyTorch's optimizers.

    python benchmarks/sparse_step.py

The table has 1M rows of 128 floats; a batch has 65,536 rows, some of them several times. What is
timed is `optimizer.step()` with the gradient in place; every repetition has other rows. All arms of
a case get the same gradients, one after the other, in an order that alternates.

What to expect, before measuring. A step must read every gradient once and read and write each
different row and its state: for Adam and 63,500 different rows of 512 bytes 229 MB, for Adagrad
163 MB, for SGD 98 MB. By operators of torch the same step writes and reads some twenty intermediate
results of 33 MB, in memory that the kernel has to give anew: well over 1 GB. So it should take a
fifth of the time, and about as long as copying these bytes from one place to another (the limit).
The dense optimizer goes over all 1M rows, sixteen times as many, whatever was used.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from _unified_arms import indices

NUM_ROWS, WIDTH, NUM_INDICES = 1_000_000, 128, 65_536
REPETITIONS = 9
STATES = {"SGD": 0, "Adagrad": 1, "Adam": 2}
# PyTorch's own: the sparse one, then the dense one, whose `fused` is the fastest on the CPU.
SPARSE = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.SparseAdam}
DENSE = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.Adam}

Step = Callable[[torch.Tensor, torch.Tensor], float]  # of indices and gradients; returns seconds


def timed(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def sparse(index: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """As it comes from autograd, duplicates and all."""
    shape = (NUM_ROWS, WIDTH)
    return torch.sparse_coo_tensor(index[None], gradients, shape, check_invariants=False)


def table_step(name: str, *, compiled: bool) -> Step:
    """Penstock's optimizer, by C++ or as on a machine without a compiler."""
    from penstock.unified import empty, optim
    from penstock.unified.optim import _updates

    table = empty((NUM_ROWS, WIDTH), requires_grad=True)
    optimizer = getattr(optim, name)([table], lr=0.01)
    library = _updates._library

    def step(index: torch.Tensor, gradients: torch.Tensor) -> float:
        table.grad = sparse(index, gradients)
        _updates._library = library if compiled else lambda: None  # type: ignore[assignment]
        try:
            return timed(optimizer)
        finally:
            _updates._library = library

    return step


def embedding_step(name: str) -> Step:
    """PyTorch's sparse optimizer, on the weight of nn.Embedding(sparse=True)."""
    weight = torch.nn.Embedding(NUM_ROWS, WIDTH, sparse=True).weight
    optimizer = SPARSE[name]([weight], lr=0.01)

    def step(index: torch.Tensor, gradients: torch.Tensor) -> float:
        weight.grad = sparse(index, gradients)
        return timed(optimizer)

    return step


def dense_step(name: str, *, fused: bool) -> Step:
    """PyTorch's dense optimizer, on all rows."""
    weight = torch.nn.Parameter(torch.zeros(NUM_ROWS, WIDTH))
    optimizer = DENSE[name]([weight], lr=0.01, fused=fused)
    weight.grad = torch.zeros(NUM_ROWS, WIDTH)

    def step(index: torch.Tensor, gradients: torch.Tensor) -> float:
        assert weight.grad is not None
        weight.grad.zero_().index_add_(0, index, gradients)
        return timed(optimizer)

    return step


def copying_seconds(num_bytes: int) -> float:
    """How long it takes to read half of the bytes and to write them elsewhere."""
    source = torch.ones(num_bytes // 8)
    target, seconds = torch.empty_like(source).zero_(), []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measured(name: str, kind: str, repetitions: int, where: Any) -> list[BenchmarkRow]:
    """All arms of one case."""
    import numpy as np

    arms = {
        "penstock, C++": table_step(name, compiled=True),
        "penstock, torch": table_step(name, compiled=False),
        f"torch.optim.{SPARSE[name].__name__}, sparse": embedding_step(name),
        f"torch.optim.{DENSE[name].__name__}, dense": dense_step(name, fused=False),
        f"torch.optim.{DENSE[name].__name__}, dense, fused": dense_step(name, fused=True),
    }
    generator = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    different = []
    for number in range(repetitions + 1):  # the first one warms up
        index = indices(kind, NUM_INDICES, NUM_ROWS, generator)
        gradients = torch.randn(NUM_INDICES, WIDTH)
        different.append(len(index.unique()))
        for arm in arms if number % 2 else reversed(arms):
            spent = arms[arm](index, gradients)
            if number:
                seconds[arm].append(spent)
    num_rows = statistics.median(different)
    num_bytes = WIDTH * 4 * int(NUM_INDICES + 2 * num_rows * (1 + STATES[name]))
    limit = Limit(
        name="the time of copying the bytes of a step", value=copying_seconds(num_bytes), unit="s"
    )
    case = f"{name}, {NUM_ROWS} rows of {WIDTH} floats, {NUM_INDICES} {kind} indices"
    rows = []
    for arm, times in seconds.items():
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(times, seconds["penstock, C++"], strict=True)
        )
        extra = {"times_as_long_as_ours": ratio, "num_different_rows": num_rows}
        row = BenchmarkRow.of(
            times,
            topic="sparse_step",
            case=case,
            arm=arm,
            moved_bytes={"memory": num_bytes} if arm == "penstock, C++" else {},
            limit=limit,
            extra=extra,
            **where,
        )
        rows.append(row)
        print(f"{row}, x{ratio:.2f}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--optimizer", nargs="+", choices=list(STATES), default=list(STATES))
    options = parser.parse_args()
    if options.device != "cpu":
        print("sparse_step: tables are updated by the CPU; no rows", file=sys.stderr)
        return
    where = environment(options.device)
    for name in options.optimizer:
        for kind in ("uniform", "zipf"):
            write_rows(measured(name, kind, options.repetitions, where), options.out)


if __name__ == "__main__":
    main()
