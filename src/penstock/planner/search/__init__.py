"""The planner of method "auto": order, residency, recomputation and addresses by search."""

from penstock.planner.search._auto_plan import interference_per_byte, plan_auto
from penstock.planner.search._plan_residency import plan_residency
from penstock.planner.search._problem import Problem, load_engine
from penstock.planner.search._residency import EvictionChoice
from penstock.planner.search._sequence import OperatorSequence

__all__ = [
    "EvictionChoice",
    "OperatorSequence",
    "Problem",
    "interference_per_byte",
    "load_engine",
    "plan_auto",
    "plan_residency",
]
