"""`bind` and `fit`: steps that are called with batches, of a plan, or planned within a budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.executor._planned_step import PlannedStep
from penstock.executor.run.binder import Binder
from penstock.executor.run.planning import CachedPlanner, PlannedGraph
from penstock.executor.run.shadow import Shadow
from penstock.executor.state.initial import Initialization, Initializer
from penstock.graph import StepGraph
from penstock.graph.capturing.step_program import StepProgram, check_optimizer
from penstock.memory import FileStore, MachineProfile
from penstock.planner import Found, Plan
from penstock.units import parse_bytes


def bind(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    graph: StepGraph | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    extra_plans: Sequence[tuple[Plan, StepGraph]] = (),
    initialize: Initializer | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    debug: bool = False,
    shadow: int | None = None,
) -> PlannedStep:
    """Make a training step that runs exactly as planned.

    One arena of the planned bytes is allocated, in which every value has its planned offset; values
    are offloaded to host memory or a file behind the computation. The results are those of
    `penstock.graph.run`, bit for bit.

    Example:
        >>> graph = penstock.capture(model, optimizer, batch)  # doctest: +SKIP
        >>> plan = penstock.plan(graph, device_memory="4GiB", store="/mnt/nvme")  # doctest: +SKIP
        >>> with penstock.bind(plan, model, optimizer, store="/mnt/nvme") as step:  # doctest: +SKIP
        ...     for batch in batches:
        ...         loss = step(batch)

    Args:
        plan: A plan for the step of this model and optimizer.
        model: The model; its parameters and buffers move to the plan's places.
        optimizer: Its optimizer; state that does not exist yet is made.
        graph: The step that was planned. None: it is captured with the first batch, which also
            proves that the plan is for this model, optimizer and batch.
        loss: `loss(output, batch)`, as given to `penstock.capture`. None: the output has the loss.
        before_step: Called between backward and the optimizer's step, as given to
            `penstock.capture`; for a step without `graph`, and for `shadow`.
        accumulate: The number of micro-batches in a batch, as given to `penstock.capture`; for a
            step without `graph`.
        extra_plans: Plans for batches of other forms, with their graphs. All plans share one arena,
            one block of host memory and one extent of the file, as large as the largest needs; each
            step runs the plan that its batch fits, after parameters and state have moved to that
            plan's places. State below the device stays where it is.
        initialize: First numbers of parameters and buffers on the meta device, which are made in
            the plan's places: a function that is called with each module that has such, or
            safetensors files with the model's names. None: the module's `reset_parameters`.
        store: Directory or `FileStore` of the file tier; needed if the plan uses it.
        debug: Overwrite bytes that are freed, and compare bytes that come back with those that
            left.
        shadow: Compare every so many-th step with the program itself: its operators with those that
            were captured, and its loss, called eagerly on the same numbers, with the step's. None:
            the first two steps, and then at distances that double; the eager call only if the
            budget has room for it (the report says so). 0: never.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        PlanError: The plan is wrong, or for another graph (rule `"graph"`).
        GraphFileError: The graph is not of this model and optimizer; nothing has moved.
        CaptureError: The model is sharded (FSDP2) in a way that a graph does not hold; or there are
            several ranks, and the step averages no gradients over them.
        StoreError: The store cannot be used, or has not enough room.
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, from penstock.plan or Plan.load; got {plan!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}")
    check_optimizer(optimizer)
    if extra_plans and graph is None:
        raise ValueError(
            "extra_plans=[...] needs graph=: the graphs of all plans, to tell batches apart"
        )
    file_bytes = max(each.peak_file_bytes for each in [plan, *(extra for extra, _ in extra_plans)])
    if store is None and file_bytes:
        raise ValueError(
            f"store=None: the plan keeps up to {file_bytes} bytes in a file; pass the directory"
        )
    file_store = None if store is None else FileStore.of(store)
    program = StepProgram(model, None, loss, before_step, accumulate)
    binder = Binder(program=program, optimizer=optimizer, store=file_store, debug=debug)
    initialization = Initialization([*program.roots().values()], initialize)
    checks = Shadow(program, shadow)
    if graph is None:
        return PlannedStep(binder, plan, initialization, checks)
    planned = [PlannedGraph(*each) for each in [(plan, graph), *extra_plans]]
    return PlannedStep(binder, planned, initialization, checks)


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
