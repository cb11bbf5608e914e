"""Ledgers and plans as Chrome traces for Perfetto, as pictures and as text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.report._comparison import ComparisonPoint, draw_comparison
from penstock.report._picture import draw_timeline
from penstock.report._trace import chrome_trace, write_chrome_trace

if TYPE_CHECKING:
    from penstock.report._plan_picture import draw_plan
    from penstock.report._plan_sweep import Sweep, SweepPoint, draw_sweep
    from penstock.report._plan_text import plan_blocks, plan_table
    from penstock.report._plan_timeline import plan_timeline
    from penstock.report._plan_trace import plan_trace, write_plan_trace

__all__ = [
    "ComparisonPoint",
    "Sweep",
    "SweepPoint",
    "chrome_trace",
    "draw_comparison",
    "draw_plan",
    "draw_sweep",
    "draw_timeline",
    "plan_blocks",
    "plan_table",
    "plan_timeline",
    "plan_trace",
    "write_chrome_trace",
    "write_plan_trace",
]

# Functions of plans load on first use.
_HOME_OF_NAME = {
    "Sweep": "_plan_sweep",
    "SweepPoint": "_plan_sweep",
    "draw_plan": "_plan_picture",
    "draw_sweep": "_plan_sweep",
    "plan_blocks": "_plan_text",
    "plan_table": "_plan_text",
    "plan_timeline": "_plan_timeline",
    "plan_trace": "_plan_trace",
    "write_plan_trace": "_plan_trace",
}


def __getattr__(name: str) -> Any:
    """Load a name on first use (PEP 562)."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'penstock.report' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.report.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
