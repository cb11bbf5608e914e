"""Plans as functions that autograd knows: the forward, what is kept of it, and the backward.

A backend computes values of a laid-out program; everything around that is the same for all of them
and stands here. The backward is the program's own, in one `autograd.Function`; what it needs of the
forward is kept, but never a gather, which is read again from its source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from penstock.rgnn._differentiate import Differentiated
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan


class Execute(Protocol):
    """What a backend is: a function that computes some values of a plan."""

    def __call__(
        self,
        plan: Plan,
        graph: Graph,
        values: frozenset[int],
        given: Mapping[int, torch.Tensor],
        arguments: Mapping[str, torch.Tensor],
        outputs: Sequence[int],
        keep: Collection[int],
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Compute values of a plan's program.

        Args:
            plan: Made for this graph, or for one whose counts are alike.
            graph: On the device of the tensors.
            values: Positions to compute: `plan.forward` or `plan.backward`.
            given: Rows of values that have been computed before, by position.
            arguments: Inputs by name, as the user has them (edges in the order given).
            outputs: Positions of the results.
            keep: Positions whose rows are wanted besides.

        Returns:
            The outputs as the user has them, none sharing memory with another or with an argument,
            and the rows of `keep` by position.
        """
        ...


def run(
    plan: Plan, graph: Graph, arguments: Mapping[str, torch.Tensor], execute: Execute
) -> tuple[torch.Tensor, ...]:
    """Run a plan, with gradients for `plan.wrt`.

    Args:
        plan: Made for this graph, or for one whose counts are alike.
        graph: On the device of the arguments.
        arguments: A tensor for each input of the traced program, of one floating dtype.
        execute: The backend.

    Returns:
        The outputs, in the program's order.
    """
    names = tuple(plan.traced.inputs())
    tensors = tuple(arguments[name] for name in names)
    return _Run.apply(plan, graph, execute, names, *tensors)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        graph: Graph,
        execute: Execute,
        names: tuple[str, ...],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # Inputs are saved as autograd knows them, so that a change in place is noticed.
        of_name = plan.program.inputs()
        saved = {
            name: t for name, t in zip(names, tensors, strict=True) if of_name[name] in plan.kept
        }
        keep = tuple(sorted(plan.kept.difference(of_name.values())))
        outputs = plan.program.outputs[: plan.num_outputs]
        arguments = dict(zip(names, tensors, strict=True))
        results, kept = execute(plan, graph, plan.forward, {}, arguments, outputs, keep)
        ctx.save_for_backward(*saved.values(), *(kept[at] for at in keep))
        ctx.plan, ctx.graph, ctx.execute = plan, graph, execute
        ctx.names, ctx.saved_names, ctx.kept = names, tuple(saved), keep
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan: Plan = ctx.plan
        num_saved = len(ctx.saved_names)
        tensors, kept = ctx.saved_tensors[:num_saved], ctx.saved_tensors[num_saved:]
        arguments = dict(zip(ctx.saved_names, tensors, strict=True))
        arguments |= {Differentiated.seed(k): grad for k, grad in enumerate(gradients)}
        given = dict(zip(ctx.kept, kept, strict=True))
        outputs = plan.program.outputs[plan.num_outputs :]
        results, _ = ctx.execute(plan, ctx.graph, plan.backward, given, arguments, outputs, ())
        found = dict(zip(plan.wrt, results, strict=True))
        return (None, None, None, None, *(found.get(name) for name in ctx.names))
