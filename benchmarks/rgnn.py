"""Relational layers compiled to a graph, against PyG and against torch operators edge by edge.

    python benchmarks/rgnn.py                  # all but the picture, about 25 minutes
    python benchmarks/rgnn.py --quick          # the small graphs, without ablations
    python benchmarks/rgnn.py --models RGAT --graphs aifb mutag
    python benchmarks/rgnn.py --part bars      # what the rows say about the bars
    python benchmarks/rgnn.py --part figure    # the picture of the ablation, from the rows

A step is one layer, fp32, one head: forward and backward to features and all parameters, or the
forward alone. Each pair of a layer and a graph is a process (`_rgnn_case.py`), with a limit of
memory; its arms take turns, round by round, and ratios are taken within rounds. What
`torch.compile` makes of PyG is measured beside our arm in a process of its own, which has
`--compile-seconds` for it. Graphs come from $PENSTOCK_DATA (`_rgnn_graphs.py`).

Arms: our backends with all rewrites and with each one off ("penstock (cpp) without compaction"; a
rewrite that changes nothing on a graph is named in the row instead), "segment-mm" in two kinds
(`_rgnn_edgewise.py`), PyG's layer, its `FastRGCNConv`, with pyg-lib where that is, DGL's on a GPU.
pyg-lib's kind of RGCN takes the mean over all edges into a node, DGL's layers differ in details:
their work is alike, their results are not (`largest_error` in the rows, None for other shapes).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _rgnn_bars
import _rgnn_figure
import _rgnn_graphs
from _rgnn_arms import MODELS, PYG_COMPILED, backends, baselines, ours
from _rgnn_rows import KILLED, TOO_LONG, TOPIC, Record
from _rgnn_steps import MODES
from _rows import (
    REPOSITORY,
    BenchmarkRow,
    Limit,
    announce,
    argument_parser,
    environment,
    write_rows,
)
from penstock.units import parse_bytes

HERE = Path(__file__).resolve().parent
QUICK_GRAPHS = ("aifb", "mutag", "wn18rr")
COMPILED_GRAPHS = ("aifb", "mag-tiny")  # unrolled for hundreds of relations it takes many minutes
NUM_FIRST_CALLS = 3
FIRST_CALL_LIMITS = {
    "empty cache": Limit(name="3 s", value=3.0, unit="s"),
    "cache of another process": Limit(name="0.1 s", value=0.1, unit="s"),
}
PARTS = ("cases", "first call", "bars", "figure")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The arms and modes that one process measures."""

    backends: list[str]
    ablate: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)

    def without(self, arm: str) -> Selection:
        """Return the selection without an arm; without its back end, for one of ours."""
        return Selection(
            backends=[name for name in self.backends if not arm.startswith(ours(name))],
            ablate=[name for name in self.ablate if not arm.startswith(ours(name))],
            others=[name for name in self.others if name != arm],
        )

    def flags(self) -> list[str]:
        """Return the options of `_rgnn_case.py`."""
        fields = dataclasses.asdict(self)
        return [text for name, values in fields.items() for text in (f"--{name}", *values)]


def run_script(script: str, flags: list[str], *, timeout: float | None, **variables: str) -> Any:
    """Run a script beside this one: (lines of JSON, exit status or None)."""
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **variables}
    command = [sys.executable, str(HERE / script), *flags]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it has started
            process.wait()
            status = None
        out.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in out if line.startswith(("{", "["))]
        if status not in (0, None):
            print(errors.read()[-2000:], file=sys.stderr)
    return lines, status


def run_case(
    model: str, graph: str, selection: Selection, options: argparse.Namespace, timeout: float | None
) -> list[dict[str, Any]]:
    """Return the events of a case; an arm that takes its process down is left out of the next."""
    flags = [
        *("--model", model, "--graph", graph, "--device", options.device),
        *("--width", str(options.width), "--threads", str(options.threads)),
        *("--memory-bytes", str(parse_bytes(options.memory, name="--memory"))),
        *("--budget-seconds", str(options.budget_seconds), "--modes", *options.modes),
    ]
    lost: list[dict[str, Any]] = []
    while True:
        flags_of_try = [*flags, *selection.flags()]
        events, status = run_script("_rgnn_case.py", flags_of_try, timeout=timeout)
        trying = [event for event in events if event["event"] == "trying"]
        if status == 0:
            return [event for event in events if event["event"] != "trying"] + lost
        if not trying or any(event["event"] == "measured" for event in events):
            raise RuntimeError(f"{model} on {graph}: the process ended with status {status}")
        last = {"arm": trying[-1]["arm"], "mode": trying[-1]["mode"]}
        outcome = TOO_LONG if status is None else KILLED
        lost.append({"event": "failed", **last, "seconds": timeout or 0.0, "outcome": outcome})
        if status is None:
            return lost
        selection = selection.without(last["arm"])


