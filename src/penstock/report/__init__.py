"""Ledgers as things to look at: Chrome traces for Perfetto, and pictures."""

from penstock.report._picture import draw_timeline
from penstock.report._trace import chrome_trace, write_chrome_trace

__all__ = ["chrome_trace", "draw_timeline", "write_chrome_trace"]
