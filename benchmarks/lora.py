"""LoRA layers, training steps and jobs on one base: `penstock.lora` against stock PEFT.

    python benchmarks/lora.py                        # all parts
    python benchmarks/lora.py --quick                # a small grid, fewer cases
    python benchmarks/lora.py --part layers --arms PEFT penstock
    python benchmarks/lora.py --part bars            # the rows against the bars
    python benchmarks/lora.py --device cuda          # bf16, on a GPU

Part `layers` times a layer forward and backward over a grid of shapes; its arms take turns in one
process (`_lora_arms.py`). Part `crowded` runs the same arm in two processes at once, each with as
many threads as there are cores. Part `training` trains a Llama with adapters on all linear layers
of its blocks, each arm in a process of its own, in rounds. Part `jobs` trains 1, 4 and 8 jobs: all
together on one base, one after the other, and one process each. Ratios are taken within a round.
Part `bytes` counts what the Triton kernels load and store under Triton's interpreter (its times are
the interpreter's). Part `packing` times the schedule of 100,000 samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import _lora_arms
import _lora_bars
import _lora_jobs
from _lora_arms import BASE, COMPILED, OURS, PEFT, UNSLOTH, Shape
from _lora_layers import CROWDED, LAYER, TOPIC, crowded_rows, layer_rows, summary
from _lora_models import Model
from _lora_packing import packing_rows
from _rows import (
    REPOSITORY,
    BenchmarkRow,
    Limit,
    announce,
    argument_parser,
    environment,
    write_rows,
)

HERE = Path(__file__).resolve().parent
PARTS = ("layers", "crowded", "training", "jobs", "bytes", "packing", "bars")
GRIDS = {  # rows, widths, ranks by device and whether it is the quick one
    ("cpu", False): ((512, 2048, 8192), (1024, 2048, 4096), (8, 16, 64, 128)),
    ("cpu", True): ((512, 2048), (1024,), (8, 16, 128)),
    ("cuda", False): ((8192,), (4096, 5120, 8192), (8, 16, 64, 128)),
    ("cuda", True): ((8192,), (4096,), (16,)),
}
DROPOUTS = (0.0, 0.1)
TOKENS = (128, 512, 2048)
JOBS = (1, 4, 8)
ROWS_OF_JOB = 128
GROWTH_BAR = 0.70  # of PEFT's growth, with dropout, at 512 and 2048 tokens
JOBS_BAR = 0.85  # of the time one after the other, with four jobs


class WorkerError(Exception):
    """A process that was started for an arm has failed."""


class Worker:
    """A script beside this one that prints a JSON line at its end.

    Args:
        script: Its file.
        flags: Its options.
        variables: Of its environment.
    """

    def __init__(self, script: str, flags: Sequence[object], **variables: str) -> None:
        path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
        self._name = " ".join([script, *map(str, flags)])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, flags)],
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_warm(self) -> None:
        """Wait for its first line."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.result()

    def result(self) -> Any:
        """Let it go on, and return what its last line says."""
        out, errors = self._process.communicate("go\n")
        if self._process.returncode or not out.strip():
            raise WorkerError(f"{self._name}: {errors.strip()[-2000:] or 'no output'}")
        return json.loads(out.strip().splitlines()[-1])

    def go_on(self) -> None:
        """Let it go on; `result` is still to be called."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def alternate(names: Sequence[str], number: int) -> Sequence[str]:
    """Return names in the order of a round."""
    return names if number % 2 == 0 else tuple(reversed(names))


def training_rows(
    model: Model,
    names: Sequence[str],
    tokens: int,
    dropout: float,
    options: argparse.Namespace,
    where: Any,
) -> list[BenchmarkRow]:
    """Return the rows of a training step: each arm is a process of its own, round by round."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in alternate(names, number):
            flags = [*("--arm", name, "--tokens", tokens, "--dropout", dropout)]
            flags += ["--steps", options.steps, "--threads", options.threads]
            flags += ["--device", options.device, *model.flags]
            worker = Worker("_lora_training.py", flags)
            try:
                runs[name].append(worker.result())
            finally:
                worker.close()
    case = f"training: {model}, {tokens} tokens, r 16, dropout {dropout:g}"
    extra = {"part": "training", "tokens": tokens, "dropout": dropout}
    return _paired_rows(case, runs, PEFT, options, where, extra)


