"""Steps that run as planned against plain eager training: time, and what the system saw of memory.

Each measurement is a process of its own, and each planned one runs between two eager ones, so that
what else the machine does hits both. Plans are made first, from measured operators and links;
`--prepare` makes them and measures nothing. `--peers` adds what others do for memory and speed
(`_execute_peers.py`), where they run. `--part operators` times steps of the smallest tensors
instead: what an operator costs beside its arithmetic. `--part figure` draws the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _execute_arms
import _execute_figure
import _execute_operators
from _execute_arms import ARMS, MODELS, SHAPES, file_name, prepare
from _execute_disk import disk_alone_seconds
from _execute_peers import EAGER, PEERS, why_not
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock.planner import Plan

Run = dict[str, Any]


def run_child(model: str, arm: str, plans: Path, arguments: argparse.Namespace) -> Run:
    where = [str(plans), arguments.store, str(arguments.steps)]
    command = [sys.executable, _execute_arms.__file__, model, arguments.device, arm, *where]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(
    model: str, device: str, arm: str, runs: list[tuple[Run, Run, Run]], disk_seconds: float = 0.0
) -> BenchmarkRow:
    """A row of (eager, planned, eager) runs, with what the disk alone needs; or of a peer's."""
    bar = ARMS[arm][-1] if arm in ARMS else None
    seconds = [value for _, planned, _ in runs for value in planned["seconds"]]
    ratios = [
        statistics.median(planned["seconds"])
        / statistics.median(before["seconds"] + after["seconds"])
        for before, planned, after in runs
    ]
    eager, planned, _ = runs[0]
    report = planned.get("report")
    eager_seconds = statistics.median(eager["seconds"])
    return BenchmarkRow.of(
        seconds,
        topic="execute",
        case=SHAPES[device].case(model),
        arm=arm,
        limit=Limit(name=f"{bar} x eager", value=bar, unit="1") if bar else None,
        measured=statistics.median(ratios) if bar else None,
        moved_bytes=report["moved_bytes"] if report else {},
        peak_bytes={
            "device": report["arena_bytes"] + report["workspace_bytes"],
            "host": report["host_bytes"],
            "file": report["file_bytes"],
        }
        if report
        else {},
        extra={
            "model": model,
            "times_eager": ratios,
            "eager_median_seconds": eager_seconds,
            "cpu_seconds": statistics.median(planned["cpu_seconds"]),
            "eager_cpu_seconds": statistics.median(eager["cpu_seconds"]),
            "same_bits_as_eager": planned["state"] == eager["state"]
            and planned["losses"] == eager["losses"],
            "largest_loss_difference": max(
                abs(ours / theirs - 1)
                for ours, theirs in zip(planned["losses"], eager["losses"], strict=True)
            ),
            "growth_bytes": max(planned["growth_bytes"] for _, planned, _ in runs),
            "eager_growth_bytes": max(eager["growth_bytes"] for eager, _, _ in runs),
            "load": [run["load"] for trio in runs for run in trio],
            "disk_alone_seconds": disk_seconds,
            "eager_seconds_by_disk_alone": eager_seconds / disk_seconds if disk_seconds else None,
            "report": report,
        },
        **environment(device),
    )


def measure_model(model: str, arguments: argparse.Namespace) -> None:
    """Run the arms of one model, each between two eager runs, and write a row of each."""
    plans = arguments.plans / model
    if arguments.prepare or (arguments.arms and not (plans / "full.json").exists()):
        prepare(
            *(model, arguments.device, plans, arguments.store),
            time_limit=arguments.time_limit,
            arms=arguments.arms,
        )
    if arguments.prepare:
        return

    def child(arm: str) -> Run:
        return run_child(model, arm, plans, arguments)

    arms = [*arguments.arms, *(_peers_of(model, arguments.device) if arguments.peers else ())]
    runs: dict[str, list[tuple[Run, Run, Run]]] = {arm: [] for arm in arms}
    before = child(EAGER)
    for _ in range(arguments.rounds):
        for arm in arms:
            planned, after = child(arm), child(EAGER)
            runs[arm].append((before, planned, after))
            before = after
            disk_seconds = 0.0
            if arm in ARMS:
                plan = Plan.load(plans / f"{file_name(arm)}.json")
                disk_seconds = disk_alone_seconds(plan, arguments.store)
            row = row_of(model, arguments.device, arm, runs[arm], disk_seconds)
            ratios = [f"{ratio:.3f}" for ratio in row.extra["times_eager"]]
            print(model, arm, "times eager:", *ratios, file=sys.stderr)
            write_rows([row], arguments.out)


def _peers_of(model: str, device: str) -> list[str]:
    """Those that run; says of the others why they do not."""
    reasons = {arm: why_not(arm, model, device) for arm in PEERS}
    for arm, reason in reasons.items():
        if reason is not None:
            print(f"{model} {arm}: {reason}", file=sys.stderr)
    return [arm for arm, reason in reasons.items() if reason is None]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=("models", "operators", "figure"), default="models")
    parser.add_argument("--plans", type=Path, help="where plans are kept (default: nowhere)")
    parser.add_argument("--store", help="directory of the file tier (default: a temporary one)")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--peers", action="store_true", help="compare with others, too")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=15.0, help="of each plan, seconds")
    parser.add_argument("--prepare", action="store_true", help="only make the plans")
    arguments = parser.parse_args()
    if arguments.part == "operators":
        write_rows(_execute_operators.rows(), arguments.out)
        return
    if arguments.part == "figure":
        _execute_figure.draw(environment(arguments.device)["device_name"], arguments.out)
        return
    if arguments.dry_run:
        for model in arguments.models:
            case = SHAPES[arguments.device].case(model)
            announce((case, arm) for arm in arguments.arms)
        return
    with tempfile.TemporaryDirectory() as temporary:
        arguments.plans = arguments.plans or Path(temporary)
        arguments.store = arguments.store or temporary
        for model in arguments.models:
            measure_model(model, arguments)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
