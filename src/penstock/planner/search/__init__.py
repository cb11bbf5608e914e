"""The planner itself: order, residency, recomputation and addresses by search."""

from penstock.planner.search._auto_plan import plan_auto, toll_of_byte
from penstock.planner.search._engine import load_engine

__all__ = ["load_engine", "plan_auto", "toll_of_byte"]
