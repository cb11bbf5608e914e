"""The planner itself: order, residency, recomputation and addresses by search."""

from penstock.planner.search._auto_plan import plan_auto, toll_of_byte

__all__ = ["plan_auto", "toll_of_byte"]
