"""Plans that run exactly as planned: one arena, planned addresses, planned transfers."""

from penstock.executor._bind import PlannedStep, bind
from penstock.executor._operators import with_results_in_workspace
from penstock.executor._report import ExecutionReport

__all__ = ["ExecutionReport", "PlannedStep", "bind", "with_results_in_workspace"]
