"""Plans that run exactly as planned: one arena, planned addresses, planned transfers."""

from penstock.executor._bind import PlannedStep, bind
from penstock.executor._fit import fit
from penstock.executor._operators import executable
from penstock.executor._report import ExecutionReport

__all__ = ["ExecutionReport", "PlannedStep", "bind", "executable", "fit"]
