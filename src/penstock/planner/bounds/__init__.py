"""Lower bounds: times and bytes that no plan of a step beats."""

from penstock.planner.bounds._bounds import WorkingSet, lower_bound, quick_parts, working_set
from penstock.planner.bounds._fixed_order import operator_bytes
from penstock.planner.bounds._forced import forced_bytes, made_anew, relatives

__all__ = [
    "WorkingSet",
    "forced_bytes",
    "lower_bound",
    "made_anew",
    "operator_bytes",
    "quick_parts",
    "relatives",
    "working_set",
]
