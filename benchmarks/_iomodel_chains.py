"""Rows of chains: time and extra peak of memory of modules in chunks, beside them unchunked.

Every arm runs in a process of its own, whose peak is that of its resident memory while it runs,
less what was resident before; gradients of weights are there before. Arms run in turn. Cases are
forward alone ("forward") and with gradients of the input and the weights ("step"), where one arm
more adds to the gradients that are there (`accumulate=True`). Rows hold the predicted time over the
measured one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _rows import BenchmarkRow, Limit

ARMS = ("unchunked", "run_chain", "run_chain, accumulate")
CASES = {
    # by name: rows, width, kind
    "MLP 4096 x 16384, forward": (4096, 4096, "mlp"),
    "MLP 4096 x 16384, step": (4096, 4096, "mlp"),
    "cross-entropy 128k of width 256, forward": (4096, 256, "loss"),
    "cross-entropy 128k of width 256, step": (4096, 256, "loss"),
    "norms 4096, forward": (16384, 4096, "norms"),
    "norms 4096, step": (16384, 4096, "norms"),
    "gate 4096, forward": (16384, 4096, "gate"),
}
VOCABULARY = 128 * 1024
REPETITIONS = 3


def chain_rows(where: Any, device: str, match: str = "") -> Iterator[BenchmarkRow]:
    """Two rows for each case; the one in chunks is held against the other."""
    for case in (each for each in CASES if match in each):
        arms = ARMS if case.startswith("MLP") and case.endswith("step") else ARMS[:2]
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for number in range(REPETITIONS):
            for arm in arms if number % 2 == 0 else reversed(arms):
                found[arm].append(_run_arm(case, arm))
        seconds = {arm: [each["seconds"] for each in found[arm]] for arm in arms}
        peaks = {arm: statistics.median(each["peak"] for each in found[arm]) for arm in arms}
        whole = statistics.median(seconds["unchunked"])
        for arm in arms:
            extra = {key: found[arm][0][key] for key in ("predicted_seconds", "segments")}
            predicted = statistics.median(
                each["predicted_seconds"] / each["seconds"] for each in found[arm]
            )
            extra["predicted_over_measured"] = predicted
            extra["peak_of_unchunked"] = peaks[arm] / max(1, peaks["unchunked"])
            yield BenchmarkRow.of(
                seconds[arm],
                topic="iomodel",
                case=f"chain, {case}",
                arm=arm,
                limit=Limit(name="unchunked", value=whole, unit="s"),
                peak_bytes={"device": int(peaks[arm])},
                extra=extra,
                **where,
            )


def _run_arm(case: str, arm: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--case", case, "--arm", arm],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _make(kind: str, rows: int, width: int) -> tuple[list[Any], list[Any]]:
    """Modules, and arguments of the last one."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    if kind == "mlp":
        return [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)], []
    if kind == "loss":

        def loss(scores: Any, labels: Any) -> Any:
            return F.cross_entropy(scores, labels, reduction="sum")

        return [nn.Linear(width, VOCABULARY, bias=False), loss], [
            torch.randint(0, VOCABULARY, (rows,))
        ]
    if kind == "norms":
        return [nn.LayerNorm(width), nn.GELU(), nn.LayerNorm(width), nn.SiLU()], []

    def gate(x: Any) -> Any:
        value, share = x.chunk(2, dim=-1)
        return value * torch.sigmoid(share)

    return [nn.SiLU(), gate, nn.GELU()], []


def _reset_peak() -> int:
    """Reset the peak of resident memory, and return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def main() -> None:
    """Run one arm, and print its time and its peak."""
    import torch

    from penstock.iomodel import plan_chain, run_chain

    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--chunk-rows", type=int, help="instead of the plan's")
    parser.add_argument("--feature-blocks", type=int, help="instead of the plan's")
    options = parser.parse_args()
    rows, width, kind = CASES[options.case]
    torch.manual_seed(0)
    modules, others = _make(kind, rows, width)
    is_step = options.case.endswith("step")
    x = torch.randn(rows, width, requires_grad=is_step)
    weights = [w for m in modules if isinstance(m, torch.nn.Module) for w in m.parameters()]
    with torch.set_grad_enabled(is_step):
        plan = plan_chain(modules, x, *others)

    def call(count: int) -> Any:
        operands = x[:count], *(each[:count] for each in others)
        if options.arm != "unchunked" and count == rows:
            return run_chain(
                modules,
                *operands,
                plan=None if options.chunk_rows or options.feature_blocks else plan,
                chunk_rows=options.chunk_rows,
                feature_blocks=options.feature_blocks,
                accumulate=options.arm == ARMS[2],
            )
        value = operands[0]
        for module in modules[:-1]:
            value = module(value)
        return modules[-1](value, *operands[1:])

    def run(count: int = rows) -> None:
        if not is_step:
            with torch.no_grad():
                call(count)
            return
        for gradient in gradients:
            gradient.zero_()
        result = call(count)
        result.backward(seed[:count] if result.dim() else None)

    gradients = [torch.zeros_like(each) for each in (x, *weights)] if is_step else []
    for each, gradient in zip((x, *weights), gradients, strict=False):
        each.grad = gradient
    seed = torch.ones(rows, width)
    run()  # so that no time is of memory that the machine itself has never had
    before, times = _reset_peak(), []
    for _ in range(1 if kind in ("mlp", "loss") else 5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    is_chunked = options.arm != "unchunked"
    found = {
        "seconds": min(times),
        "peak": _status("VmHWM") - before,
        "predicted_seconds": plan.predicted_seconds if is_chunked else plan.unchunked_seconds,
        "segments": [
            [list(each.operators), each.chunk_rows, each.feature_blocks, each.level]
            for each in plan.segments
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
