"""Train PyTorch models past memory: saved activations leave for host memory or files and come back,
and tables larger than memory are read where they lie.

This file holds the public names and nothing else. They load on first use, so `import penstock`
touches no GPU, compiler, network or disk and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock._version import __version__

if TYPE_CHECKING:
    from penstock import (
        activations,
        batching,
        codegen,
        errors,
        executor,
        graph,
        integrations,
        memory,
        planner,
        report,
        rgnn,
        tables,
        traversal,
        unified,
        units,
    )
    from penstock.activations import Offload, OffloadReport, offload
    from penstock.errors import InfeasibleError, PenstockError, PlanError
    from penstock.executor import ExecutionReport, PlannedStep, bind, fit
    from penstock.graph import StepGraph, capture
    from penstock.memory import FileStore, MachineProfile, probe
    from penstock.planner import Plan, plan
    from penstock.unified import UnifiedReport, UnifiedTensor, unify

__all__ = [
    "ExecutionReport",
    "FileStore",
    "InfeasibleError",
    "MachineProfile",
    "Offload",
    "OffloadReport",
    "PenstockError",
    "Plan",
    "PlanError",
    "PlannedStep",
    "StepGraph",
    "UnifiedReport",
    "UnifiedTensor",
    "__version__",
    "activations",
    "batching",
    "bind",
    "capture",
    "codegen",
    "errors",
    "executor",
    "fit",
    "graph",
    "integrations",
    "memory",
    "offload",
    "plan",
    "planner",
    "probe",
    "report",
    "rgnn",
    "tables",
    "traversal",
    "unified",
    "unify",
    "units",
]

_HOME_OF_NAME = {
    "ExecutionReport": "executor",
    "FileStore": "memory",
    "InfeasibleError": "errors",
    "MachineProfile": "memory",
    "Offload": "activations",
    "OffloadReport": "activations",
    "PenstockError": "errors",
    "Plan": "planner",
    "PlanError": "errors",
    "PlannedStep": "executor",
    "StepGraph": "graph",
    "UnifiedReport": "unified",
    "UnifiedTensor": "unified",
    "bind": "executor",
    "capture": "graph",
    "fit": "executor",
    "offload": "activations",
    "plan": "planner",
    "probe": "memory",
    "unify": "unified",
}


def __getattr__(name: str) -> Any:
    """Load a public name or a subpackage on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    if name in _HOME_OF_NAME:
        value = getattr(import_module(f"penstock.{_HOME_OF_NAME[name]}"), name)
    else:
        value = import_module(f"penstock.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
