"""Training steps as graphs: operators, the values that they need, and the bytes of these."""

from typing import TYPE_CHECKING

from penstock._lazy import load_lazily
from penstock.graph._alignment import (
    TENSOR_ALIGNMENT_BYTES,
    alignment_bytes,
    least_alignment_bytes,
)
from penstock.graph.step_graph import Kind, Operator, Phase, StepGraph, Storage, TensorView

if TYPE_CHECKING:
    from penstock.graph._run import run
    from penstock.graph.capturing.capture import capture
    from penstock.graph.costs.counts import with_workspace
    from penstock.graph.costs.measurement import measure, operator_seconds
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

__getattr__, __dir__ = load_lazily(__name__)
