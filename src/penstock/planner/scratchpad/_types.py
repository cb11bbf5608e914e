"""Programs over several scratchpads: operators, the buffers they use, and what a spill costs."""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.tables import Report
from penstock.units import parse_count


@dataclasses.dataclass(frozen=True)
class ScratchpadBuffer:
    """A buffer that operators use in one of the pools."""

    pool: str
    """Name of the scratchpad that it is in."""
    size: int
    """In the unit of the pools' capacities; more than zero."""
    spill_cost: int
    """Cost of each eviction with its return: `size` where a copy exists elsewhere, twice
    that where it has to be written first."""

    def __post_init__(self) -> None:
        for name in ("size", "spill_cost"):
            object.__setattr__(self, name, parse_count(getattr(self, name), name=name))


@dataclasses.dataclass(frozen=True)
class ScratchpadOperator:
    """One step of the program."""

    name: str
    buffers: tuple[int, ...]
    """Indices of the buffers that it reads or writes: all are in their pools while it runs."""


@dataclasses.dataclass(frozen=True)
class ScratchpadGraph:
    """A program: operators, buffers, and the edges along which operators wait for each other.

    Example:
        >>> graph = ScratchpadGraph(
        ...     operators=(ScratchpadOperator("load", (0,)), ScratchpadOperator("use", (0,))),
        ...     buffers=(ScratchpadBuffer("L1", 16, 16),),
        ...     edges=((0, 1),),
        ... )
        >>> graph.topological_order()
        (0, 1)
    """

    operators: tuple[ScratchpadOperator, ...]
    buffers: tuple[ScratchpadBuffer, ...]
    edges: tuple[tuple[int, int], ...]
    """Pairs of operators: the first runs before the second."""

    def __post_init__(self) -> None:
        for index, buffer in enumerate(self.buffers):
            if buffer.size <= 0 or buffer.spill_cost < 0:
                raise ValueError(
                    f"buffers[{index}]={buffer}: size must be above zero, spill_cost not below zero"
                )
        for index, operator in enumerate(self.operators):
            wrong = [b for b in operator.buffers if not 0 <= b < len(self.buffers)]
            if wrong or len(set(operator.buffers)) != len(operator.buffers):
                raise ValueError(
                    f"operators[{index}].buffers={operator.buffers}: must be different indices "
                    f"below {len(self.buffers)}"
                )
        for index, (before, after) in enumerate(self.edges):
            if not (0 <= before < len(self.operators) and 0 <= after < len(self.operators)):
                raise ValueError(
                    f"edges[{index}]={(before, after)}: must be indices of operators, below "
                    f"{len(self.operators)}"
                )
        self.topological_order()

    def topological_order(self) -> tuple[int, ...]:
        """Return the legal order that runs, at each step, the first operator that can.

        Raises:
            ValueError: The edges form a cycle.
        """
        successors: list[list[int]] = [[] for _ in self.operators]
        num_waiting = [0] * len(self.operators)
        for before, after in self.edges:
            successors[before].append(after)
            num_waiting[after] += 1
        ready = [op for op, waiting in enumerate(num_waiting) if not waiting]
        order = []
        while ready:
            order.append(op := heapq.heappop(ready))
            for after in successors[op]:
                num_waiting[after] -= 1
                if not num_waiting[after]:
                    heapq.heappush(ready, after)
        if len(order) < len(self.operators):
            stuck = next(op for op, waiting in enumerate(num_waiting) if waiting)
            raise ValueError(f"edges form a cycle, which operator {stuck} is behind")
        return tuple(order)

    @classmethod
    def from_npu_json(cls, path: str | Path) -> ScratchpadGraph:
        """Read a task graph of the 2025 "Huawei Cup", Problem A, as the contest published it.

        Its ALLOC and FREE nodes become the lifetimes that the users of a buffer give: allocation
        just before the first, release just after the last, which no other choice can better. A
        buffer that a COPY_IN uses has a copy outside, so its spill costs its size; any other costs
        twice its size.

        Raises:
            ValueError: The file is not such a graph; the message names it.
        """
        path = Path(path)
        try:
            document = json.loads(path.read_text())
            return _from_npu(document["Nodes"], document["Edges"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no task graph of nodes and edges: {error!r}") from error


def _from_npu(nodes: list[dict[str, Any]], edges: list[list[int]]) -> ScratchpadGraph:
    operators = [node for node in nodes if node["Op"] not in ("ALLOC", "FREE")]
    number = {node["Id"]: index for index, node in enumerate(operators)}
    allocations = {node["BufId"]: node for node in nodes if node["Op"] == "ALLOC"}
    buffer_number = {buffer: index for index, buffer in enumerate(allocations)}
    has_copy = {b for node in operators if node["Op"] == "COPY_IN" for b in node["Bufs"]}
    return ScratchpadGraph(
        operators=tuple(
            ScratchpadOperator(
                f"{node['Op']} {node['Id']}", tuple(buffer_number[b] for b in node["Bufs"])
            )
            for node in operators
        ),
        buffers=tuple(
            ScratchpadBuffer(
                node["Type"], node["Size"], node["Size"] * (1 if buffer in has_copy else 2)
            )
            for buffer, node in allocations.items()
        ),
        edges=tuple(
            (number[before], number[after])
            for before, after in edges
            if before in number and after in number
        ),
    )


NPU_POOLS: Mapping[str, int] = {"L1": 4096, "UB": 1024, "L0A": 256, "L0B": 256, "L0C": 512}
"""Capacities of the pools of the "Huawei Cup" graphs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
    """A buffer stays in its pool, at one offset, over a range of steps."""

    buffer: int
    start: int
    """First step, an index into the plan's order."""
    end: int
    """One past the last step."""
    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScratchpadPlan(Report, title="scratchpad plan", hidden={"order", "residencies"}):
    """Order, addresses and spills of a program; printing it shows a table without the lists."""

    order: tuple[int, ...]
    """The operators, in the order in which they run."""
    residencies: tuple[Residency, ...]
    """Residencies of all buffers. Between two residencies of a buffer it is spilled."""
    spill_cost: int
    """The sum of `spill_cost` of the buffers over all times that they come back."""
    num_spills: int
    order_lower_bound: int
    """No plan with this order costs less."""
    lower_bound: int
    """No plan with any order costs less."""
    optimal_for_order: bool
    """True if `spill_cost` equals `order_lower_bound`."""
    searched: bool
    """True if orders were searched, which takes a C++ compiler."""
    plan_seconds: float
