"""Selectors: the blocks of a context that a step reads.

A selector has one method, `select(query, layer, pool) -> blocks`. `DoubleSparsity` and `Nosa` look
at the query, `Accumulated` at the attention so far, `Window` at the position only.
"""

from penstock.kv.selectors._budget import BlockCounts, BudgetSelector
from penstock.kv.selectors._checked import CheckedSelector
from penstock.kv.selectors._double_sparsity import ChannelCalibration, DoubleSparsity
from penstock.kv.selectors._nosa import Nosa
from penstock.kv.selectors._simple import Accumulated, Window

__all__ = [
    "Accumulated",
    "BlockCounts",
    "BudgetSelector",
    "ChannelCalibration",
    "CheckedSelector",
    "DoubleSparsity",
    "Nosa",
    "Window",
]
