"""What no plan of a step can beat."""

from penstock.planner.bounds._bounds import WorkingSet, lower_bound, quick_parts, working_set
from penstock.planner.bounds._forced import forced_bytes, made_anew, relatives
from penstock.planner.bounds._lives import lives_of

__all__ = [
    "WorkingSet",
    "forced_bytes",
    "lives_of",
    "lower_bound",
    "made_anew",
    "quick_parts",
    "relatives",
    "working_set",
]
