"""A LoRA layer over a grid of shapes: arms take turns in one process, ratios are within a round.

As a script it serves an oversubscribed machine (`Server`): it holds the arms of a shape and runs
the one whose name it reads, so that two of them run the same arm at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _lora_arms import COMPILED, OURS, PEFT, LayerStep, Operands, Shape, make_step, reason_against
from _rows import BenchmarkRow, Limit

TOPIC = "lora"
LAYER, CROWDED = "layer", "two processes at once"
SHORT_SECONDS = 0.25  # an arm below it is run once more before each run that counts
LEAST_ROUNDS, MOST_ROUNDS = 7, 41
CELL_BAR, CROWDED_BAR = 1.03, 1.0  # times PEFT's time


class Failed(Exception):
    """An arm that does not run on a shape, with the reason."""


def prepare(names: Sequence[str], shape: Shape, device: str) -> tuple[dict[str, Any], dict]:
    """Return the steps of arms by name, each run twice; and of arms that do not run, why.

    The reason stands in the rows of the others, as `not_run`.
    """
    if COMPILED in names:
        torch.compiler.reset()
    operands = Operands.draw(shape, device)
    steps: dict[str, LayerStep] = {}
    not_run: dict[str, str] = {}
    for name in names:
        reason = reason_against(name, shape, device)
        if reason is None:
            try:
                step = make_step(name, shape, operands, device)
                step()
                step()
                steps[name] = step
            except Exception as error:
                if name in (PEFT, OURS):
                    raise
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                logging.getLogger(__name__).warning("%s: %s: %s", shape, name, reason)
        if reason is not None:
            not_run[name] = reason
    return steps, not_run


def timed(step: LayerStep) -> float:
    """Return the seconds of one step."""
    step.wait()
    start = time.perf_counter()
    step()
    step.wait()
    return time.perf_counter() - start


def measure(steps: dict[str, LayerStep], budget_seconds: float) -> dict[str, list[float]]:
    """Return the seconds of every arm, round by round, in an order that alternates.

    Args:
        steps: The arms, each run at least once.
        budget_seconds: Roughly the time of all rounds together.
    """
    rough = {name: timed(step) for name, step in steps.items()}
    is_short = {name: seconds < SHORT_SECONDS for name, seconds in rough.items()}
    of_round = sum(rough[name] * (1 + is_short[name]) for name in steps)
    num_rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_seconds / of_round)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with _no_collection():
        for number in range(num_rounds):
            for name in list(steps) if number % 2 == 0 else list(reversed(steps)):
                if is_short[name]:
                    steps[name]()
                seconds[name].append(timed(steps[name]))
    return seconds


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's collector away from measured runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def allocated_peak(step: LayerStep) -> int:
    """Return the peak bytes of a step beyond those before it: outputs, gradients, scratch.

    On the CPU the allocator's events are added up by the profiler: they are exact for all that
    is allocated through torch, compiled code included.
    """
    step.operands.x.grad = step.operands.down.grad = step.operands.up.grad = None
    return peak_of(step, step.device)


def peak_of(run: Any, device: str) -> int:
    """Return the peak of bytes that a function allocates through torch."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        # Torch 2.11 warns without; where events accumulate all are made objects, which takes long.
        acc_events=torch.__version__.startswith("2.11."),
    ) as profiler:
        run()
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results is not None
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def ratios_to_peft(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """Return an arm's time over PEFT's: median and quartiles of the rounds, and of the minima."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[PEFT], strict=True)]
    return {**summary(ratios), "of_minima": min(seconds[name]) / min(seconds[PEFT])}


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of ratios."""
    lower = upper = ratios[0]
    if len(ratios) > 1:
        lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": statistics.median(ratios), "lower": lower, "upper": upper}


def layer_rows(
    names: Sequence[str], shape: Shape, device: str, budget_seconds: float, where: Any
) -> list[BenchmarkRow]:
    """Return the rows of one shape: time of every arm, and the bytes that it keeps."""
    steps, not_run = prepare(names, shape, device)
    seconds = measure(steps, budget_seconds)
    element_bytes = next(iter(steps.values())).operands.x.element_size()
    rows = []
    for name, step in steps.items():
        ratio = ratios_to_peft(seconds, name)
        saved, integers = step.saved_bytes()
        rows.append(
            BenchmarkRow.of(
                seconds[name],
                topic=TOPIC,
                case=f"{LAYER}: {shape}",
                arm=name,
                peak_bytes={"saved": saved, "step": allocated_peak(step)},
                limit=_cell_limit(name),
                measured=ratio["median"],
                extra={
                    "part": LAYER,
                    **_fields(shape),
                    "threads": torch.get_num_threads(),
                    "ratio_to_peft": ratio,
                    "most_saved_bytes": shape.saved_elements * element_bytes,
                    "saved_integer_bytes": integers,
                    "not_run": not_run,
                },
                **where,
            )
        )
    return rows


def _fields(shape: Shape) -> dict[str, Any]:
    names = ("rows", "width", "rank", "dropout")
    return {name: getattr(shape, name) for name in names}


def _cell_limit(name: str) -> Limit | None:
    return Limit(name="1.03 x PEFT", value=CELL_BAR, unit="1") if name == OURS else None


class Server:
    """A process that runs the arms of one shape when it is told to.

    Args:
        shape: The layer.
        names: The arms.
        threads: Threads of the process.
    """

    def __init__(self, shape: Shape, names: Sequence[str], threads: int) -> None:
        flags = [("--rows", shape.rows), ("--width", shape.width), ("--rank", shape.rank)]
        flags += [("--dropout", shape.dropout), ("--threads", threads)]
        command = [sys.executable, __file__, *(str(word) for flag in flags for word in flag)]
        self._process = subprocess.Popen(
            [*command, "--arms", *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()  # that the arms are ready

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(f"a process ended with status {self._process.wait()}")
        return json.loads(line)

    def start(self, name: str, num_steps: int) -> None:
        """Start some steps of an arm."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, num_steps]) + "\n")
        self._process.stdin.flush()

    def finish(self) -> float:
        """Return the seconds of a step, when all that were started are done."""
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def crowded_rows(
    shape: Shape, *, names: Sequence[str], rounds: int, num_steps: int, threads: int, where: Any
) -> list[BenchmarkRow]:
    """Return the rows of a shape in two processes at once, each with all the threads."""
    servers = [Server(shape, names, threads) for _ in range(2)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(rounds):
            for name in names if number % 2 == 0 else tuple(reversed(names)):
                for server in servers:
                    server.start(name, num_steps)
                seconds[name].append(max(server.finish() for server in servers))
    finally:
        for server in servers:
            server.close()
    rows = []
    for name in names:
        ratio = ratios_to_peft(seconds, name)
        limit = Limit(name="PEFT", value=CROWDED_BAR, unit="1") if name == OURS else None
        extra = {"part": CROWDED, **_fields(shape), "threads": threads, "ratio_to_peft": ratio}
        rows.append(
            BenchmarkRow.of(
                seconds[name],
                topic=TOPIC,
                case=f"{CROWDED}: {shape}",
                arm=name,
                limit=limit,
                measured=ratio["median"],
                extra=extra,
                **where,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rows", "width", "rank", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, required=True)
    parser.add_argument("--arms", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = Shape(
        rows=options.rows, width=options.width, rank=options.rank, dropout=options.dropout
    )
    steps, not_run = prepare(options.arms, shape, "cpu")
    if not_run:
        raise Failed(str(not_run))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, num_steps = json.loads(line)
        with _no_collection():
            start = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            seconds = time.perf_counter() - start
        print(json.dumps(seconds / num_steps), flush=True)


if __name__ == "__main__":
    main()