def _paired_rows(
    case: str,
    runs: dict[str, list[dict[str, Any]]],
    reference: str,
    options: argparse.Namespace,
    where: Any,
    extra: dict[str, Any],
) -> list[BenchmarkRow]:
    """Return a row an arm of what processes have told, with ratios to the reference's."""
    medians = {
        name: [statistics.median(run["seconds"]) for run in of_arm] for name, of_arm in runs.items()
    }
    rows = []
    for name, of_arm in runs.items():
        pairs = list(zip(medians[name], medians[reference], strict=True))
        growths = [
            (run["growth_bytes"], other["growth_bytes"])
            for run, other in zip(of_arm, runs[reference], strict=True)
        ]
        peaks = {
            key.removesuffix("_bytes"): int(statistics.median(run[key] for run in of_arm))
            for key in ("growth_bytes", "process_growth_bytes", "process_peak_bytes")
            if key in of_arm[0]
        }
        told = {
            "threads": options.threads,
            "ratio": summary([ours / theirs for ours, theirs in pairs]),
            "growth_ratio": summary([ours / theirs for ours, theirs in growths]),
            "reference": reference,
            "base_bytes": of_arm[0]["base_bytes"],
            "losses": of_arm[0]["losses"],
        }
        row = BenchmarkRow.of(
            medians[name],
            topic=TOPIC,
            case=case,
            arm=name,
            peak_bytes=peaks,
            limit=_limit_of(name, extra),
            measured=(told["growth_ratio"] if name == OURS else told["ratio"])["median"],
            extra={**extra, **told, **{key: of_arm[0][key] for key in _OTHERS if key in of_arm[0]}},
            **where,
        )
        rows.append(row)
    return rows


_OTHERS = ("state_bytes", "num_bases", "facts")


def _limit_of(name: str, extra: dict[str, Any]) -> Limit | None:
    """Return what an arm's growth (training) or time (jobs) over the reference's is held to."""
    if name == OURS:
        least = GROWTH_BAR if extra["dropout"] and extra["tokens"] >= 512 else 1.0
        return Limit(name=f"{least:.2f} x the growth of PEFT", value=least, unit="1")
    if name == _lora_jobs.TOGETHER and extra["jobs"] == 4:
        text = f"{JOBS_BAR:.2f} x {_lora_jobs.ONE_BY_ONE}"
        return Limit(name=text, value=JOBS_BAR, unit="1")
    return None


