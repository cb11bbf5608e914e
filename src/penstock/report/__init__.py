"""Ledgers and plans as Chrome traces for Perfetto, as pictures and as text."""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily
from penstock.report._comparison import (
    ComparisonPoint,
    Sweep,
    SweepPoint,
    draw_comparison,
    draw_sweep,
)
from penstock.report._picture import draw_timeline
from penstock.report._trace import chrome_trace, write_chrome_trace

if TYPE_CHECKING:
    from penstock.report._partition import (
        describe_placement,
        draw_frontier,
        frontier_table,
        partition_map,
    )
    from penstock.report._plan import (
        draw_plan,
        plan_blocks,
        plan_table,
        plan_timeline,
        plan_trace,
        write_plan_trace,
    )

__all__ = [
    "ComparisonPoint",
    "Sweep",
    "SweepPoint",
    "chrome_trace",
    "describe_placement",
    "draw_comparison",
    "draw_frontier",
    "draw_plan",
    "draw_sweep",
    "draw_timeline",
    "frontier_table",
    "partition_map",
    "plan_blocks",
    "plan_table",
    "plan_timeline",
    "plan_trace",
    "write_chrome_trace",
    "write_plan_trace",
]

__getattr__, __dir__ = load_lazily(__name__)
