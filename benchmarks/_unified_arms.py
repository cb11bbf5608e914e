"""Helpers of the parts of `unified.py`: indices, arms measured side by side, their rows."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from _rows import BenchmarkRow, Limit

ZIPF_EXPONENT = 1.1

Arm = Callable[[torch.Tensor, torch.Tensor], object]
"""Gathers the rows of the first argument into the second, or next to it."""


def indices(kind: str, count: int, num_rows: int, generator: np.random.Generator) -> torch.Tensor:
    """`count` row numbers: all alike, or a few popular ones that lie anywhere in the table."""
    if kind == "uniform":
        return torch.from_numpy(generator.integers(0, num_rows, count))
    ranks = generator.zipf(ZIPF_EXPONENT, count) % num_rows
    return torch.from_numpy(ranks * 2654435761 % num_rows)  # spread over the table


def fill(table: torch.Tensor) -> None:
    """Noise, the same piece again and again: what is drawn anew takes longer than the rest."""
    flat = table.view(-1)
    piece = torch.randint(0, 1000, (min(len(flat), 1 << 26),)).to(flat.dtype)
    for start in range(0, len(flat), len(piece)):
        end = min(start + len(piece), len(flat))
        flat[start:end] = piece[: end - start]


def measure(
    arms: dict[str, Arm], draw: Callable[[], torch.Tensor], out: torch.Tensor, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of every arm, each time for indices that `draw` has made."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(repetitions + 1):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in order:
            arms[name](draw(), out)
            batch = draw()
            start = time.perf_counter()
            arms[name](batch, out)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def repetitions_of(num_bytes: int) -> int:
    """More for what is short: the clock and the threads of a small gather are noisy."""
    return 7 if num_bytes > 64 << 20 else 15 if num_bytes > 1 << 20 else 101


def rows_of(
    case: str,
    seconds: dict[str, list[float]],
    reference: str,
    num_bytes: int,
    where: Any,
    limit: Limit | None = None,
    amount: float = 0,
) -> list[BenchmarkRow]:
    """A row per arm, with how many times faster than the reference it was.

    `limit` is a rate, and `amount`, over the time, is held against it.
    """
    rows = []
    for arm, times in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(times, seconds[reference], strict=True)]
        added = [ours - theirs for ours, theirs in zip(times, seconds[reference], strict=True)]
        extra = {
            "speedup_median": statistics.median(ratios),
            "speedup_quartiles": list(np.quantile(ratios, [0.25, 0.75])),
            "added_microseconds_median": statistics.median(added) * 1e6,
            "bytes_per_second": num_bytes / statistics.median(times),
        }
        held = {} if limit is None else {"measured": amount / statistics.median(times)}
        rows.append(
            BenchmarkRow.of(
                times,
                topic="unified",
                case=case,
                arm=arm,
                extra=extra,
                limit=limit,
                **held,
                **where,
            )
        )
        print(
            f"{case:55s} {arm:26s} {statistics.median(times) * 1e6:10.1f} us "
            f"x{extra['speedup_median']:.2f}",
            file=sys.stderr,
            flush=True,
        )
    return rows
