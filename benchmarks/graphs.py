"""Traversals of `penstock.traversal` against their peers: time, edges, bytes against budgets.

    python benchmarks/graphs.py                 # all parts
    python benchmarks/graphs.py --part khop

Each part has its arms in a file of its own, `_graphs_PART.py`, which says what they are. Graphs are
those of $PENSTOCK_DATA. The arms of a case take turns in one process; ratios are taken within
a round.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import announce, argument_parser, environment, write_rows

PARTS = ("khop", "ranks", "inference")
"""Names of files `_graphs_PART.py`, each with `announce_rows(options)`, pairs of a case and an arm,
and `measure_rows(options, where)`, the rows."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--match", default="", help="cases whose names have this")
    options = parser.parse_args()
    for part in options.part:
        module = importlib.import_module(f"_graphs_{part}")
        if options.dry_run:
            announce(module.announce_rows(options))
            continue
        for row in module.measure_rows(options, environment(options.device)):
            print(row, file=sys.stderr, flush=True)
            write_rows([row], options.out)


if __name__ == "__main__":
    main()
