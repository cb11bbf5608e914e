"""`fit`: from a model, an optimizer and a batch to a step that keeps within a memory budget."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock._version import __version__
from penstock.errors import InfeasibleError
from penstock.executor._bind import PlannedStep, bind
from penstock.executor._distributed import refuse_ranks_apart
from penstock.executor._initial import Initializer
from penstock.executor._plan_cache import Planned, plan_entry
from penstock.executor._refinement import Refinement
from penstock.executor._seam import initial_fill
from penstock.graph import StepGraph, capture, measure
from penstock.memory import FileStore, MachineProfile
from penstock.planner import Found, Plan, plan
from penstock.units import format_bytes, format_seconds, parse_bytes

_logger = logging.getLogger(__name__)

_MOST_ROUNDS = 4  # of planning with less, where several plans share an arena
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
    before_step: Callable[[], object] | None = None,
    accumulate: int | None = None,
    also: Sequence[Any] = (),
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
        model: The model, with its parameters; they move to where the plan has them.
        optimizer: Its optimizer.
        batch: A batch; all batches must have its shapes and dtypes, or those of one in `also`.
        device_memory: Bytes, or a size such as `"8GiB"`, for parameters, optimizer state,
            activations and the operators' workspace.
        host_memory: Bytes of the host tier: RAM beside that budget.
        store: Directory or `FileStore` of the file tier.
        loss: `loss(output, batch)`, as given to `penstock.capture`.
        before_step: Called between backward and the optimizer's step, as to clip gradients; as of
            `penstock.capture`.
        accumulate: A batch is a list of this many micro-batches; as of `penstock.capture`.
        also: Batches of other shapes, or lists of another number of micro-batches; each has a
            plan, and all share the memory. `PlannedStep.add` takes more of them later.
        initialize: First numbers of what is on the meta device; as of `bind`.
        machine: What times are based on. None: this machine, whose links are probed and on which
            each distinct operator runs a few times.
        time_limit: Seconds that planning may take, and planning again; this no more than 10
            steps could save.
        seed: Of the planner.
        progress: Called with each improvement of the plan.
        cache: Whether plans are kept, and used again for the same step, budget and machine.
        debug: As of `bind`.
        shadow: As of `bind`.

    Returns:
        The step: `loss = step(batch)`.

    Raises:
        InfeasibleError: No plan fits the budgets; the message says what would do.
        CaptureError: The step depends on the data beyond values of tensors.
        PlanError, GraphFileError, StoreError, TypeError, ValueError: As of `penstock.capture`,
            `penstock.plan` and `bind`.
    """
    wanted = _Wanted(
        device_memory=_bytes_or_none(device_memory, "device_memory"),
        host_memory=_bytes_or_none(host_memory, "host_memory"),
        store=store,
        machine=machine,
        time_limit=time_limit,
        seed=seed,
    )

    def captured(each: Any) -> StepGraph:
        began = time.perf_counter()
        how: dict[str, Any] = {"loss": loss, "before_step": before_step}
        # The last update of an epoch may have fewer micro-batches.
        is_list = accumulate is not None and isinstance(each, list | tuple) and each is not batch
        how["accumulate"] = len(each) if is_list else accumulate
        graph = capture(model, optimizer, each, **how)
        refuse_ranks_apart(graph)
        for name in graph.metadata["initial_state"]:
            initial_fill(graph, name)  # before the time that planning takes
        elapsed = format_seconds(time.perf_counter() - began)
        _logger.info("captured %d operators in %s", len(graph.operators), elapsed)
        return graph

    keys: dict[str, list[object]] = {}  # of the cache, by planned graph

    def planned(graph: StepGraph, device_memory: int | None) -> Planned:
        within = dataclasses.replace(wanted, device_memory=device_memory)
        found = (_known_or_made if cache else _made)(graph, within, progress)
        _logger.info(
            "plan: %s of device memory, %s a step, at least %s",
            format_bytes(found.plan.peak_device_bytes),
            format_seconds(found.plan.step_seconds),
            format_seconds(found.plan.lower_bound_seconds),
        )
        keys[found.graph.digest] = _key(graph, within)
        return found

    def keep(graph: StepGraph, refined: Plan) -> None:
        if cache:
            with plan_entry(keys[graph.digest]) as entry:
                entry.save(Planned(graph, refined))

    def together(found: list[Planned]) -> list[Planned]:
        return _within_one_arena(found, wanted.device_memory, planned)

    found = [planned(captured(each), wanted.device_memory) for each in (batch, *also)]
    first, *others = together(found)
    step = bind(
        first.plan,
        model,
        optimizer,
        graph=first.graph,
        loss=loss,
        before_step=before_step,
        also=[(each.plan, each.graph) for each in others],
        initialize=initialize,
        store=store,
        debug=debug,
        shadow=shadow,
    )

    def extended(
        pairs: Sequence[tuple[Plan, StepGraph]], each: Any
    ) -> list[tuple[Plan, StepGraph]]:
        known = [Planned(graph, made) for made, graph in pairs]
        found = together([*known, planned(captured(each), wanted.device_memory)])
        return [(made, graph) for graph, made in found]

    step._extended = extended
    step._refinement = Refinement(time_limit, keep)
    return step


