"""SwapAdvisor's genetic algorithm over schedules and allocations, to compare with."""

from penstock.planner.genetic._genetic import plan_genetic

__all__ = ["plan_genetic"]
