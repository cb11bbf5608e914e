"""Plans that run exactly as planned: one arena, planned addresses, planned transfers."""

from penstock.executor._fit import PlannedStep, bind, fit
from penstock.executor.run.distributed import average_gradients
from penstock.executor.run.report import ExecutionReport
from penstock.executor.state.safetensors import save_safetensors

__all__ = [
    "ExecutionReport",
    "PlannedStep",
    "average_gradients",
    "bind",
    "fit",
    "save_safetensors",
]
