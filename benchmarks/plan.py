"""Planned training steps of models that do not fit: the table of SwapAdvisor, and transformers.

    python benchmarks/plan.py                        # everything: hours
    python benchmarks/plan.py --quick                # three models, short searches
    python benchmarks/plan.py --models brnn-8k --shares 1/8 1/12 --time-limit 60
    python benchmarks/plan.py --resume               # only rows that are not there yet
    python benchmarks/plan.py --part points figure   # throughput against memory
    python benchmarks/plan.py --part table           # what the rows say
    python benchmarks/plan.py --part models          # the models: operators, peaks, FLOPs
    python benchmarks/plan.py --part speed           # simulations a second; 14,000 operators

Nothing runs: steps are captured from shapes (`_plan_models.py`), planned for a machine that is not
here, and timed by the simulator; every plan is checked. Times of a row are those of the simulated
step. Budgets are shares of the peak of the program's own order; where an operator needs more than
that, the least that every arm's model allows (`minimum`) takes its place.

Arms (`_plan_arms.py`): paging on demand, SwapAdvisor's genetic search, a linear program per layer
in torchtitan's style, torch's activation memory budget, ours, and ours with decisions frozen. Those
that search have `--time-limit` seconds each, and bounds of ours a part of them, or
`--bound-seconds`; a row says how many. `--resume` leaves out rows of the
same graph and time limit; what captures a graph is part of the name of the file that keeps it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import _plan_figure
import _plan_speed
import _plan_table
from _plan_arms import ABLATIONS, ARMS, GENETIC, OURS, REFERENCES, Planner
from _plan_models import CASES, LARGE, SWAPADVISOR, V100_BYTES
from _plan_points import point_rows
from _rows import (
    REPOSITORY,
    BenchmarkRow,
    Limit,
    argument_parser,
    environment,
    read_rows,
    results_file,
    write_rows,
)
from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner import Budget, Plan, check, simulate
from penstock.planner.paging._accesses import order_step, peak_of_program_order

TOPIC = "plan"
SHARES = ("1/2", "1/4", "1/8", "1/12")
QUICK_MODELS = ("rnn-8k", "wresnet-152-10", "gpt2-12")
QUICK_SECONDS = 5.0
HOST_BYTES = 1 << 40
PARTS = ("cases", "figure", "models", "points", "speed", "table")


def captured(name: str, directory: Path) -> StepGraph:
    """A model's step; kept in a directory, because capturing takes a while."""
    from penstock.graph import with_workspace
    from penstock.graph.capturing.capture import record_step
    from penstock.graph.capturing.step_program import StepProgram

    path = directory / f"{name}-{_capture_digest()}.json.gz"
    if path.exists():
        return StepGraph.load(path)
    model, optimizer, batch = CASES[name].build()
    # Other planners know nothing of results that our executor copies: without their workspace.
    graph = with_workspace(record_step(StepProgram(model, batch), optimizer), "cuda")
    directory.mkdir(parents=True, exist_ok=True)
    graph.save(path)
    return graph


def _capture_digest() -> str:
    """Of the sources that decide what a captured step looks like."""
    sources = [*REPOSITORY.glob("src/penstock/graph/**/*.py")]
    sources += REPOSITORY.glob("benchmarks/_plan_[cmr]*.py")
    text = b"".join(path.read_bytes() for path in sorted(sources))
    return hashlib.sha256(text).hexdigest()[:12]


def minimum_bytes(graph: StepGraph) -> int:
    """The largest operands and results of an operator, each value once, and the workspace."""
    step = order_step(graph)
    return step.graph.workspace_bytes + max(
        sum(step.num_bytes[value] for value in {*accesses.needs, *accesses.creates})
        for accesses in step.accesses
    )


def budgets(graph: StepGraph, shares: list[str]) -> dict[str, int]:
    """Bytes of the device by name; shares below the minimum become one budget at the minimum."""
    peak, least = peak_of_program_order(graph), minimum_bytes(graph)
    found: dict[str, int] = {}
    for share in shares:
        num_bytes = int(peak * Fraction(share))
        if num_bytes < least * 1.05:
            found["minimum"] = int(least * 1.05)  # packing needs a little more than the bytes
        else:
            found[share] = num_bytes
    return found


def arm_row(
    planner: Planner, arm: str, case: str, extra: dict[str, Any], where: Any
) -> BenchmarkRow:
    """Plan, check, and say how good it is; an arm without a plan has a time of 0."""
    ideal = planner.request.compute_seconds
    began, cpu_began = time.perf_counter(), time.process_time()
    identity = {"topic": TOPIC, "case": case, "arm": arm, **where}
    extra = {**extra, "ideal_seconds": ideal}
    try:
        plan = planner.plan(arm)
    except InfeasibleError as error:
        extra |= {"outcome": "infeasible", "reason": str(error)}
        extra["planning_seconds"] = time.perf_counter() - began
        return BenchmarkRow.of([0.0], **identity, extra=extra)
    extra["planning_seconds"] = time.perf_counter() - began
    extra["planning_cpu_seconds"] = time.process_time() - cpu_began  # the machine may be shared
    check(planner.graph, plan)
    # Ours know the bound of what was frozen, and of the graph that they split.
    bound = planner.bound_of(arm, plan) if arm in (OURS, *ABLATIONS) else planner.bound
    extra |= {
        "outcome": "planned",
        "bound_parts": dict(bound.seconds_of),
        "share_of_ideal": ideal / plan.step_seconds,
        "gap": plan.step_seconds / bound.seconds - 1,
        "num_recomputed": len(plan.recomputed),
        "stall_seconds": stalls_by_phase(planner.graph, plan),
        "notes": dict(plan.notes),
    }
    return BenchmarkRow.of(
        [plan.step_seconds],
        **identity,
        limit=Limit(name=f"the lower bound ({bound.binding})", value=bound.seconds, unit="s"),
        moved_bytes={link.value: num_bytes for link, num_bytes in plan.bytes_moved.items()},
        peak_bytes={"device": plan.peak_device_bytes, "host": plan.peak_host_bytes},
        extra=extra,
    )


