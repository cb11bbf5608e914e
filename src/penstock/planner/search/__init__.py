"""The planner of method "auto": order, residency, recomputation and addresses by search."""

from penstock.planner.search._auto_plan import plan_auto
from penstock.planner.search._grid import interference_per_byte
from penstock.planner.search._library import load_engine

__all__ = ["interference_per_byte", "load_engine", "plan_auto"]
