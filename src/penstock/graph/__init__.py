"""A training step as a graph: what runs, which values it needs, how many bytes they have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.graph._alignment import (
    TENSOR_ALIGNMENT_BYTES,
    alignment_bytes,
    least_alignment_bytes,
)
from penstock.graph.step_graph import Kind, Operator, Phase, StepGraph, Storage, TensorView

if TYPE_CHECKING:
    from penstock.graph._run import run
    from penstock.graph.capturing.capture import capture
    from penstock.graph.costs.measurement import measure
    from penstock.graph.costs.roofline import operator_seconds
    from penstock.graph.costs.workspace import with_workspace
    from penstock.graph.splitting.split import split

__all__ = [
    "TENSOR_ALIGNMENT_BYTES",
    "Kind",
    "Operator",
    "Phase",
    "StepGraph",
    "Storage",
    "TensorView",
    "alignment_bytes",
    "capture",
    "least_alignment_bytes",
    "measure",
    "operator_seconds",
    "run",
    "split",
    "with_workspace",
]

_HOME_OF_NAME = {
    "capture": "capturing.capture",
    "measure": "costs.measurement",
    "operator_seconds": "costs.roofline",
    "run": "_run",
    "split": "splitting.split",
    "with_workspace": "costs.workspace",
}


def __getattr__(name: str) -> Any:
    """Load what needs torch on first use (PEP 562): graphs themselves are plain data."""
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'penstock.graph' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.graph.{_HOME_OF_NAME[name]}"), name)
    globals()[name] = value
    return value
