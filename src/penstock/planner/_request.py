"""One request: a step, its machine and memory, and the decisions that are free."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.graph import StepGraph, operator_seconds
from penstock.memory import Link, MachineProfile
from penstock.planner._plan_records import Budget, Found


class LinkRates(NamedTuple):
    """Bytes per second of links that a plan may use: out of the device, and into it."""

    outward: float
    inward: float


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A step to be planned: the argument of every search, bound and method.

    Example:
        >>> PlanRequest(graph=graph, budget=Budget(device_bytes=2**30),
        ...             machine=machine).links  # doctest: +SKIP
        ()

    Attributes:
        graph: The step.
        budget: Bytes of each tier; a tier of None does not exist, except the device, which then is
            as large as needed.
        machine: Rates of the links, and of the operators.
        operator_seconds: Time of each operator; empty: that of the graph, or by a roofline of
            `machine`.
        reorder: Whether the order of the program may change.
        recompute: Whether operators may run again.
        split_products: Whether products of matrices may run in slices.
        seed: Of random numbers.
        deadline: Time by `time.monotonic` at which to end with the best that was found.
        progress: Called with each improvement.
    """

    graph: StepGraph
    budget: Budget
    machine: MachineProfile
    operator_seconds: Sequence[float] = ()
    reorder: bool = True
    recompute: bool = True
    split_products: bool = False
    seed: int = 0
    deadline: float = math.inf
    progress: Callable[[Found], None] | None = None

    def __post_init__(self) -> None:
        seconds = self.operator_seconds
        if not len(seconds):
            seconds = operator_seconds(self.graph, self.machine)
        if len(seconds) != len(self.graph.operators):
            raise ValueError(
                f"operator_seconds has {len(seconds)} times and the graph "
                f"{len(self.graph.operators)} operators; pass one for each, or none"
            )
        object.__setattr__(self, "operator_seconds", tuple(map(float, seconds)))

    @property
    def links(self) -> tuple[tuple[Link, Link], ...]:
        """Links out of the device and back, for each tier below it, the nearest first."""
        host = (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)
        file = (Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE)
        has_host, has_file = bool(self.budget.host_bytes), self.budget.file_bytes is not None
        return (host,) * has_host + (file,) * has_file

    @property
    def compute_seconds(self) -> float:
        """Time of all operators, each once."""
        return float(sum(self.operator_seconds))

    @property
    def arena_bytes(self) -> int | None:
        """Bytes of the device beside the largest workspace; None: as many as needed."""
        device_bytes = self.budget.device_bytes
        return None if device_bytes is None else device_bytes - self.graph.workspace_bytes

    def seconds_left(self) -> float:
        """Return the time until the deadline; 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def within(self, seconds: float) -> PlanRequest:
        """Return the request with at most so much time, from now on."""
        deadline = min(self.deadline, time.monotonic() + seconds)
        return dataclasses.replace(self, deadline=deadline)

    def ending(self, seconds: float) -> PlanRequest:
        """Return the request; where it has no deadline, with one in so much time."""
        return self if self.deadline < math.inf else self.within(seconds)

    def ending_in(self, seconds: float) -> PlanRequest:
        """Return the request with so much time, from now on, in place of its deadline."""
        return dataclasses.replace(self, deadline=time.monotonic() + seconds)

    def of(self, graph: StepGraph) -> PlanRequest:
        """Return the request for another graph, with that graph's times."""
        return dataclasses.replace(self, graph=graph, operator_seconds=())
