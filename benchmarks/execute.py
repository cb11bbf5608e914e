"""Steps that run as planned against plain eager training: time, and what the system saw of memory.

Each measurement is a process of its own; eager and planned ones take turns, so that what else the
machine does hits both. Plans are made first, from measured operators and links, and are kept in
`--plans`; `--prepare` makes them and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from _train import memory_bytes, reset_peak

CASE = "gpt2 hidden 512 layers 6 seq 512 batch 4 vocab 8192 adamw"
ARMS = {  # share of what the full plan needs, tier, and the most times eager that a step may take
    "full": (1.0, "host", 1.05),
    "1/4 host": (1 / 4, "host", 1.10),
    "1/4 file": (1 / 4, "file", 1.10),
    "1/12 host": (1 / 12, "host", 1.15),
    "1/12 file": (1 / 12, "file", 1.15),
}
_PAGE_SHARE, _LEAST_SLACK = 0.02, 8 * 2**20


def gpt2() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=512,
        n_layer=6,
        n_head=8,
        n_positions=512,
        vocab_size=8192,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(8192, (4, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, {"input_ids": ids, "labels": ids}


def prepare(plans: Path, store: str, time_limit: float) -> None:
    """Capture, measure and plan; one file for each arm."""
    from penstock.errors import InfeasibleError
    from penstock.executor import executable
    from penstock.graph import capture, measure
    from penstock.memory import probe
    from penstock.planner import plan

    plans.mkdir(parents=True, exist_ok=True)
    if not (plans / "graph.json.gz").exists():
        graph = capture(*gpt2())
        measured = executable(measure(graph, num_runs=3))
        measured.save(plans / "graph.json.gz")
    from penstock.graph import StepGraph

    graph = StepGraph.load(plans / "graph.json.gz")
    machine = probe(store)
    full = plan(graph, machine=machine, time_limit=time_limit)
    full.save(plans / "full.json")
    for arm, (share, tier, _) in ARMS.items():
        if share == 1:
            continue
        budget = int(full.peak_device_bytes * share)
        below: dict[str, Any] = {"store": store} if tier == "file" else {"host_memory": "8GiB"}
        found = None
        while found is None:
            try:
                found = plan(
                    graph, device_memory=budget, machine=machine, time_limit=time_limit, **below
                )
            except InfeasibleError as error:
                budget = int(max(error.minimum_device_bytes or 0, budget) * 1.02)
        found.save(plans / f"{file_name(arm)}.json")
        print(
            arm,
            f"{found.peak_device_bytes / full.peak_device_bytes:.3f} of the memory,",
            f"{found.step_seconds / full.step_seconds:.3f} of the time",
            file=sys.stderr,
        )


def file_name(arm: str) -> str:
    return arm.replace("/", "_").replace(" ", "_")


def child(arm: str, plans: Path, store: str, num_steps: int) -> dict[str, Any]:
    """Train a few steps in this process; returns times and peaks."""
    model, optimizer, batch = gpt2()
    step: Callable[[Any], torch.Tensor]
    report = None
    if arm == "eager":

        def eager(batch: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        step, planned = eager, None
    else:
        from penstock.executor import bind
        from penstock.graph import StepGraph
        from penstock.planner import Plan

        plan = Plan.load(plans / f"{file_name(arm)}.json")
        graph = StepGraph.load(plans / "graph.json.gz")
        planned = bind(plan, model, optimizer, graph=graph, store=store)
        step = planned
    torch.manual_seed(1)
    losses = [step(batch).item()]
    reset_peak()
    before, seconds = memory_bytes("VmRSS"), []
    for _ in range(num_steps):
        begin = time.perf_counter()
        losses.append(step(batch).item())
        seconds.append(time.perf_counter() - begin)
    growth = memory_bytes("VmHWM") - before
    result: dict[str, Any] = {"seconds": seconds, "growth_bytes": growth, "losses": losses}
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        state.update(tensor.contiguous().numpy().tobytes())
    result["state"] = state.hexdigest()
    if planned is not None:
        report = planned.report()
        result["report"] = report.to_dict()
        planned.close()
    return result


def run_child(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", arm, "--plans", str(arguments.plans)]
    command += ["--store", arguments.store, "--steps", str(arguments.steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(arm: str, runs: list[tuple[dict[str, Any], dict[str, Any]]]) -> BenchmarkRow:
    bar = ARMS[arm][-1]
    seconds = [value for _, planned in runs for value in planned["seconds"]]
    ratios = [
        statistics.median(planned["seconds"]) / statistics.median(eager["seconds"])
        for eager, planned in runs
    ]
    eager, planned = runs[0]
    report = planned["report"]
    return BenchmarkRow.of(
        seconds,
        topic="execute",
        case=CASE,
        arm=arm,
        limit=Limit(name=f"{bar} x eager", value=bar, unit="1"),
        measured=statistics.median(ratios),
        moved_bytes=report["moved_bytes"],
        peak_bytes={
            "device": report["arena_bytes"] + report["workspace_bytes"],
            "host": report["host_bytes"],
            "file": report["file_bytes"],
        },
        extra={
            "times_eager": ratios,
            "eager_median_seconds": statistics.median(eager["seconds"]),
            "same_bits_as_eager": planned["state"] == eager["state"]
            and planned["losses"] == eager["losses"],
            "growth_bytes": max(planned["growth_bytes"] for _, planned in runs),
            "eager_growth_bytes": max(eager["growth_bytes"] for eager, _ in runs),
            "report": report,
        },
        **environment(),
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--plans", type=Path, default=Path("/tmp/penstock-execute"))
    parser.add_argument("--store", default="/tmp")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--time-limit", type=float, default=15.0, help="of each plan, seconds")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--child")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child, arguments.plans, arguments.store, arguments.steps)))
        return
    if arguments.prepare or not (arguments.plans / "full.json").exists():
        prepare(arguments.plans, arguments.store, arguments.time_limit)
    if arguments.prepare:
        return
    for arm in arguments.arms:
        runs = [
            (run_child("eager", arguments), run_child(arm, arguments))
            for _ in range(arguments.rounds)
        ]
        row = rows_of(arm, runs)
        print(arm, [f"{ratio:.3f}" for ratio in row.extra["times_eager"]], file=sys.stderr)
        write_rows([row], arguments.out)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
