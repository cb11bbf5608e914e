"""Traffic of inference on an accelerator: COSMA's ten networks at its three budgets.

    python benchmarks/cosma.py                           # four minutes
    python benchmarks/cosma.py --networks resnet-50 s3d
    python benchmarks/cosma.py --part steps              # training steps, ten minutes
    python benchmarks/cosma.py --part table              # what the rows say

Setting (arXiv 2311.18246, V-A): batch 1, 8-bit activations, images of 224 x 224, videos of 16
frames, parameters elsewhere. Budgets: M_R, the largest operator's operands and results; M_P, the
least peak of any order without spills; and the mean of the two. Results do not take the place of
operands. What counts are the non-compulsory bytes: those that leave and come back.

Arms: `TFLite arena, Belady` (`_cosma_baseline.py`) in the network's own order; `exact`; `auto`,
that is `penstock.planner.plan(recompute=False)`, where operators take no time worth mentioning.
Plans pass `check`. The limit of a row is the least traffic that `exact` proves, or its bound.

Training steps (`_cosma_steps.py`), which the paper does not have: parameters, gradients and the
optimizer's state are in the memory, too, and steps repeat. Budgets: the least with which every
operator can run, a half and three quarters of the peak of the program's own order, or the mean of
both where even three quarters are too little.

What to expect, before measuring. The paper says 84 % less than the arena with Belady at M_R, on
average; nothing at all at M_P; optima within seconds for most networks. Where M_R = M_P nothing has
to move, and an arena that fragments moves something all the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

from _cosma_baseline import belady_traffic
from _cosma_graph import inference_graph
from _cosma_models import NETWORKS
from _cosma_steps import STEPS
from _rows import (
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
from penstock.memory import machine
from penstock.planner import (
    Budget,
    PlanRequest,
    check,
    exact,
    min_peak,
    min_working_set,
    plan,
)
from penstock.planner.paging import peak_of_program_order

TOPIC = "cosma"
BASELINE, EXACT, AUTO = "TFLite arena, Belady", "exact", "auto"
MACHINE = "v100-16gb-pcie3"  # any: bytes count, not their time
HOST_BYTES = 1 << 40
_INSTANT = 1e-9


def budgets(graph: StepGraph) -> dict[str, int]:
    """Bytes by name; where M_R is M_P there is one."""
    least, peak = min_working_set(graph), min_peak(graph).num_bytes
    if least == peak:
        return {"M_R = M_P": least}
    return {"M_R": least, "mean": (least + peak) // 2, "M_P": peak}


def traffic_of(arm: str, graph: StepGraph, num_bytes: int, options: Any) -> dict[str, Any]:
    """Non-compulsory bytes of an arm, and what it says about them."""
    if arm == BASELINE:
        return {"traffic": belady_traffic(graph, num_bytes)}
    if arm == EXACT:
        request = PlanRequest(
            graph=graph,
            budget=Budget(device_bytes=num_bytes, host_bytes=HOST_BYTES),
            machine=machine(MACHINE),
            operator_seconds=[_INSTANT] * len(graph.operators),
        )
        try:
            found = exact(request.within(options.time_limit))
        except InfeasibleError as error:
            return {"traffic": None, "least": 0, "proved": error.proved, "reason": str(error)}
        check(graph, found)
        notes = found.notes
        return {
            "traffic": notes["non_compulsory_bytes"],
            "least": notes["lower_bound_bytes"],
            "proved": notes["proved"],
        }
    instant = [dataclasses.replace(o, seconds=_INSTANT) for o in graph.operators]
    quick = dataclasses.replace(graph, operators=tuple(instant))
    try:
        found = plan(
            quick,
            device_memory=num_bytes,
            host_memory=HOST_BYTES,
            machine=MACHINE,
            recompute=False,
            time_limit=options.auto_time_limit,
        )
    except InfeasibleError as error:
        return {"traffic": None, "reason": str(error)}
    check(quick, found)
    return {"traffic": sum(found.bytes_moved.values())}


def step_budgets(graph: StepGraph) -> dict[str, int]:
    """Bytes by name, for a training step: shares of its peak that operators can run with."""
    least, peak = min_working_set(graph), peak_of_program_order(graph, in_place=True)
    shares = {"1/2": peak // 2, "3/4": peak * 3 // 4}
    shares = {name: count for name, count in shares.items() if count > least}
    return {"least": least, **(shares or {"mean": (least + peak) // 2})}


def measure_step(name: str, options: argparse.Namespace, where: Any) -> None:
    """All budgets of a training step, proved and searched."""
    graph = STEPS[name]()
    for budget, num_bytes in step_budgets(graph).items():
        least = 0
        for arm in (EXACT, AUTO):
            start = time.perf_counter()
            found = traffic_of(arm, graph, num_bytes, options)
            seconds = time.perf_counter() - start
            least = found["least"] if arm == EXACT else least
            _write_row(
                name, name, budget, arm, graph, num_bytes, found, least, seconds, options, where
            )


def measure(name: str, options: argparse.Namespace, where: Any) -> None:
    """All budgets and arms of a network."""
    graph = inference_graph(NETWORKS[name])
    for budget, num_bytes in budgets(graph).items():
        least = None
        for arm in (EXACT, BASELINE, AUTO):
            start = time.perf_counter()
            found = traffic_of(arm, graph, num_bytes, options)
            seconds = time.perf_counter() - start
            least = found["least"] if arm == EXACT else least
            title = NETWORKS[name].title
            _write_row(
                name, title, budget, arm, graph, num_bytes, found, least, seconds, options, where
            )


def _write_row(
    name: str,
    title: str,
    budget: str,
    arm: str,
    graph: StepGraph,
    num_bytes: int,
    found: dict[str, Any],
    least: int | None,
    seconds: float,
    options: argparse.Namespace,
    where: Any,
) -> None:
    traffic = found["traffic"]
    row = BenchmarkRow.of(
        [seconds],
        topic=TOPIC,
        case=f"{title}; {budget}",
        arm=arm,
        moved_bytes={} if traffic is None else {"device<->host": traffic},
        # Nothing can be held against nothing: a byte stands for no traffic.
        limit=Limit(name="the least traffic", value=max(least or 0, 1), unit="B"),
        measured=float(max(traffic or 0, 1)),
        extra={
            "network": name,
            "budget": budget,
            "device_bytes": num_bytes,
            "num_operators": len(graph.operators),
            **found,
        },
        **where,
    )
    print(f"{row}, {traffic} bytes", file=sys.stderr, flush=True)
    write_rows([row], options.out)


def table(rows: list[BenchmarkRow]) -> list[str]:
    """The rows as lines, and what the bars say."""
    found: dict[tuple[str, str], dict[str, BenchmarkRow]] = {}
    for row in rows:
        if row.extra["network"] in STEPS:
            continue
        found.setdefault((row.extra["network"], row.extra["budget"]), {})[row.arm] = row
    lines = [
        "| network | operators | budget | bytes | TFLite, Belady | exact | proved in | auto |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    saved, excess = [], []
    for (network, budget), arms in found.items():
        extra = arms[EXACT].extra
        old, best, auto = (arms[arm].extra["traffic"] for arm in (BASELINE, EXACT, AUTO))
        proof = f"{arms[EXACT].median_seconds:.1f} s" if extra["proved"] else "no"
        lines.append(
            f"| {NETWORKS[network].title} | {extra['num_operators']} | {budget} "
            f"| {extra['device_bytes']:,} | {old:,} | {best:,} | {proof} "
            f"| {'none' if auto is None else f'{auto:,}'} |"
        )
        if budget.startswith("M_R") and old:
            saved.append(1 - best / old)
        if extra["num_operators"] <= 100 and extra["proved"]:
            equal = auto is not None and auto == best == 0
            excess.append(0.0 if equal else float("inf") if not best else (auto or 0) / best - 1)
    if not saved or not excess:
        return lines
    lines += [
        "",
        f"At M_R `exact` moves {statistics.mean(saved):.1%} less than the arena with Belady, mean "
        f"of {len(saved)} networks.",
        f"On networks of at most 100 operators `auto` moves {statistics.mean(excess):.1%} more "
        f"than the proved optimum, mean of {len(excess)} cases.",
    ]
    return lines


def steps_table(rows: list[BenchmarkRow]) -> list[str]:
    """The rows of training steps as lines."""
    found: dict[tuple[str, str], dict[str, BenchmarkRow]] = {}
    for row in rows:
        if row.extra["network"] in STEPS:
            found.setdefault((row.extra["network"], row.extra["budget"]), {})[row.arm] = row
    lines = [
        "| step | operators | budget | bytes | exact | bound | proved in | auto |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (name, budget), arms in found.items():
        extra, auto = arms[EXACT].extra, arms[AUTO].extra["traffic"]
        traffic = "none" if extra["traffic"] is None else f"{extra['traffic']:,}"
        proof = f"{arms[EXACT].median_seconds:.1f} s" if extra["proved"] else "no"
        lines.append(
            f"| {name} | {extra['num_operators']} | {budget} | {extra['device_bytes']:,} "
            f"| {traffic} | {extra['least']:,} | {proof} "
            f"| {'none' if auto is None else f'{auto:,}'} |"
        )
    return lines


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=("cases", "steps", "table"), default=["cases"])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of `exact`")
    parser.add_argument("--auto-time-limit", type=float, default=10.0, help="seconds of `auto`")
    options = parser.parse_args()
    where = environment("cpu")
    if "cases" in options.part:
        for name in options.networks:
            measure(name, options, where)
    if "steps" in options.part:
        for name in options.steps:
            measure_step(name, options, where)
    if "table" in options.part:
        rows = read_rows(results_file(where["device_name"], TOPIC, options.out))
        print("\n".join([*table(rows), "", *steps_table(rows)]))


if __name__ == "__main__":
    main()
