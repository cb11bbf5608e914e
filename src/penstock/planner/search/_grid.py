"""A request on a grid of addresses, with the memory that a search has there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.graph import least_alignment_bytes
from penstock.memory import Link, MachineProfile, Tier
from penstock.planner._plan_records import Bound
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.search._problem import Problem
from penstock.planner.search._residency import Arena, LowerTiers
from penstock.planner.search._sequence import OperatorSequence

# Time of operators on two cores that moving a byte costs, in copies of it by one thread: that copy,
# and the core that waits for the one which copies. Measured on Llama, 512 wide, at 1/4 of its
# memory.
_COPIES_TO_HOST, _COPIES_TO_FILE = 2.0, 1.0


@dataclass(frozen=True, kw_only=True)
class GridRequest:
    """A request on one grid of addresses.

    Attributes:
        request: The step and what it is planned for.
        bound: Lower bound of its time.
        alignment: Bytes of which offsets are multiples.
        overhang: Bytes that the search has beyond the arena, as its objects take multiples.
    """

    request: PlanRequest
    bound: Bound
    alignment: int
    overhang: int = 0

    @functools.cached_property
    def arena(self) -> Arena:
        """The arena, as large as the budget says or as the program's order needs."""
        workspace_bytes, capacity = self.request.graph.workspace_bytes, self.request.arena_bytes
        if capacity is not None:
            return Arena(max(0, capacity), self._lower_tiers(), workspace_bytes)
        # The packer rarely needs more than this beyond the live bytes.
        capacity = int(self.program().base.max(initial=0) * 1.02) + 1
        return Arena(capacity, None, workspace_bytes)

    def _lower_tiers(self) -> LowerTiers | None:
        links, machine, budget = self.request.links, self.request.machine, self.request.budget
        if not links:
            return None
        rates = tuple(
            LinkRates(machine.links[out].bytes_per_second, machine.links[back].bytes_per_second)
            for out, back in links
        )
        is_host = links[0][0].destination == Tier.HOST
        first_bytes = budget.host_bytes if is_host else budget.file_bytes
        if first_bytes is not None and first_bytes >= sum(
            storage.num_bytes for storage in self.request.graph.storages
        ):
            first_bytes = None  # it holds everything
        interference = tuple(interference_per_byte(out, machine) for out, _ in links)
        return LowerTiers(rates, first_bytes, interference)

    def program(self) -> OperatorSequence:
        """Return the operators in the program's own order."""
        graph, seconds = self.request.graph, self.request.operator_seconds
        problem = Problem(graph, seconds, alignment=self.alignment)
        return OperatorSequence(problem, np.arange(len(graph.operators)))

    def finer_grids(self) -> Iterator[GridRequest]:
        """Yield grids of smaller alignment, and with an end of the arena between two multiples."""
        least = least_alignment_bytes(self.request.graph)
        for alignment in dict.fromkeys((self.alignment, least)):
            if alignment < self.alignment:
                yield dataclasses.replace(self, alignment=alignment)
            overhang = -self.arena.capacity % alignment
            if overhang and self.request.budget.device_bytes is not None:
                yield dataclasses.replace(self, alignment=alignment, overhang=overhang)


def interference_per_byte(link: Link, machine: MachineProfile) -> float:
    """Return the seconds by which moving a byte slows the operators down, in either direction.

    Where the device is RAM, copies take its cores.
    """
    if machine.device != "cpu":
        return 0.0
    of_copy = 1 / machine.memcpy.bytes_per_second * min(1.0, 2 / machine.num_cores)
    to_file = Tier.FILE in (link.source, link.destination)
    return of_copy * (_COPIES_TO_FILE if to_file else _COPIES_TO_HOST)
