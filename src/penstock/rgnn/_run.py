"""Plans as functions that autograd knows: the forward, what is kept of it, and the backward.

A backend computes values of a laid-out program; everything around that is the same for all of them
and stands here. The backward is the program's own, in one `autograd.Function`; what it needs of the
forward is kept, but never a gather, which is read again from its source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from penstock.rgnn._differentiate import Differentiated
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan

Tensors = tuple[torch.Tensor, ...]


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
    ) -> tuple[Tensors, dict[int, torch.Tensor]]:
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


class Runner:
    """A plan and a backend, with what is the same in every run.

    Args:
        plan: Made for the graphs that it runs on, or for one whose counts are alike.
        execute: The backend.
    """

    def __init__(self, plan: Plan, execute: Execute) -> None:
        of_name = plan.program.inputs()
        self.plan = plan
        self.names = tuple(plan.traced.inputs())
        """The inputs, in the order in which `forward` takes them."""
        self.saved = tuple(i for i, name in enumerate(self.names) if of_name[name] in plan.kept)
        """The places of those that the backward reads."""
        self._execute = execute
        self._saved_names = tuple(self.names[place] for place in self.saved)
        self._keep = tuple(sorted(plan.kept.difference(of_name.values())))
        self._outputs = plan.program.outputs[: plan.num_outputs]
        self._gradients = plan.program.outputs[plan.num_outputs :]
        self._seeds = tuple(Differentiated.seed(k) for k in range(plan.num_outputs))

    def forward(self, graph: Graph, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        """The outputs, and the values that the backward needs beside the saved inputs."""
        arguments = dict(zip(self.names, tensors, strict=True))
        plan = self.plan
        results, kept = self._execute(
            plan, graph, plan.forward, {}, arguments, self._outputs, self._keep
        )
        return results, tuple(kept[at] for at in self._keep)

    def backward(
        self,
        graph: Graph,
        saved: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each input; None for those that the plan has none for."""
        arguments = dict(zip(self._saved_names, saved, strict=True))
        arguments.update(zip(self._seeds, gradients, strict=True))
        given = dict(zip(self._keep, kept, strict=True))
        plan = self.plan
        results, _ = self._execute(
            plan, graph, plan.backward, given, arguments, self._gradients, ()
        )
        found = dict(zip(plan.wrt, results, strict=True))
        return tuple(found.get(name) for name in self.names)


def run(runner: Runner, graph: Graph, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Run a plan, with gradients for `plan.wrt`.

    Args:
        runner: Of a plan for this graph, or for one whose counts are alike.
        graph: On the device of the tensors.
        tensors: One for each of `runner.names`, of one floating dtype.

    Returns:
        The outputs, in the program's order.
    """
    if not runner.plan.wrt:
        return runner.forward(graph, tensors)[0]
    return _Run.apply(runner, graph, *tensors)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: Runner, graph: Graph, *tensors: torch.Tensor) -> Tensors:
        results, kept = runner.forward(graph, tensors)
        # Inputs are saved as autograd knows them, so that a change in place is noticed.
        ctx.save_for_backward(*(tensors[place] for place in runner.saved), *kept)
        ctx.runner, ctx.graph = runner, graph
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        runner: Runner = ctx.runner
        tensors, num_saved = ctx.saved_tensors, len(runner.saved)  # a checkpoint unpacks them once
        with torch.no_grad():
            found = runner.backward(ctx.graph, tensors[:num_saved], tensors[num_saved:], gradients)
        if torch.is_grad_enabled():  # create_graph=True: an error where it is made use of
            marker = torch.empty(0, requires_grad=True)
            found = [None if one is None else _Once.apply(one, marker) for one in found]
        return None, None, *found


class _Once(torch.autograd.Function):
    """A gradient that can be used, but not differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "a compiled program is differentiable once, not twice; for second derivatives use what "
            "the function's to_torch() returns"
        )
