"""`bind`: a plan, a model and an optimizer become a step that is called with batches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.errors import GraphFileError, PenstockError
from penstock.executor._execution import Execution
from penstock.executor._operators import executable
from penstock.executor._report import ExecutionReport
from penstock.graph import StepGraph
from penstock.memory import FileStore
from penstock.planner import Plan


class PlannedStep:
    """A training step that runs as planned; `bind` makes it.

    Between steps the model's parameters and buffers and the optimizer's state look at the places
    where the plan has them then, be that the arena, host memory or the file: reading and changing
    them, `state_dict()`, evaluation and checkpoints are as always.

    Usable in a `with` block, which closes it.

    Attributes:
        plan: The plan.
    """

    def __init__(
        self, plan: Plan, execution: Callable[[Any], Execution], ready: Execution | None
    ) -> None:
        self.plan = plan
        self._make = execution
        self._execution: Execution | None = None
        self._closed = False
        if ready is not None:
            self._use(ready)

    def __call__(self, batch: Any) -> torch.Tensor:
        """Take one training step.

        Args:
            batch: A batch of the planned form.

        Returns:
            The loss, detached.

        Raises:
            ValueError: The batch has another form; nothing has moved.
            NonFiniteLossError: The loss is infinite or NaN; nothing has been updated.
            TornStepError: Something failed in the middle of the update; the error says what is
                lost. Whatever else is raised leaves model and optimizer as before the step.
        """
        if self._closed:
            raise PenstockError("this planned step is closed; bind the plan again")
        if self._execution is None:
            self._use(self._make(batch))
        assert self._execution is not None
        return self._execution.step(batch)

    def report(self) -> ExecutionReport:
        """Return what the steps so far took, next to what was planned.

        Raises:
            PenstockError: There was no step yet.
        """
        if self._execution is None:
            raise PenstockError("there is nothing to report before the first step")
        return self._execution.report()

    def close(self) -> None:
        """Give model and optimizer memory of their own, and return everything else. Further calls
        do nothing.
        """
        self._closed = True
        execution, self._execution = self._execution, None
        if execution is not None:
            self._finalizer.detach()
            execution.close()

    def __enter__(self) -> PlannedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, execution: Execution) -> None:
        self._execution = execution
        self._finalizer = weakref.finalize(self, execution.stop)


def bind(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    graph: StepGraph | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    debug: bool = False,
) -> PlannedStep:
    """Make a training step that runs exactly as planned.

    One arena of the planned bytes is taken, in which every value is where the plan has it; what
    leaves goes to host memory or to a file behind the computation. The results are those of
    `penstock.graph.run`, bit for bit.

    Example:
        >>> graph = executable(penstock.capture(model, optimizer, batch))  # doctest: +SKIP
        >>> plan = penstock.plan(graph, device_memory="1/4", store="/mnt/nvme")  # doctest: +SKIP
        >>> with penstock.bind(plan, model, optimizer, store="/mnt/nvme") as step:  # doctest: +SKIP
        ...     for batch in batches:
        ...         loss = step(batch)

    Args:
        plan: A plan for the step of this model and optimizer.
        model: The model; its parameters and buffers move to where the plan has them.
        optimizer: Its optimizer; state that does not exist yet is made.
        graph: The step that was planned: captured, or what `executable` made of it. None: it is
            captured with the first batch, which also proves that the plan is for this model,
            optimizer and batch.
        loss: `loss(output, batch)`, as given to `penstock.capture`.
        store: Directory or `FileStore` of the file tier; needed if the plan uses it.
        debug: Overwrite bytes that are freed, and compare what comes back with what left.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        PlanError: The plan is wrong, or for another graph (rule `"graph"`).
        GraphFileError: The graph is not of this model and optimizer; nothing has moved.
        StoreError: The store cannot be used, or has not enough room.
        TypeError, ValueError: An argument is not what it must be.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, from penstock.plan or Plan.load; got {plan!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {kind}")
    if store is None and plan.peak_file_bytes:
        raise ValueError(
            f"store=None: the plan keeps up to {plan.peak_file_bytes} bytes in a file; pass the "
            "directory"
        )
    file_store = None if store is None else FileStore.of(store)

    def execution(found: StepGraph) -> Execution:
        if found.device != "cpu":
            raise GraphFileError(
                f"the graph is of a step on {found.device!r}; bind runs on the CPU"
            )
        return Execution(found, plan, model, optimizer, loss=loss, store=file_store, debug=debug)

    def with_first_batch(batch: Any) -> Execution:
        from penstock.graph import capture

        found = capture(model, optimizer, batch, loss=loss)
        return execution(found if found.digest == plan.graph_digest else executable(found))

    return PlannedStep(plan, with_first_batch, None if graph is None else execution(graph))
