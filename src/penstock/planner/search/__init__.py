"""The planner of method "auto": order, residency, recomputation and addresses by search."""

from penstock.planner.search._auto_plan import plan_auto
from penstock.planner.search._grid import interference_per_byte
from penstock.planner.search._library import load_engine
from penstock.planner.search._plan_residency import plan_residency
from penstock.planner.search._problem import Problem
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
