"""Train PyTorch models past memory: saved activations leave for host memory or files and come back,
and tables larger than memory are read where they lie.

This file holds the public names and nothing else. They load on first use, so `import penstock`
touches no GPU, compiler, network or disk and does not import torch.
"""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily
from penstock._version import __version__

if TYPE_CHECKING:
    from penstock import (
        activations,
        attention,
        batching,
        errors,
        executor,
        graph,
        integrations,
        iomodel,
        kv,
        lora,
        ops,
        partitioner,
        planner,
        report,
        rgnn,
        spectral,
        traversal,
        unified,
    )

    # The floor: importable, but not what programs use.
    from penstock import codegen as codegen
    from penstock import compat as compat
    from penstock import memory as memory
    from penstock import solvers as solvers
    from penstock import tables as tables
    from penstock import units as units
    from penstock.activations import Offload, OffloadReport, offload
    from penstock.errors import InfeasibleError, PenstockError, PlanError
    from penstock.executor import ExecutionReport, PlannedStep, bind, fit
    from penstock.graph import StepGraph, capture
    from penstock.memory import FileStore, MachineProfile, probe
    from penstock.partitioner import JointPlan, Partition, partition, plan
    from penstock.planner import Plan
    from penstock.unified import UnifiedReport, UnifiedTensor, unify

__all__ = [
    "ExecutionReport",
    "FileStore",
    "InfeasibleError",
    "JointPlan",
    "MachineProfile",
    "Offload",
    "OffloadReport",
    "Partition",
    "PenstockError",
    "Plan",
    "PlanError",
    "PlannedStep",
    "StepGraph",
    "UnifiedReport",
    "UnifiedTensor",
    "__version__",
    "activations",
    "attention",
    "batching",
    "bind",
    "capture",
    "errors",
    "executor",
    "fit",
    "graph",
    "integrations",
    "iomodel",
    "kv",
    "lora",
    "offload",
    "ops",
    "partition",
    "partitioner",
    "plan",
    "planner",
    "probe",
    "report",
    "rgnn",
    "spectral",
    "traversal",
    "unified",
    "unify",
]

__getattr__, __dir__ = load_lazily(__name__)
