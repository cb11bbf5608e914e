"""`plan`: a step over several devices, of which each offloads and recomputes within its budget.

Splitting a tensor further, offloading it and computing it again are alternatives: a looser split
exchanges fewer bytes between ranks, and moves more between each rank and its host. So partitions
are searched with the budget and without one, a rank's own step of some of them is planned within
the budget, and the one whose step is shortest is taken. Collectives are operators of that step,
with the seconds of their link.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack, overload

from penstock.errors import InfeasibleError, PlanError
from penstock.graph import StepGraph
from penstock.memory import FileStore, MachineProfile, find_machine
from penstock.partitioner._api import assemble, make_search, with_bound
from penstock.partitioner._partition import Partition
from penstock.partitioner._rank import write_rank
from penstock.partitioner._search import FoundSplit, SplitSearch
from penstock.planner import Found, Plan
from penstock.planner import plan as plan_one
from penstock.planner.paging import peak_of_program_order
from penstock.tables import report_table
from penstock.units import (
    format_seconds,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_share,
)

_SEARCH_SHARE = 0.2  # of the time limit, with the budget and without one each
_LEAST_SHARE = 0.3  # of the time limit, for plans
_NUM_LOOSER = 4  # partitions that need more than the budget, of which ranks' steps are planned


class PlanArguments(TypedDict, total=False):
    """Arguments of `penstock.planner.plan` beside the graph."""

    device_memory: int | str | None
    host_memory: int | str | None
    store: FileStore | str | os.PathLike[str] | None
    machine: MachineProfile | str | None
    reorder: bool
    recompute: bool
    split_products: bool
    method: str
    time_limit: float
    seed: int
    progress: Callable[[Found], None] | None


class SplitChoice(NamedTuple):
    """A partition that was looked at, and the plan of a rank's step within the budget.

    Attributes:
        peak_device_bytes: Bytes that a rank would hold without offloading.
        exchanged_bytes: That a rank receives from others in a step.
        moved_bytes: That a rank's plan moves to the host or a file and back; None without a plan.
        step_seconds: Of the plan; None if none was found.
    """

    peak_device_bytes: int
    exchanged_bytes: int
    moved_bytes: int | None
    step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """A step over several devices, and the plan of a rank's part of it.

    Attributes:
        partition: The partition; it may need more than the budget where ranks offload.
        graph: The step of the first rank; those of others differ in the places of their pieces.
        plan: Its plan, within the budget.
        device_bytes: The budget of a rank; None: as many as needed.
        choices: Partitions that were looked at, from the tightest to the loosest.
    """

    partition: Partition
    graph: StepGraph
    plan: Plan
    device_bytes: int | None
    choices: tuple[SplitChoice, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step: operators, exchange, and stalls for what is offloaded."""
        return self.plan.step_seconds

    @property
    def saved_seconds(self) -> float | None:
        """Seconds of a step that offloading or recomputing saves against splitting alone; None if
        splitting alone does not fit.
        """
        alone = [
            each.step_seconds
            for each in self.choices
            if each.step_seconds is not None
            and (self.device_bytes is None or each.peak_device_bytes <= self.device_bytes)
        ]
        return min(alone) - self.step_seconds if alone else None

    def __str__(self) -> str:
        """A table of the choice; those of `partition` and `plan` have more."""
        rows: list[tuple[str, object]] = [
            ("devices", self.partition.devices),
            ("mesh", " x ".join(map(str, self.partition.mesh))),
            ("device_bytes", self.device_bytes),
            ("peak_device_bytes", self.plan.peak_device_bytes),
            ("exchanged_bytes", self.partition.exchanged_bytes),
            ("moved_bytes", sum(self.plan.bytes_moved.values())),
            ("step_seconds", self.step_seconds),
            ("verdict", self._describe()),
        ]
        return report_table(rows, title="penstock.plan")

    def _describe(self) -> str:
        saved = self.saved_seconds
        if saved is None:
            return "splitting alone does not fit: ranks offload or recompute"
        if saved <= 0:
            return "splitting alone is cheapest"
        return (
            f"offloading or recomputing is cheaper than splitting further, by "
            f"{format_seconds(saved)} a step"
        )


@overload
def plan(graph: StepGraph, *, devices: None = None, **options: Unpack[PlanArguments]) -> Plan: ...


@overload
def plan(graph: StepGraph, *, devices: int, **options: Unpack[PlanArguments]) -> JointPlan: ...


