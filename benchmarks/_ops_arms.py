"""Arms of the operators: times in turns, the growth of a step's peak, and rows of both."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from _rows import BenchmarkRow, Environment, Limit

TOPIC = "ops"
OURS = "penstock"


def time_arms(
    arms: Mapping[str, Callable[[], Any]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Return the seconds of each arm in each round, after one that does not count."""
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(-1, rounds):
        for arm in list(arms)[:: 1 if number % 2 else -1]:
            wait(device)
            start = time.perf_counter()
            arms[arm]()
            wait(device)
            if number >= 0:
                times[arm].append(time.perf_counter() - start)
    return times


def wait(device: str) -> None:
    """Wait for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed_rows(
    case: str,
    arms: Mapping[str, Callable[[], Any]],
    bars: Mapping[str, float],
    options: Any,
    where: Environment,
    **extra: Any,
) -> Iterator[BenchmarkRow]:
    """Yield a row of each arm; `bars` are the least times of ours that an arm should take."""
    times = time_arms(arms, options.rounds, options.device)
    for arm, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times[OURS], strict=True)]
        limit = (
            Limit(name=f"{bars[arm]:g} x {OURS}", value=bars[arm], unit="1")
            if arm in bars
            else None
        )
        yield BenchmarkRow.of(
            seconds,
            topic=TOPIC,
            case=case,
            arm=arm,
            limit=limit,
            measured=statistics.median(ratios) if limit else None,
            extra={
                "times_of_ours": statistics.median(ratios),
                "least_and_most_times_of_ours": [min(ratios), max(ratios)],
                "num_threads": torch.get_num_threads(),
                **extra,
            },
            **where,
        )


def peak_growth(step: Callable[[], Any], device: str) -> int:
    """Return how far the peak of memory is above what was there before a step."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _read_status("VmRSS")
    step()
    return _read_status("VmHWM") - before


def _read_status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * 1024
