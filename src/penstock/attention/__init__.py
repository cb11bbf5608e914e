"""Attention that computes and reads only the blocks of a layout, forward and backward.

`blocksparse` is the operator; `Layout` says which queries see which keys. `docs/attention.md` shows
them.
"""

from penstock.attention._blocksparse import blocksparse
from penstock.attention._layout import Layout
from penstock.attention._report import AttentionReport, blocksparse_report

__all__ = ["AttentionReport", "Layout", "blocksparse", "blocksparse_report"]