def plan(
    graph: StepGraph, *, devices: int | None = None, **options: Unpack[PlanArguments]
) -> Plan | JointPlan:
    """Plan a training step on one device, or split it over several and plan each rank's part.

    Example:
        >>> found = penstock.plan(  # doctest: +SKIP
        ...     graph, devices=8, device_memory="16GiB", host_memory="64GiB"
        ... )
        >>> print(found)  # doctest: +SKIP
        >>> step = penstock.fit(  # doctest: +SKIP
        ...     model, optimizer, batch, device_memory="16GiB", partition=found.partition
        ... )

    Args:
        graph: The step, from `penstock.capture` or a file; of several devices that of their whole
            batch.
        devices: Number of ranks, at least 2; None: one device.
        options: Of `penstock.planner.plan`. Budgets are those of each rank, and a share as `"1/8"`
            is one of what one device would need; of `time_limit` splitting takes up to two fifths.

    Returns:
        The plan of `penstock.planner.plan`, or a partition with the plan of a rank.

    Raises:
        InfeasibleError: No plan fits the budgets; or no partition was found of which one does.
        PlanError: Of no partition that was found a rank can run all operators on its pieces.
        PenstockError, ValueError, TypeError: As of `penstock.planner.plan`.
    """
    if devices is None:
        return plan_one(graph, **options)
    devices = parse_count(devices, name="devices", least=2)
    time_limit = parse_seconds(options.get("time_limit", 60.0), name="time_limit")
    ends = time.monotonic() + time_limit
    options = _parse_options(graph, options)
    budget, profile = options.get("device_memory"), options.get("machine")
    assert not isinstance(budget, str)
    assert isinstance(profile, MachineProfile)
    search = make_search(graph, profile, None, 0.0)
    for each in dict.fromkeys((None, budget)):
        search.budget, search.deadline = each, time.monotonic() + _SEARCH_SHARE * time_limit
        search.run(devices)
    best: JointPlan | None = None
    choices: list[SplitChoice] = []
    failures: list[PlanError | InfeasibleError] = []
    looked_at = _choose_splits(search)
    for number, split in enumerate(looked_at):
        found = assemble(search, split, options.get("seed", 0))
        if budget is None or found.peak_device_bytes <= budget:
            found = dataclasses.replace(found, device_bytes=budget)
        left = max(_LEAST_SHARE * time_limit, ends - time.monotonic())
        options["time_limit"] = left / (len(looked_at) - number)
        made = None
        try:
            rank = write_rank(graph, found, (0,) * len(found.mesh), ("",) * len(found.mesh)).graph
            made = JointPlan(
                partition=found, graph=rank, plan=plan_one(rank, **options), device_bytes=budget
            )
        except (PlanError, InfeasibleError) as error:
            failures.append(error)
        choices.append(_describe_choice(found, made))
        if made is not None and (best is None or made.step_seconds < best.step_seconds):
            best = made
    if best is None:
        raise _choose_failure(failures, devices)
    best = dataclasses.replace(best, choices=tuple(choices))
    return dataclasses.replace(best, partition=with_bound(search, best.partition))


def _parse_options(graph: StepGraph, options: PlanArguments) -> PlanArguments:
    """Return options with bytes and a profile in the place of words."""
    machine, memory = options.get("machine"), options.get("device_memory")
    share = parse_share(memory)
    if share is not None:
        memory = int(peak_of_program_order(graph) * share)
    elif memory is not None:
        memory = parse_bytes(memory, name="device_memory")
    machine = find_machine(machine, options.get("store"))
    return {**options, "machine": machine, "device_memory": memory}


def _choose_splits(search: SplitSearch) -> list[FoundSplit]:
    """Return the cheapest split that fits, and some looser ones that cost less, by their bytes."""
    frontier: list[FoundSplit] = []
    for each in sorted(search.candidates, key=lambda each: (each.peak_bytes, each.cost)):
        if not frontier or each.cost < frontier[-1].cost:
            frontier.append(each)
    fitting = [each for each in frontier if search.fits(each)][-1:]
    looser = [each for each in frontier if not search.fits(each)]
    num = min(_NUM_LOOSER, len(looser))
    places = [round(i * (len(looser) - 1) / max(1, num - 1)) for i in range(num)]
    return fitting + [looser[place] for place in places]


def _describe_choice(found: Partition, made: JointPlan | None) -> SplitChoice:
    moved = None if made is None else sum(made.plan.bytes_moved.values())
    seconds = None if made is None else made.step_seconds
    return SplitChoice(found.peak_device_bytes, found.exchanged_bytes, moved, seconds)


def _choose_failure(
    failures: list[PlanError | InfeasibleError], devices: int
) -> PlanError | InfeasibleError:
    """Return the error of no plan at all: that of the rank that needs the least memory."""
    least = min(
        (each for each in failures if isinstance(each, InfeasibleError)),
        default=None,
        key=lambda each: each.minimum_device_bytes or math.inf,
    )
    if least is None:
        return failures[0]
    return InfeasibleError(
        f"of {len(failures)} partitions over {devices} devices none has a plan for its ranks; of "
        f"the one that comes nearest: {least}",
        minimum_device_bytes=least.minimum_device_bytes,
        operator=least.operator,
        proved=False,
        sufficient_device_bytes=least.sufficient_device_bytes,
    )
