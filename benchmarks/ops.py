"""Operators of `penstock.ops` against their peers: time, peak memory, bytes and rounding errors.

    python benchmarks/ops.py                              # all parts
    python benchmarks/ops.py --part rational windows
    python benchmarks/ops.py --device cuda --part rational

Each part has its arms in a file of its own, `_ops_PART.py`, which says what they are. The arms of a
case take turns in one process; ratios are taken within a round.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import run_parts

PARTS = ("rational", "windows", "spgemm", "deform")

if __name__ == "__main__":
    run_parts(__doc__, "ops", PARTS)
