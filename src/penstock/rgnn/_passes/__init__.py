"""Rewrites of programs: what they compute stays the same, how becomes cheaper.

Each is a function from a program and a graph's counts to another program; it says what it did and
what it left, with the reason.
"""

from penstock.rgnn._passes._aggregate import aggregate_first
from penstock.rgnn._passes._common import common_subexpressions
from penstock.rgnn._passes._compact import choose_rows, compact, lay_out
from penstock.rgnn._passes._concat import split_concat
from penstock.rgnn._passes._decision import Decision, Rewritten
from penstock.rgnn._passes._recompute import recompute
from penstock.rgnn._passes._reorder import reorder

__all__ = [
    "Decision",
    "Rewritten",
    "aggregate_first",
    "choose_rows",
    "common_subexpressions",
    "compact",
    "lay_out",
    "recompute",
    "reorder",
    "split_concat",
]
