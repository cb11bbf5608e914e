"""Traversals of `penstock.traversal` against their peers: time, edges, bytes against budgets.

    python benchmarks/graphs.py                 # all parts
    python benchmarks/graphs.py --part khop

Each part has its arms in a file of its own, `_graphs_PART.py`, which says what they are. Graphs are
those of $PENSTOCK_DATA. The arms of a case take turns in one process; ratios are taken within
a round.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import run_parts

PARTS = ("khop", "ranks", "inference")

if __name__ == "__main__":
    run_parts(__doc__, "graphs", PARTS)
