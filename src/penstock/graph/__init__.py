"""A training step as a graph: what runs, which values it needs, how many bytes they have."""

from penstock.graph._step_graph import Kind, Operator, Phase, StepGraph, Storage, TensorView

__all__ = ["Kind", "Operator", "Phase", "StepGraph", "Storage", "TensorView"]