def case_rows(
    model: str, graph: str, options: argparse.Namespace, where: Any
) -> list[BenchmarkRow]:
    """Return the rows of all arms of one layer on one graph."""
    available = backends(options.device)
    others = baselines(model, options.device)
    if options.arms:
        others = [name for name in others if name in options.arms]
    reference = ours(available[-1])
    record = Record(model, graph, reference, options.width)
    ablate = [] if options.quick else available if options.every_backend else available[-1:]
    usual = [name for name in others if name != PYG_COMPILED]
    selection = Selection(backends=available, ablate=ablate, others=usual)
    record.add(run_case(model, graph, selection, options, None))
    if PYG_COMPILED in others and (options.arms or graph in COMPILED_GRAPHS):
        selection = Selection(backends=available[-1:], others=[PYG_COMPILED])
        events = run_case(model, graph, selection, options, options.compile_seconds)
        record.add(events, only=PYG_COMPILED)
    return record.rows(where)


def first_call_rows(model: str, options: argparse.Namespace, where: Any) -> list[BenchmarkRow]:
    """Return the rows of the first call on a new program, and in a second process."""
    seconds: dict[str, list[float]] = {name: [] for name in FIRST_CALL_LIMITS}
    later = []
    for _ in range(NUM_FIRST_CALLS):
        with tempfile.TemporaryDirectory() as cache:
            os.chmod(cache, 0o700)
            for times in seconds.values():
                flags = ["--model", model, "--device", options.device]
                flags += ["--threads", str(options.threads)]
                lines, status = run_script(
                    "_rgnn_first_call.py", flags, timeout=None, PENSTOCK_CACHE_DIR=cache
                )
                if status != 0:
                    raise RuntimeError(f"the first call of {model} failed")
                times.append(lines[-1][0])
                later.append(lines[-1][1])
    extra = {"model": model, "later_step_seconds": min(later)}
    return [
        BenchmarkRow.of(
            times,
            topic=TOPIC,
            case=f"{model}, first training step of a process",
            arm=name,
            limit=FIRST_CALL_LIMITS[name],
            extra=extra,
            **where,
        )
        for name, times in seconds.items()
    ]


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS[:-1]))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--graphs", nargs="+", choices=_rgnn_graphs.GRAPHS)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="of those that are not ours")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--quick", action="store_true", help="small graphs, no ablation")
    parser.add_argument("--every-backend", action="store_true", help="ablate them all")
    parser.add_argument("--width", type=int, default=64, help="features of a node")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", default="16GiB", help="that a process may take, on the CPU")
    parser.add_argument("--budget-seconds", type=float, default=2.0, help="for an arm, roughly")
    parser.add_argument("--compile-seconds", type=float, default=120.0)
    options = parser.parse_args()
    options.graphs = options.graphs or (QUICK_GRAPHS if options.quick else _rgnn_graphs.GRAPHS)
    return options


def main() -> None:
    options = arguments()
    if options.dry_run:
        for graph in options.graphs if "cases" in options.part else ():
            announce((f"{model} on {graph}", "all arms") for model in options.models)
        if "first call" in options.part:
            announce((f"{model}, first training step", "all caches") for model in options.models)
        return
    where = environment(options.device)
    if "cases" in options.part and _rgnn_graphs.data_directory() is None:
        print("rgnn: no rgnn/ in $PENSTOCK_DATA; no cases", file=sys.stderr)
        options.part.remove("cases")
    if "first call" in options.part:
        for model in options.models:
            write_rows(first_call_rows(model, options, where), options.out)
    if "cases" in options.part:
        for graph in options.graphs:
            for model in options.models:
                if graph == _rgnn_graphs.ONE_WAY and model != "RGCN":
                    continue
                for row in (rows := case_rows(model, graph, options, where)):
                    print(f"{row}, {row.extra['outcome']}", file=sys.stderr, flush=True)
                write_rows(rows, options.out)
    if "bars" in options.part:
        _rgnn_bars.show(where["device_name"], options.out)
    if "figure" in options.part:
        _rgnn_figure.draw(where["device_name"], options.out)


if __name__ == "__main__":
    main()