def stalls_by_phase(graph: StepGraph, plan: Plan) -> dict[str, float]:
    """Seconds that operators of each phase wait for transfers."""
    seconds: dict[str, float] = {}
    for stall in simulate(graph, plan).stalls:
        phase = plan.planned_graph(graph).operators[plan.order[stall.position]].phase
        seconds[phase.value] = seconds.get(phase.value, 0.0) + stall.seconds
    return seconds


def _is_there(
    rows: dict[tuple[str, str], BenchmarkRow], case: str, arm: str, extra: dict[str, Any]
) -> bool:
    """Whether there is a row of the same graph, budget and time limit."""
    row = rows.get((case, arm))
    same = ("graph_digest", "device_bytes", "time_limit")
    return row is not None and all(row.extra.get(key) == extra[key] for key in same)


def measure(
    name: str, machine: MachineProfile, options: argparse.Namespace, where: Any
) -> list[BenchmarkRow]:
    """All budgets and arms of a model."""
    graph = captured(name, options.graphs)
    path = results_file(where["device_name"], TOPIC, options.out)
    known = read_rows(path) if options.resume and path.exists() else []
    there = {(row.case, row.arm): row for row in known}
    rows = []
    for share, num_bytes in budgets(graph, options.shares).items():
        budget = Budget(device_bytes=num_bytes, host_bytes=HOST_BYTES)
        planner = Planner(
            graph,
            budget,
            machine,
            time_limit=options.time_limit,
            bound_seconds=options.bound_seconds,
            seed=options.seed,
        )
        case = f"{CASES[name].title}; {share} of its peak, {machine.name}"
        extra = {
            "model": name,
            "share": share,
            "device_bytes": num_bytes,
            "peak_bytes": peak_of_program_order(graph),
            "num_operators": len(graph.operators),
            "graph_digest": graph.digest,
            "time_limit": options.time_limit,
            "bound_seconds": options.bound_seconds,
            "seed": options.seed,
        }
        for arm in options.arms:
            if _is_there(there, case, arm, extra):
                continue
            row = arm_row(planner, arm, case, extra, where)
            print(f"{row}, {row.extra['outcome']}", file=sys.stderr, flush=True)
            rows.append(row)
            write_rows([row], options.out)
    return rows


def show_models(options: argparse.Namespace) -> None:
    """Operators, peaks and FLOPs of the models."""
    for name in options.models:
        graph = captured(name, options.graphs)
        peak = peak_of_program_order(graph)
        print(
            f"{CASES[name].title:48} {len(graph.operators):7,} operators, "
            f"{sum(operator.flops for operator in graph.operators) / 1e12:8.1f} TFLOP, peak "
            f"{peak / 1e9:6.1f} GB = {peak / V100_BYTES:4.1f} V100s, minimum "
            f"{minimum_bytes(graph) / peak:5.1%} of it",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["cases"])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=None)
    parser.add_argument("--shares", nargs="+", default=list(SHARES), metavar="1/N")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=None, metavar="ARM")
    parser.add_argument("--ablations", action="store_true", help="ours with decisions frozen, too")
    parser.add_argument("--quick", action="store_true", help="three models, short searches")
    parser.add_argument("--resume", action="store_true", help="leave out rows that are there")
    parser.add_argument("--swapadvisor", action="store_true", help="only the models of its table")
    parser.add_argument("--time-limit", type=float, default=None, metavar="SECONDS")
    parser.add_argument(
        "--bound-seconds",
        type=float,
        default=None,
        metavar="SECONDS",
        help="prove the bounds of our plans anew for so long, not for a part of the time limit",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default="v100-16gb-pcie3", metavar="NAME")
    parser.add_argument(
        "--graphs",
        type=Path,
        default=Path(tempfile.gettempdir()) / "penstock-plan-graphs",
        metavar="DIR",
        help="where captured steps are kept",
    )
    options = parser.parse_args()
    usual = [name for name in CASES if name not in LARGE]
    chosen = QUICK_MODELS if options.quick else SWAPADVISOR if options.swapadvisor else usual
    options.models = options.models or list(chosen)
    arms = [*REFERENCES, GENETIC, OURS, *(ABLATIONS if options.ablations else ())]
    options.arms = options.arms or arms
    options.time_limit = options.time_limit or (QUICK_SECONDS if options.quick else 60.0)
    return options


def main() -> None:
    from penstock.memory import machine

    options = arguments()
    where = environment(options.device)
    if "models" in options.part:
        show_models(options)
    if "cases" in options.part:
        profile = machine(options.machine)
        for name in options.models:
            measure(name, profile, options, where)
    if "points" in options.part:
        for name in _plan_figure.MODELS:
            graph = captured(name, options.graphs)
            write_rows(point_rows(name, graph, machine(options.machine), where), options.out)
    if "speed" in options.part:
        _plan_speed.measure(
            lambda name: captured(name, options.graphs),
            machine(options.machine),
            where,
            options.out,
        )
    if "table" in options.part:
        _plan_table.show(where["device_name"], options.out)
    if "figure" in options.part:
        _plan_figure.draw(where["device_name"], options.out)


if __name__ == "__main__":
    main()
