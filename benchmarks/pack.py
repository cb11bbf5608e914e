"""Addresses for buffers with known lifetimes: Penstock's packer against two greedy strategies.

    python benchmarks/pack.py

Cases: the challenging instances of MiniMalloc (Moffitt, ASPLOS 2023) at their capacity of 1 MiB,
and as low as the time limit allows where the optimum was not known; and 50,000 buffers with
lifetimes as in a training step of 48 layers. Arms: `pack`; best fit, largest buffer first (greedy
by size in Pisarchyk and Lee, 2020); best fit in the order of execution (as TensorFlow Lite's arena
by default). The times of the greedy arms are those of a reference in numpy and say nothing about
the strategies.

The limit is the maximum of the live bytes, which nothing can pass; the fraction is the height over
it.

What to expect, before measuring. Every instance at its capacity within 20 s, since MiniMalloc needs
1 to 15 s of C++ each. Greedy strategies miss it by 10 to 40 %. Fifty thousand buffers take under
two seconds and no search, as the lower bound is met.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path

import numpy as np

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from penstock.errors import InfeasibleError
from penstock.planner import check_packing, pack

CAPACITY = 1048576
INSTANCES = "ABCDEF"
LOWEST = "CD"  # of these the optimum is below the capacity
NUM_LAYERS, NUM_LAYER_OPERATORS, NUM_BUFFERS = 48, 140, 50_000

Lifetimes = list[tuple[int, int, int]]


def instance(directory: Path, name: str) -> Lifetimes:
    with (directory / f"{name}.{CAPACITY}.csv").open() as file:
        return [
            (int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)
        ]


def training_step() -> Lifetimes:
    """Parameters and optimizer state for the whole step, gradients and activations for a part of
    it, intermediate results for a few operators.
    """
    generator = np.random.default_rng(0)
    sizes = 4096 * np.array([1, 4, 4, 4, 16, 16, 16, 32, 64, 1024])
    forward = NUM_LAYERS * NUM_LAYER_OPERATORS
    end = 2 * forward + 10 * NUM_LAYERS
    spans: list[tuple[int, int]] = []

    def moment(first: int, width: int = NUM_LAYER_OPERATORS) -> int:
        return first + int(generator.integers(width))

    for layer in range(NUM_LAYERS):
        backward = 2 * forward - (layer + 1) * NUM_LAYER_OPERATORS
        spans += [(0, end)] * 16
        for _ in range(8):
            spans.append((moment(backward), moment(2 * forward + 10 * layer, 9) + 1))
        for _ in range(18):
            spans.append((moment(layer * NUM_LAYER_OPERATORS), moment(backward) + 1))
    while len(spans) < NUM_BUFFERS:
        start = moment(0, end - 12)
        spans.append((start, start + 1 + min(11, int(generator.geometric(0.4)))))
    return [(*span, int(generator.choice(sizes))) for span in spans]


def greedy(buffers: Lifetimes, order: np.ndarray) -> int:
    """The height of best fit along an order."""
    lower, upper, size = np.array(buffers).T
    height = 0
    placed = np.zeros((4, len(buffers)), dtype=np.int64)  # lower, upper, begin, end
    for count, index in enumerate(order):
        low, high, begin, end = placed[:, :count]
        beside = (low < upper[index]) & (high > lower[index])
        begins = np.sort(begin[beside])
        # Free addresses begin where the furthest end so far is.
        ends = np.maximum.accumulate(end[beside][np.argsort(begin[beside], kind="stable")])
        starts = np.concatenate([[0], ends])
        room = np.append(begins, np.iinfo(np.int64).max) - starts
        room[room < size[index]] = np.iinfo(np.int64).max
        offset = starts[np.argmin(room)] if room.min() < np.iinfo(np.int64).max else starts[-1]
        placed[:, count] = lower[index], upper[index], offset, offset + size[index]
        height = max(height, int(offset + size[index]))
    return height


def row(case: str, arm: str, seconds: list[float], height: int, bound: int, where, **extra):
    measured = BenchmarkRow.of(
        seconds,
        topic="pack",
        case=case,
        arm=arm,
        peak_bytes={"device": height},
        limit=Limit(name="the maximum of live bytes", value=bound, unit="B"),
        measured=height,
        extra=extra,
        **where,
    )
    print(f"{measured}, height {height}", file=sys.stderr, flush=True)
    return measured


def ours(case: str, buffers: Lifetimes, capacity: int | None, options, where) -> BenchmarkRow:
    seconds, heights, cpu = [], [], []
    packing = None
    for seed in range(options.repetitions):
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            packing = pack(buffers, capacity, time_limit=options.time_limit, seed=seed)
        except InfeasibleError as error:
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
            heights.append(error.minimum_device_bytes or 0)
        else:
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
            check_packing(buffers, packing, capacity)
            heights.append(packing.height)
    bound = packing.lower_bound if packing else live_bytes(buffers)
    solved = None if capacity is None else all(height <= capacity for height in heights)
    extra = {"heights": heights, "all_seconds": seconds, "capacity": capacity, "solved": solved}
    extra["cpu_seconds"] = cpu
    extra["proved_optimal"] = bool(packing and packing.optimal)
    return row(case, "penstock", seconds, min(heights), bound, where, **extra)


def greedy_rows(case: str, buffers: Lifetimes, where) -> list[BenchmarkRow]:
    lower, upper, size = np.array(buffers).T
    arms = {
        "best fit by size": np.lexsort((lower - upper, -size)),
        "best fit in order of execution": np.lexsort((-size, lower)),
    }
    rows = []
    for arm, order in arms.items():
        start = time.perf_counter()
        height = greedy(buffers, order)
        seconds = [time.perf_counter() - start]
        rows.append(row(case, arm, seconds, height, live_bytes(buffers), where))
    return rows


def live_bytes(buffers: Lifetimes) -> int:
    lower, upper, size = np.array(buffers).T
    times = np.concatenate([upper, lower])
    change = np.concatenate([-size, size])
    return int(np.cumsum(change[np.argsort(times, kind="stable")]).max())


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="seeds of each case")
    parser.add_argument("--time-limit", type=float, default=60)
    options = parser.parse_args()
    where = environment("cpu")
    pack([(0, 1, 1)])  # builds the library
    directory = Path(os.environ.get("PENSTOCK_DATA", "")) / "minimalloc"
    if directory.exists():
        for name in INSTANCES:
            buffers, case = instance(directory, name), f"minimalloc {name} at {CAPACITY}"
            write_rows([ours(case, buffers, CAPACITY, options, where)], options.out)
            write_rows(greedy_rows(case, buffers, where), options.out)
        for name in LOWEST:
            buffers = instance(directory, name)
            write_rows(
                [ours(f"minimalloc {name}, lowest", buffers, None, options, where)], options.out
            )
    else:
        print("pack: set PENSTOCK_DATA for the instances of MiniMalloc", file=sys.stderr)
    buffers, case = training_step(), f"training step, {NUM_BUFFERS} buffers"
    write_rows([ours(case, buffers, None, options, where)], options.out)
    write_rows(greedy_rows(case, buffers, where), options.out)


if __name__ == "__main__":
    main()
