"""What one small saved tensor costs: thousands of operators on 16 floats, with and without hooks.

The time is the processor's, which neighbours disturb less than the clock: forward, backward and
our threads. The arms of a round run one after the other, in an order that alternates. One arm is a
yardstick: a pair of hooks in C that does nothing but keep `Tensor.data`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock
from _rows import BenchmarkRow, Limit
from penstock.codegen import load_library

BAR_SECONDS = 3e-6  # for a save and its restore, above stock
WARMUPS = 2
BUDGETS = {  # of the arms with an `Offload`
    "offload": None,
    "offload device_memory=1GiB": "1GiB",
    "offload device_memory=16KiB": "16KiB",
}
YARDSTICK = "alias hooks in C"
ARMS = ("keep", "identity hooks", YARDSTICK, *BUDGETS)


def chain(x: torch.Tensor, weight: torch.Tensor, num_operators: int) -> torch.Tensor:
    """Save `num_operators` tensors of 64 bytes."""
    for _ in range(num_operators):
        x = x.sin()
    return x.sum()


def scaled(x: torch.Tensor, weight: torch.Tensor, num_operators: int) -> torch.Tensor:
    """Save as many in half as many operators, every second one the parameter."""
    for _ in range(num_operators // 2):
        x = x * weight
    return x.sum()


def views(x: torch.Tensor, weight: torch.Tensor, num_operators: int) -> torch.Tensor:
    """Save two views of one storage per product."""
    total, y = torch.zeros(()), x * 2
    for _ in range(num_operators // 2):
        total = total + (y[1:] * y[:-1]).sum()
    return total


CASES = {"saved tensors": chain, "saved parameters": scaled, "saved views": views}


def step_seconds(run: Callable[..., torch.Tensor], num_saves: int, context: Any) -> float:
    """Processor time of a forward and a backward pass."""
    x = torch.linspace(-1, 1, 16).requires_grad_()
    weight = torch.full((16,), 0.999).requires_grad_()
    gc.collect()
    gc.disable()
    start = time.process_time()
    with context:
        run(x, weight, num_saves).backward()
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def saves_rows(*, rounds: int, store: str, where: Any, num_saves: int = 16_000) -> Any:
    """A row per case and arm, with the microseconds of one save above stock."""
    torch.set_num_threads(1)
    offloads = {arm: penstock.offload(store, device_memory=b) for arm, b in BUDGETS.items()}
    pairs = {"identity hooks": (lambda x: x, lambda x: x), YARDSTICK: _alias_hooks()}
    rows = []
    for name, run in CASES.items():
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for index in range(WARMUPS + rounds):
            for arm in ARMS if index % 2 == 0 else reversed(ARMS):
                context = offloads.get(arm, contextlib.nullcontext())
                if arm in pairs:
                    context = torch.autograd.graph.saved_tensors_hooks(*pairs[arm])
                seconds = step_seconds(run, num_saves, context)
                if index >= WARMUPS:
                    times[arm].append(seconds)
        rows += [_row(name, arm, times, num_saves, where) for arm in ARMS]
    for offload in offloads.values():
        offload.close()
    return rows


def _alias_hooks() -> Any:
    """Return a pair of hooks in C that keeps an alias of each tensor and does nothing else."""
    library = load_library(
        "alias_hooks",
        Path(__file__).with_name("_alias_hooks.cpp"),
        include_python=True,
        functions={"alias_hooks": (ctypes.py_object, [ctypes.py_object])},
    )
    return library.alias_hooks(torch.Tensor.data)


def _row(
    case: str, arm: str, times: dict[str, list[float]], num_saves: int, where: Any
) -> BenchmarkRow:
    pairs = list(zip(times[arm], times["keep"], strict=True))
    added = [(ours - stock) / num_saves for ours, stock in pairs]
    fastest = (min(times[arm]) - min(times["keep"])) / num_saves
    limit = Limit(name="3 microseconds a save above keep", value=BAR_SECONDS, unit="s")
    return BenchmarkRow.of(
        times[arm],
        topic="offload",
        case=f"{num_saves} {case}",
        arm=arm,
        limit=None if arm == "keep" else limit,
        measured=None if arm == "keep" else max(0.0, statistics.median(added)),
        extra={
            "added_microseconds_median": statistics.median(added) * 1e6,
            "added_microseconds_of_minima": fastest * 1e6,
            "time_ratio_median": statistics.median(ours / stock for ours, stock in pairs),
            "time_ratio_of_minima": min(times[arm]) / min(times["keep"]),
        },
        **where,
    )
