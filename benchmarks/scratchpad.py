"""Extra traffic of programs over fixed scratchpads: order, addresses and spills by plan.

    python benchmarks/scratchpad.py

Cases: two task graphs of the 2025 "Huawei Cup", Problem A (5 pools, 572 and 918 operators). Arms:
`scratchpad`; and `scratchpad` without order search, in the order of the file, where only the
residency and the addresses are solved (exactly). The limit is the least traffic published for the
graph under the same rules; the fraction is ours over it. Every plan passes `check_scratchpad`.

What to expect, before measuring. The order of the file costs 3,584 for FlashAttention_Case0, which
others have certified. Published certificates for two orders of Conv_Case0 differ by 30 %, so a
search over orders should at least reach the better one, 57,408.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from penstock.planner import (
    NPU_POOLS,
    ScratchpadGraph,
    ScratchpadPlan,
    check_scratchpad,
    scratchpad,
)

PUBLISHED = {"FlashAttention_Case0": 3584, "Conv_Case0": 57408}


def planned(graph: ScratchpadGraph, *, search: bool, options, seed: int) -> ScratchpadPlan:
    plan = scratchpad(graph, NPU_POOLS, reorder=search, time_limit=options.time_limit, seed=seed)
    check_scratchpad(graph, NPU_POOLS, plan)
    return plan


def measured(name: str, graph: ScratchpadGraph, *, search: bool, options, where) -> BenchmarkRow:
    plans, seconds = [], []
    for seed in range(options.repetitions if search else 1):
        start = time.perf_counter()
        plans.append(planned(graph, search=search, options=options, seed=seed))
        seconds.append(time.perf_counter() - start)
    best = min(plans, key=lambda plan: plan.spill_cost)
    row = BenchmarkRow.of(
        seconds,
        topic="scratchpad",
        case=name,
        arm="penstock" if search else "order of the file",
        moved_bytes={"scratchpad->memory->scratchpad": best.spill_cost},
        limit=Limit(name="the least published traffic", value=PUBLISHED[name], unit="B"),
        measured=best.spill_cost,
        extra={
            "costs": [plan.spill_cost for plan in plans],
            "num_spills": best.num_spills,
            "order_lower_bound": best.order_lower_bound,
            "lower_bound": best.lower_bound,
            "time_limit": options.time_limit,
        },
        **where,
    )
    print(f"{row}, costs {row.extra['costs']}", file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="seeds of each case")
    parser.add_argument("--time-limit", type=float, default=60)
    options = parser.parse_args()
    directory = Path(os.environ.get("PENSTOCK_DATA", "")) / "npu_spill"
    if not directory.exists():
        print("scratchpad: set PENSTOCK_DATA to where npu_spill lies; no rows", file=sys.stderr)
        return
    where = environment("cpu")
    for name in PUBLISHED:
        graph = ScratchpadGraph.from_npu_json(directory / f"{name}.json")
        for search in (True, False):
            row = measured(name, graph, search=search, options=options, where=where)
            write_rows([row], options.out)


if __name__ == "__main__":
    main()
