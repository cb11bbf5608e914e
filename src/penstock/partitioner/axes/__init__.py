"""Axes of operators and storages: along which each may be split, and what that asks of others."""

from penstock.partitioner.axes._axes import GraphAxes, OperatorAxes, Use, find_axes
from penstock.partitioner.axes._rules import AxisRule, LabelledView, find_rule
from penstock.partitioner.axes._table import is_heavy
from penstock.partitioner.axes._writes import mark_writes

__all__ = [
    "AxisRule",
    "GraphAxes",
    "LabelledView",
    "OperatorAxes",
    "Use",
    "find_axes",
    "find_rule",
    "is_heavy",
    "mark_writes",
]
