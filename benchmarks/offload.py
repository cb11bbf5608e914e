"""Activation offloading against keeping, checkpointing and the peers: time, peak and bytes.

Every measurement is a process of its own (`_train.py`), and the arms of one round run one after the
other, in an order that alternates from round to round: interleaved in one process, the arms change
the allocator under each other and give false ratios. Ratios are taken within a round.

    python benchmarks/offload.py                      # arms on the four models, 9 rounds
    python benchmarks/offload.py --part throttle      # a store slower than needed
    python benchmarks/offload.py --part saves         # thousands of small saved tensors
    python benchmarks/offload.py --device cuda        # GPU: host and file tier, the peers
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _rows import (
    REPOSITORY,
    BenchmarkRow,
    Limit,
    announce,
    argument_parser,
    environment,
    write_rows,
)

WORKER = Path(__file__).resolve().parent / "_train.py"
PEAK_BOUND = Path(__file__).resolve().parent / "_peak_bound.py"
TIME_BAR = {"run": 1.10, "bare": 1.25}  # how much longer than stock a step may take
MODELS = ("gpt2", "llama", "bert", "t5")
CPU_ARMS = (
    "keep",
    "checkpoint",
    "run all",
    "run auto",
    "run all+checkpoint",
    "bare all",
    "bare auto",
)
GPU_ARMS = (
    "keep",
    "checkpoint",
    "save_on_cpu",
    "bare auto",
    "run auto",
    "bare auto+file",
    "trl",
    "bare all",
    "bare all+file",
    "bare all+gds",
    "bare all+checkpoint",
    "bare all+checkpoint+file",
    "bare all+checkpoint+gds",
)
GPU_CASES = (
    # model, hidden, layers, heads, seq, batch: bf16
    ("llama", 4096, 8, 32, 4096, 4),
    ("llama", 8192, 4, 64, 4096, 2),
    ("gpt2", 1600, 48, 25, 1024, 8),
    ("bert", 8192, 4, 64, 512, 16),
    ("t5", 4096, 8, 32, 1024, 8),
)
PACKAGES = {"trl": "trl", "gds": "kvikio"}  # that a word of an arm needs
THROTTLES = (4.0, 2.0, 1.0, 0.5, 0.25)  # rate of the store over the rate that is needed


@dataclasses.dataclass(frozen=True)
class Case:
    """One model and shape; `flags` are those of `_train.py`."""

    name: str
    flags: tuple[str, ...]


def run_arm(case: Case, arm: str, *, store: str, steps: int, extra: tuple[str, ...] = ()) -> Any:
    """One process: "run X" is `penstock run --policy X`, "bare X" the context manager."""
    how, _, words = arm.rpartition(" ")
    flags = [*case.flags, *extra, "--steps", str(steps)]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        if how == "run":
            policy, _, rest = words.partition("+")
            # On a GPU there is host memory to go to, and without a store that is used alone.
            where = () if "cuda" in case.flags else ("--store", store)
            command = [
                *(sys.executable, "-m", "penstock", "run", *where, "--policy", policy),
                *("--report", report.name, str(WORKER), "--arm", rest or "keep", *flags),
            ]
        else:
            command = [sys.executable, str(WORKER), "--arm", words, "--store", store, *flags]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no output"]
            print(f"{case.name} {arm}: {lines[-1]}", file=sys.stderr)
            return None
        result = json.loads(done.stdout.strip().splitlines()[-1])
        if how == "run":
            result["report"] = json.loads(Path(report.name).read_text())["offload"]
    return result


def missing(arm: str) -> str | None:
    """The package that an arm needs and that is not installed."""
    words = arm.replace("+", " ").split()
    packages = [PACKAGES[word] for word in words if word in PACKAGES]
    return next((name for name in packages if find_spec(name) is None), None)


def compare(
    case: Case,
    arms: tuple[str, ...],
    *,
    rounds: int,
    store: str,
    steps: int,
    after_each: Callable[[dict[str, list[Any]]], None] = lambda results: None,
) -> dict[str, list[Any]]:
    """`rounds` results per arm, in paired processes; an arm that fails once is left out.

    `after_each` is called with what there is after each process.
    """
    results: dict[str, list[Any]] = {arm: [] for arm in arms}
    for index in range(rounds):
        order = arms if index % 2 == 0 else tuple(reversed(arms))
        for arm in order:
            if arm not in results:
                continue
            result = run_arm(case, arm, store=store, steps=steps)
            if result is None:
                del results[arm]
                continue
            results[arm].append(result)
            seconds = statistics.median(result["seconds"])
            growth = result["growth_bytes"] / 2**20
            print(
                f"{case.name} round {index + 1}/{rounds} {arm:22s} {seconds:7.3f} s "
                f"{growth:7.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
            after_each(results)
    return results


def peak_bound(case: Case) -> Any:
    """What the peak is held against: gradients, largest operator, two layers' activations."""
    command = [sys.executable, str(PEAK_BOUND), *case.flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def time_bar(arm: str, stock: list[Any]) -> Limit | None:
    """What a step may take on two cores: a multiple of the fastest stock arm's median."""
    factor = TIME_BAR.get(arm.split(" ")[0])
    if factor is None:
        return None
    seconds = statistics.median([statistics.median(run["seconds"]) for run in stock])
    return Limit(name=f"{factor:.2f} x keep", value=factor * seconds, unit="s")


def digests(runs: list[Any]) -> set[str]:
    """The different bits that an arm's processes ended with."""
    return {run["digest"] for run in runs}


def rows_of(
    case: Case,
    results: dict[str, list[Any]],
    where: Any,
    *,
    limit: Limit | None = None,
    bound: Any = None,
) -> list[BenchmarkRow]:
    """A row per arm, with its ratios to "keep", round by round.

    Args:
        case: what was measured.
        results: for every arm, what each of its processes printed.
        where: fields that all rows share; see `environment`.
        limit: what every arm but "keep" is held against, where that is not `time_bar`.
        bound: what `peak_bound` gave; with it the bars for two cores apply.
    """
    stock = results["keep"]
    limits = {arm: time_bar(arm, stock) if bound is not None else limit for arm in results}
    limits["keep"] = None
    rows = []
    for arm, runs in results.items():
        if not runs:
            continue
        ratios = [
            statistics.median(ours["seconds"]) / statistics.median(theirs["seconds"])
            for ours, theirs in zip(runs, stock, strict=False)  # a round may not be over
        ]
        peaks = [
            ours["growth_bytes"] / theirs["growth_bytes"]
            for ours, theirs in zip(runs, stock, strict=False)  # a round may not be over
        ]
        report = dict(runs[-1].get("report") or {})
        report.pop("store", None)  # a directory of the machine, gone by now
        cpu = [statistics.median(run["cpu_seconds"]) for run in runs]
        extra = {
            "time_ratio_median": statistics.median(ratios),
            "time_ratio_range": [min(ratios), max(ratios)],
            "peak_growth_ratio_median": statistics.median(peaks),
            "cpu_seconds_median": statistics.median(cpu),
            "bit_equal_to_keep": digests(runs) <= digests(stock),
            "digests": dict(Counter(run["digest"] for run in runs)),
            "left_fraction": (
                report["offloaded_bytes"] / report["saved_bytes"] if report else None
            ),
            "peak_bound": bound,
            "report": report,
        }
        growth = int(statistics.median([run["growth_bytes"] for run in runs]))
        if bound is not None:
            extra["peak_growth_over_bound"] = growth / bound["bound_bytes"]
        rows.append(
            BenchmarkRow.of(
                [statistics.median(run["seconds"]) for run in runs],
                topic="offload",
                case=case.name,
                arm=arm,
                moved_bytes=report.get("moved_bytes", {}),
                peak_bytes={
                    "growth": growth,
                    **({"device": report["peak_device_bytes"]} if report else {}),
                },
                limit=limits[arm],
                extra=extra,
                **where,
            )
        )
        print(
            f"{case.name} {arm:22s} time x{extra['time_ratio_median']:.3f} "
            f"{[round(r, 2) for r in extra['time_ratio_range']]} peak "
            f"x{extra['peak_growth_ratio_median']:.3f} equal {extra['bit_equal_to_keep']}"
        )
    return rows


def throttle_rows(case: Case, *, rounds: int, store: str, steps: int, where: Any) -> Any:
    """Time against the rate of the store, in units of the rate that hides everything.

    What is needed is a step's saved bytes within half of its time, out and back.
    """
    first = [run_arm(case, arm, store=store, steps=steps) for arm in ("keep", "bare all", "keep")]
    step_seconds = min(statistics.median(run["seconds"]) for run in (first[0], first[2]))
    report = first[1]["report"]
    saved = report["saved_bytes"] / report["num_steps"]
    needed = 2 * saved / step_seconds
    rows = []
    for fraction in THROTTLES:
        rate = fraction * needed
        flags = ("--write-rate", str(rate), "--read-rate", str(rate))
        runs: dict[str, list[Any]] = {"keep": [], "bare all": [], "bare auto": []}
        for index in range(rounds):
            order = list(runs) if index % 2 == 0 else list(reversed(runs))
            for arm in order:
                extra = () if arm == "keep" else flags
                runs[arm].append(run_arm(case, arm, store=store, steps=steps, extra=extra))
        at = Case(f"{case.name}, store at {fraction:g} of the needed rate", case.flags)
        model_seconds = step_seconds * max(1.0, 1.0 / fraction)
        limit = Limit(name="step / min(1, rate / needed)", value=model_seconds, unit="s")
        rows += rows_of(at, runs, where, limit=limit)
    return rows


def gpu_case(model: str, hidden: int, layers: int, heads: int, seq: int, batch: int) -> Case:
    """A case of the GPU suite, in bf16."""
    shape = {
        "model": model,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "seq": seq,
        "batch": batch,
        "vocab": 32768,
        "device": "cuda",
        "dtype": "bfloat16",
    }
    flags = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    return Case(f"{model} h{hidden} L{layers} s{seq} b{batch} bf16", tuple(flags))


def gpu_suite(options: argparse.Namespace, store: str, where: Any) -> int:
    """The cases of the GPU suite; rows are written after every process. Returns failed arms."""
    rounds, failed = options.rounds or 2, 0
    wanted = tuple(options.arms or GPU_ARMS)
    arms = tuple(arm for arm in wanted if missing(arm) is None)
    for arm in wanted:
        if arm not in arms:
            print(f"offload: {arm} needs {missing(arm)}, which is not installed", file=sys.stderr)
    shapes = [
        shape
        for model in options.models
        for shape in [each for each in GPU_CASES if each[0] == model][: options.shapes]
    ]
    for case in (gpu_case(*shape) for shape in shapes):
        if options.dry_run:
            announce((case.name, arm) for arm in arms)
            continue

        def write(results: dict[str, list[Any]], case: Case = case) -> None:
            if results.get("keep"):
                write_rows(rows_of(case, results, where), options.out)

        measure = {"store": store, "steps": options.steps, "rounds": rounds, "after_each": write}
        results = compare(case, arms, **measure)
        for arm in arms:
            if arm not in results:
                failed += 1
                print(f"offload: {case.name}: {arm} FAILED", file=sys.stderr)
    return failed


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=["arms", "throttle", "saves"], default="arms")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--arms", nargs="+", default=None, help='such as keep "run all"')
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--shapes", type=int, default=None, help="of each model, on a GPU")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--store", default=None, help="directory on the disk to measure with")
    options = parser.parse_args()
    where = environment("cpu" if options.dry_run else options.device)
    with tempfile.TemporaryDirectory(dir=options.store) as store:
        if options.device != "cpu":
            return 1 if gpu_suite(options, store, where) else 0
        if options.part == "saves":
            from _saves import ARMS, CASES, saves_rows  # imports torch

            if options.dry_run:
                announce((f"16000 {case}", arm) for case in CASES for arm in ARMS)
            else:
                rows = saves_rows(rounds=options.rounds or 9, store=store, where=where)
                write_rows(rows, options.out)
            return 0
        measure = {"store": store, "steps": options.steps, "rounds": options.rounds or 9}
        for model in options.models:
            case = Case(model, ("--model", model))
            if options.dry_run:
                announce((case.name, arm) for arm in options.arms or CPU_ARMS)
                continue
            if options.part == "throttle":
                rows = throttle_rows(case, where=where, **measure)
            else:
                results = compare(case, tuple(options.arms or CPU_ARMS), **measure)
                rows = rows_of(case, results, where, bound=peak_bound(case))
            write_rows(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