def run_jobs(
    name: str, num_jobs: int, dropout: float, model: Model, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what the processes of an arm tell together, about a step of all jobs."""
    flags = ["--arm", name, "--rows", ROWS_OF_JOB, "--dropout", dropout, "--steps", options.steps]
    flags += ["--threads", options.threads, "--device", options.device, *model.flags]
    each = [(0, num_jobs)]
    if name == _lora_jobs.PROCESSES:
        each = [(job, 1) for job in range(num_jobs)]
    workers = [
        Worker("_lora_jobs.py", [*flags, "--first", first, "--jobs", number])
        for first, number in each
    ]
    try:
        for worker in workers:
            worker.wait_until_warm()
        for worker in workers:  # all of them train at the same time
            worker.go_on()
        told = [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    sums = {
        key: sum(each[key] for each in told)
        for key in ("growth_bytes", "process_peak_bytes", "base_bytes")
    }
    return {
        **sums,
        "seconds": [max(each["seconds"][0] for each in told)],
        "losses": [losses for each in told for losses in each["losses"]],
        "num_bases": sum(each["num_bases"] for each in told),
        "jobs": num_jobs,
        "facts": told[0]["facts"],
    }


def jobs_rows(
    model: Model, num_jobs: int, dropout: float, options: argparse.Namespace, where: Any
) -> list[BenchmarkRow]:
    """Return the rows of some jobs: seconds are those of one step of each."""
    names = [name for name in _lora_jobs.ARMS if not options.arms or name in options.arms]
    if _lora_jobs.ONE_BY_ONE not in names:
        names.insert(0, _lora_jobs.ONE_BY_ONE)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in alternate(names, number):
            runs[name].append(run_jobs(name, num_jobs, dropout, model, options))
    case = f"jobs: {model}, {num_jobs} jobs of {ROWS_OF_JOB} rows, r 16, dropout {dropout:g}"
    extra = {"part": "jobs", "jobs": num_jobs, "dropout": dropout}
    return _paired_rows(case, runs, _lora_jobs.ONE_BY_ONE, options, where, extra)


def bytes_rows(options: argparse.Namespace, where: Any) -> list[BenchmarkRow]:
    """Return a row a launch of the Triton kernels: counted bytes against the closed form."""
    flags = ["--quick"] if options.quick else []
    worker = Worker("_lora_bytes.py", flags, TRITON_INTERPRET="1")
    rows = []
    for told in worker.result():
        moved = {"memory->program": told["loaded"], "program->memory": told["stored"]}
        rows.append(
            BenchmarkRow.of(
                [told["seconds"]],
                topic=TOPIC,
                case=f"bytes: {told['case']}",
                arm=told["arm"],
                moved_bytes=moved,
                limit=Limit(name="closed form", value=told["closed"], unit="B"),
                measured=sum(moved.values()),
                extra={"part": "bytes", "atomic": told["atomic"], "tables": told["tables"]},
                **where,
            )
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cases of each part, and the arms."""

    layers: list[Shape]
    crowded: list[Shape]
    training: list[tuple[int, float]]
    jobs: list[tuple[int, float]]
    layer_arms: tuple[str, ...]
    training_arms: tuple[str, ...]
    model: Model

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """Return the cases that a command line asks for."""
        kind = "cpu" if options.device == "cpu" else "cuda"
        rows, widths, ranks = GRIDS[kind, options.quick]
        shapes = [
            Shape(rows=num_rows, width=width, rank=rank, dropout=dropout)
            for width in options.widths or widths
            for num_rows in options.layer_rows or rows
            for rank in options.ranks or ranks
            for dropout in options.dropouts
        ]
        crowded = [
            Shape(rows=num_rows, width=1024, rank=16, dropout=dropout)
            for num_rows in options.layer_rows or (512, 2048)
            for dropout in options.dropouts
        ]
        tokens = options.tokens or (TOKENS[:2] if options.quick else TOKENS)
        jobs = options.jobs or (JOBS[:2] if options.quick else JOBS)
        all_layers = _lora_arms.ARMS if kind == "cpu" else (*_lora_arms.ARMS, UNSLOTH)
        return cls(
            layers=shapes,
            crowded=crowded if kind == "cpu" else [],
            training=[(number, dropout) for number in tokens for dropout in options.dropouts],
            jobs=[(number, dropout) for number in jobs for dropout in options.dropouts],
            layer_arms=_choose(all_layers, options.arms),
            training_arms=_choose((PEFT, COMPILED, OURS), options.arms),
            model=Model(hidden=options.hidden, layers=options.layers, heads=options.heads),
        )

    def say(self, parts: Sequence[str]) -> None:
        """Print every case and arm."""
        crowded = [name for name in self.layer_arms if name != BASE]
        for part, cases, arms in (
            ("layers", [f"{LAYER}: {shape}" for shape in self.layers], self.layer_arms),
            ("crowded", [f"{CROWDED}: {shape}" for shape in self.crowded], crowded),
            ("training", [f"training: {case}" for case in self.training], self.training_arms),
            ("jobs", [f"jobs: {case}" for case in self.jobs], _lora_jobs.ARMS),
            ("bytes", ["bytes"], ["all kernels"]),
            ("packing", ["packing"], ["all arms"]),
        ):
            if part in parts:
                announce((case, arm) for case in cases for arm in arms)


def _choose(names: Sequence[str], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the arms that are wanted; PEFT is always one, as ratios are taken to it."""
    return tuple(name for name in names if not wanted or name in wanted or name == PEFT)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="a small grid, fewer cases")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="PEFT is always one")
    parser.add_argument("--layer-rows", nargs="+", type=int, metavar="M")
    parser.add_argument("--widths", nargs="+", type=int, metavar="K")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="R")
    parser.add_argument("--dropouts", nargs="+", type=float, default=list(DROPOUTS), metavar="P")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--jobs", nargs="+", type=int)
    parser.add_argument("--hidden", type=int, default=1024, help="of the Llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5, help="of processes")
    parser.add_argument("--steps", type=int, default=3, help="of a process")
    parser.add_argument("--budget-seconds", type=float, default=12.0, help="of a shape, roughly")
    options = parser.parse_args(given)
    if options.part is None:
        options.part = list(PARTS) if options.device == "cpu" else ["layers", "bars"]
    return options


def measure(plan: Plan, options: argparse.Namespace, where: Any) -> None:
    """Measure the parts that are asked for; rows are written after each case."""

    def write(rows: list[BenchmarkRow]) -> None:
        for row in rows:
            print(row, file=sys.stderr, flush=True)
        write_rows(rows, options.out)

    torch.set_num_threads(options.threads)
    for shape in plan.layers if "layers" in options.part else ():
        budget = options.budget_seconds
        write(layer_rows(plan.layer_arms, shape, options.device, budget, where))
    for shape in plan.crowded if "crowded" in options.part else ():
        names = tuple(name for name in plan.layer_arms if name not in (BASE, COMPILED))
        crowded = {"rounds": 3 * options.rounds, "num_steps": 5, "threads": options.threads}
        write(crowded_rows(shape, names=names, where=where, **crowded))
    for tokens, dropout in plan.training if "training" in options.part else ():
        names = plan.training_arms
        write(training_rows(plan.model, names, tokens, dropout, options, where))
    for num_jobs, dropout in plan.jobs if "jobs" in options.part else ():
        write(jobs_rows(plan.model, num_jobs, dropout, options, where))
    if "bytes" in options.part:
        write(bytes_rows(options, where))
    if "packing" in options.part:
        write(packing_rows(where, num_samples=1000 if options.quick else 100_000))


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    plan = Plan.of(options)
    if options.dry_run:
        plan.say(options.part)
        return
    where = environment(options.device)
    measure(plan, options, where)
    if "bars" in options.part:
        _lora_bars.show(where["device_name"], options.out)


if __name__ == "__main__":
    main()
