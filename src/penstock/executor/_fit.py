"""`fit`: from a model, an optimizer and a batch to a step that keeps within a memory budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.executor._bind import PlannedStep, bind
from penstock.executor._operators import executable
from penstock.executor._plan_cache import Planned, plan_entry
from penstock.graph import StepGraph, capture, measure
from penstock.memory import FileStore, MachineProfile
from penstock.planner import Found, plan
from penstock.units import format_bytes, format_seconds, parse_bytes

_logger = logging.getLogger(__name__)

_NUM_RUNS = 3  # of each operator, where their times are measured


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    device_memory: int | str,
    host_memory: int | str | None = None,
    store: FileStore | str | os.PathLike[str] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    machine: MachineProfile | str | None = None,
    time_limit: float = 60,
    seed: int = 0,
    progress: Callable[[Found], None] | None = None,
    cache: bool = True,
    debug: bool = False,
) -> PlannedStep:
    """Make a training step that keeps within a memory budget: capture, plan, check and bind.

    Example:
        >>> step = penstock.fit(  # doctest: +SKIP
        ...     model, optimizer, batch, device_memory="4GiB", store="/mnt/nvme"
        ... )
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss = step(batch)
        >>> print(step.report())  # doctest: +SKIP

    Args:
        model: The model, with its parameters; they move to where the plan has them.
        optimizer: Its optimizer.
        batch: A batch; all batches must have its shapes and dtypes.
        device_memory: Bytes, or a size such as `"8GiB"`, for parameters, optimizer state,
            activations and the operators' workspace.
        host_memory: Bytes of the host tier: RAM beside that budget.
        store: Directory or `FileStore` of the file tier.
        loss: `loss(output, batch)`, as given to `penstock.capture`.
        machine: What times are based on. None: this machine, whose links are probed and on which
            each distinct operator runs a few times.
        time_limit: Seconds that planning may take.
        seed: Of the planner.
        progress: Called with each improvement of the plan.
        cache: Whether plans are kept, and used again for the same step, budget and machine.
        debug: As of `bind`.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        InfeasibleError: No plan fits the budgets; the message says what would do.
        CaptureError: The step depends on the data beyond values of tensors.
        PlanError, GraphFileError, StoreError, TypeError, ValueError: As of `penstock.capture`,
            `penstock.plan` and `bind`.
    """
    begin = time.perf_counter()
    graph = executable(capture(model, optimizer, batch, loss=loss))
    _logger.info(
        "captured %d operators in %s",
        len(graph.operators),
        format_seconds(time.perf_counter() - begin),
    )
    budgets = [
        None if size is None else parse_bytes(size, name=name)
        for name, size in (("device_memory", device_memory), ("host_memory", host_memory))
    ]

    def make() -> Planned:
        timed = measure(graph, num_runs=_NUM_RUNS) if machine is None else graph
        found = plan(
            timed,
            device_memory=budgets[0],
            host_memory=budgets[1],
            store=store,
            machine=machine,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
        )
        return Planned(timed, found)

    if not cache:
        planned = make()
    else:
        with plan_entry(_key(graph, budgets, store, machine, time_limit, seed)) as entry:
            known = entry.load()
            planned = known or make()
            if known is None:
                entry.save(planned)
    _logger.info(
        "plan: %s of device memory, %s a step, at least %s",
        format_bytes(planned.plan.peak_device_bytes),
        format_seconds(planned.plan.step_seconds),
        format_seconds(planned.plan.lower_bound_seconds),
    )
    return bind(
        planned.plan,
        model,
        optimizer,
        graph=planned.graph,
        loss=loss,
        store=store,
        debug=debug,
    )


def _key(
    graph: StepGraph,
    budgets: list[int | None],
    store: FileStore | str | os.PathLike[str] | None,
    machine: MachineProfile | str | None,
    time_limit: float,
    seed: int,
) -> list[object]:
    """What a plan depends on."""
    from penstock import __version__

    where: object = None
    if store is not None:
        file_store = FileStore.of(store)
        where = [os.path.abspath(file_store.path), file_store.max_bytes]
    profile: object = machine if isinstance(machine, str | None) else machine.to_dict()
    threads = torch.get_num_threads() if machine is None else None
    metadata = {name: repr(value) for name, value in sorted(graph.metadata.items())}
    versions = [__version__, torch.__version__]
    return [versions, graph.digest, metadata, budgets, where, profile, threads, time_limit, seed]
