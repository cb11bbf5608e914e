"""Plans that run exactly as planned: one arena, planned addresses, planned transfers."""

from penstock.executor._bind import PlannedStep, bind
from penstock.executor._distributed import average_gradients
from penstock.executor._fit import fit
from penstock.executor._report import ExecutionReport
from penstock.executor._safetensors import save_safetensors

__all__ = [
    "ExecutionReport",
    "PlannedStep",
    "average_gradients",
    "bind",
    "fit",
    "save_safetensors",
]