def _within_one_arena(
    found: list[Planned],
    device_memory: int | None,
    planned: Callable[[StepGraph, int | None], Planned],
) -> list[Planned]:
    """Make plans that take turns keep within the budget together.

    They share the largest arena a of any of them, and operators of any of them take up to the
    largest workspace w: a + w is what must not be more than the budget.
    """
    if device_memory is None:
        return found
    for _ in range(_MOST_ROUNDS):
        workspaces = [made.planned_graph(graph).workspace_bytes for graph, made in found]
        room = device_memory - max(workspaces)
        if all(made.arena_bytes <= room for _, made in found):
            return found
        found = [
            each if each.plan.arena_bytes <= room else planned(each.graph, room + workspace)
            for each, workspace in zip(found, workspaces, strict=True)
        ]
    raise InfeasibleError(
        f"device_memory={format_bytes(device_memory)} holds each of the {len(found)} shapes alone, "
        "and not with one arena for all and the workspace of any: raise it, or make the shapes "
        "more alike"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What `fit` was asked for, as far as a plan depends on it: arguments of `plan`."""

    device_memory: int | None
    host_memory: int | None
    store: FileStore | str | os.PathLike[str] | None
    machine: MachineProfile | str | None
    time_limit: float
    seed: int


def _bytes_or_none(size: int | str | None, name: str) -> int | None:
    return None if size is None else parse_bytes(size, name=name)


def _known_or_made(
    graph: StepGraph, wanted: _Wanted, progress: Callable[[Found], None] | None
) -> Planned:
    """A plan from the cache, or one that is made now and kept there."""
    with plan_entry(_key(graph, wanted)) as entry:
        planned = entry.load()
        if planned is None:
            planned = _made(graph, wanted, progress)
            entry.save(planned)
    kept = dataclasses.replace(planned.graph, captured=graph.captured)
    return planned._replace(graph=kept)


def _made(graph: StepGraph, wanted: _Wanted, progress: Callable[[Found], None] | None) -> Planned:
    if wanted.machine is None:
        graph = measure(graph, num_runs=_NUM_RUNS)
    return Planned(graph, plan(graph, **vars(wanted), progress=progress))


def _key(graph: StepGraph, wanted: _Wanted) -> list[object]:
    """What a plan depends on."""
    where: object = None
    if wanted.store is not None:
        file_store = FileStore.of(wanted.store)
        where = [os.path.abspath(file_store.path), file_store.max_bytes]
    machine = wanted.machine
    profile: object = machine if isinstance(machine, str | None) else machine.to_dict()
    threads = torch.get_num_threads() if machine is None else None
    metadata = {name: repr(value) for name, value in sorted(graph.metadata.items())}
    versions = [__version__, torch.__version__]
    budgets = [wanted.device_memory, wanted.host_memory]
    limits = [wanted.time_limit, wanted.seed]
    return [versions, graph.digest, metadata, budgets, where, profile, threads, *limits]
