"""Half precision by a backend that has none: computed in float32, and rounded once at the end.

A sum of bfloat16 numbers in bfloat16 stops growing at 256 times what is added, so no sum, mean or
softmax may be kept in the dtype of the arguments. What the forward keeps for the backward stays in
float32 as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.rgnn._graph import Graph
from penstock.rgnn._interpreter import wide_dtype
from penstock.rgnn._plan import Plan
from penstock.rgnn._run import Execute


def widened(execute: Execute) -> Execute:
    """Return a backend that takes narrow arguments too, and computes them in float32."""

    def execute_wide(
        plan: Plan,
        graph: Graph,
        values: frozenset[int],
        given: Mapping[int, torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        outputs: Sequence[int],
        keep: Collection[int],
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Compute values of a plan; see `_run.Execute`."""
        dtype = next((tensor.dtype for tensor in arguments.values()), torch.get_default_dtype())
        if (computed := wide_dtype(dtype)) is dtype:
            return execute(plan, graph, values, given, arguments, outputs, keep)
        wide = {name: tensor.to(computed) for name, tensor in arguments.items()}
        results, kept = execute(plan, graph, values, given, wide, outputs, keep)
        return tuple(result.to(dtype) for result in results), kept

    return execute_wide
