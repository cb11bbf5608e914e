"""The I/O model against what is counted and measured: crossover, kernels, leads, verdicts, chains.

    python benchmarks/iomodel.py                      # all parts
    python benchmarks/iomodel.py --part chains        # one of them
    python benchmarks/iomodel.py --device cuda --part orders

Parts: `crossover` (elements that schedules of attention move, counted), `kernels` (bytes of Triton
kernels under the interpreter beside their closed forms), `caches` (models of CPU kernels beside the
simulated caches), `leads` (loads from a table in L1; half of the bytes from memory), `verdicts` (20
pairs of variants: faster or not), `chains` (MLP and cross-entropy in chunks; time and memory),
`orders` (tile orders: simulated bytes; with a GPU their times and the rank correlation).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _iomodel_chains import chain_rows
from _iomodel_leads import lead_rows
from _iomodel_models import cache_rows, crossover_rows
from _iomodel_orders import order_rows
from _iomodel_verdicts import verdict_rows
from _rows import BenchmarkRow, announce, argument_parser, environment, write_rows

HERE = Path(__file__).resolve().parent


def kernel_rows(where: Any, device: str) -> Iterator[BenchmarkRow]:
    """Counted bytes of the kernels of each package, in a process where Triton interprets."""
    done = subprocess.run(
        [sys.executable, str(HERE / "_iomodel_kernels.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        found = json.loads(line)
        yield BenchmarkRow.of(
            [found["seconds"]],
            topic="iomodel",
            case=f"bytes of kernels, {found['case']}",
            arm=found["kernel"],
            moved_bytes=found["counted"],
            extra={"model": found["model"], "is_equal": found["counted"] == found["model"]},
            **where,
        )


PARTS: dict[str, Callable[..., Iterator[BenchmarkRow]]] = {
    "crossover": crossover_rows,
    "kernels": kernel_rows,
    "caches": cache_rows,
    "leads": lead_rows,
    "verdicts": verdict_rows,
    "chains": chain_rows,
    "orders": order_rows,
}


def main() -> None:
    """Measure the parts that are asked for and write a row at a time."""
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part (default: all)")
    parser.add_argument("--match", default="", help="verdicts and chains whose names have this")
    options = parser.parse_args()
    parts = options.part or list(PARTS)
    if options.dry_run:
        announce((part, "all arms") for part in parts)
        return
    where = environment(options.device)
    for part in parts:
        matched = {"match": options.match} if part in ("verdicts", "chains") else {}
        for row in PARTS[part](where, options.device, **matched):
            print(row)
            write_rows([row], options.out)


if __name__ == "__main__":
    main()
