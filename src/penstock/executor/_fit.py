"""`fit`: from a model, an optimizer and a batch to a step that keeps within a memory budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.executor._planned_step import PlannedStep
from penstock.executor.run.binder import Binder
from penstock.executor.run.planning import CachedPlanner
from penstock.executor.run.shadow import Shadow
from penstock.executor.state.initial import Initialization, Initializer
from penstock.graph.capturing.step_program import StepProgram
from penstock.memory import FileStore, MachineProfile
from penstock.planner import Found
from penstock.units import parse_bytes


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    extra_batches: Sequence[Any] = (),
    initialize: Initializer | None = None,
    machine: MachineProfile | str | None = None,
    time_limit: float = 60,
    seed: int = 0,
    progress: Callable[[Found], None] | None = None,
    cache: bool = True,
    debug: bool = False,
    shadow: int | None = None,
) -> PlannedStep:
    """Make a training step that keeps within a memory budget: capture, plan, check and bind.

    If the first steps take more than a quarter longer than planned, the step is planned again with
    the times that they have shown, once, before the seventh; the faster plan of the two is kept.

    Example:
        >>> step = penstock.fit(  # doctest: +SKIP
        ...     model, optimizer, batch, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = step(batch)
        >>> print(step.report())  # doctest: +SKIP

    Args:
        model: The model; its parameters and buffers move to the plan's places.
        optimizer: Its optimizer; state that does not exist yet is made.
        batch: A batch; all batches must have its shapes and dtypes, or those of one in
            `extra_batches`.
        device_memory: Bytes, or a size such as `"8GiB"`, for parameters, optimizer state,
            activations and the operators' workspace.
        host_memory: Bytes of the host tier: RAM beside that budget.
        store: Directory or `FileStore` of the file tier.
        loss: `loss(output, batch)`, which returns a scalar. None: the output has the loss.
        before_step: Called without arguments between backward and the optimizer's step, for example
            to clip gradients.
        accumulate: A batch is a list of this many micro-batches, whose gradients are added up.
        extra_batches: Batches of other shapes, or lists of another number of micro-batches; each
            has a plan, and all share the memory. `PlannedStep.add` takes more of them later.
        initialize: First numbers of parameters and buffers on the meta device: a function that is
            called with each module that has such, or safetensors files with the model's names.
            None: the module's `reset_parameters`.
        machine: The machine whose times plans are based on: a name of `penstock.memory.MACHINES` or
            a profile. None: this machine, whose links are probed and on which each distinct
            operator runs a few times.
        time_limit: Seconds that planning may take. Planning again may take as many, but no more
            than 10 steps could save.
        seed: Seed of the planner's random numbers.
        progress: Called with each improvement of the plan.
        cache: Whether plans are kept, and used again for the same step, budget and machine.
        debug: Overwrite bytes that are freed, and compare bytes that come back with those that
            left.
        shadow: Compare every so many-th step with the program itself, as `bind` describes. None:
            the first two steps, and then at distances that double. 0: never.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        InfeasibleError: No plan fits the budgets; the message names a budget that would do.
        CaptureError: The step depends on the data beyond values of tensors.
        StoreError: The store cannot be used, or has not enough room.
        PlanError, GraphFileError: The step cannot be planned or bound, as in `penstock.plan` and
            `bind`.
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    file_store = None if store is None else FileStore.of(store)
    planner = CachedPlanner(
        device_memory=_parse_optional(device_memory, "device_memory"),
        host_memory=_parse_optional(host_memory, "host_memory"),
        store=file_store,
        machine=machine,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
        cache=cache,
    )
    program = StepProgram(model, None, loss, before_step, accumulate)
    binder = Binder(program=program, optimizer=optimizer, store=file_store, debug=debug)
    checks = Shadow(program, shadow)
    planned = [planner.make_plan(binder.capture(batch, is_extra=False))]
    for each in extra_batches:
        planned.append(planner.make_plan(binder.capture(each, is_extra=True)))
    initialization = Initialization([*program.roots().values()], initialize)
    return PlannedStep(binder, planner.fit_one_arena(planned), initialization, checks, planner)


def _parse_optional(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_bytes(size, name=name)
