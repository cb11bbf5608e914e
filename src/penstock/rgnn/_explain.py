"""What a plan does on a graph, for people: rows, products, bytes, and every decision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from penstock.rgnn._graph import Graph
from penstock.rgnn._ir import Node
from penstock.rgnn._passes import Decision
from penstock.rgnn._plan import Plan
from penstock.rgnn._schedule import Kernel, KernelKind, Schedule
from penstock.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedValue:
    """One value of a plan."""

    name: str
    """`%` and its number; numbers of gathers and inputs are left out of the report."""
    expression: str
    rows_of: str
    """What its rows stand for."""
    num_rows: int
    row_shape: tuple[int, ...]
    memory_bytes: int
    """Bytes it takes in memory; 0 where it stays in registers of its kernel."""
    where: str
    """The user's line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedKernel:
    """One loop nest of a plan."""

    kind: str
    is_backward: bool
    rows_of: str
    """What its loops run over."""
    grouped_by: str | None
    """The map whose targets are the outer loop."""
    num_rows: int
    multiplications: int
    """Of its matrix product; 0 for a traversal."""
    values: tuple[PlannedValue, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan on a graph."""

    name: str
    num_nodes: int
    num_edges: int
    num_src_pairs: int
    num_dst_pairs: int
    backend: str
    """What runs the kernels."""
    kernels: tuple[PlannedKernel, ...]
    decisions: tuple[Decision, ...]
    without: tuple[str, ...]
    """Rewrites that were switched off."""

    @property
    def materialised_bytes(self) -> int:
        """Bytes of all values that cross from one kernel to another, results included."""
        return sum(value.memory_bytes for kernel in self.kernels for value in kernel.values)

    @property
    def multiplications(self) -> int:
        """Of all matrix products."""
        return sum(kernel.multiplications for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The fields and the sums as plain data, for JSON."""
        sums = {
            "materialised_bytes": self.materialised_bytes,
            "multiplications": self.multiplications,
        }
        return dataclasses.asdict(self) | sums

    def __str__(self) -> str:
        lines = [
            f"{self.name} on {self.num_nodes:,} nodes, {self.num_edges:,} edges, "
            f"{self.num_src_pairs:,} (src, relation), {self.num_dst_pairs:,} (dst, relation)",
            f"{self.multiplications:,} multiplications in matrix products, "
            f"{format_bytes(self.materialised_bytes)} materialised, run by {self.backend}",
        ]
        phase = None
        for number, kernel in enumerate(self.kernels):
            if kernel.is_backward is not phase:
                phase = kernel.is_backward
                lines += ["", "backward" if phase else "forward"]
            lines += _kernel_lines(number, kernel)
        lines += [
            "",
            "rewrites, decided for about this size and as many rows for each edge",
        ]
        lines += [f"  {decision}" for decision in self.decisions] or ["  none found a place"]
        lines += [f"  {name} is switched off" for name in self.without]
        return "\n".join(lines)


def explain(
    plan: Plan, graph: Graph, *, name: str, element_bytes: int, backend: str
) -> Explanation:
    """Put a plan's kernels beside a graph's counts.

    Args:
        plan: The plan.
        graph: The graph that it is run on.
        name: What the program is called.
        element_bytes: Bytes of one number.
        backend: The name of what runs it.
    """
    counts = graph.counts
    schedule = plan.summed_schedule if backend == "cpp" else plan.schedule
    return Explanation(
        name=name,
        num_nodes=counts.num_nodes,
        num_edges=counts.num_edges,
        num_src_pairs=counts.num_src_pairs,
        num_dst_pairs=counts.num_dst_pairs,
        backend=backend,
        kernels=tuple(
            _planned(plan, kernel, schedule, graph, element_bytes, number >= schedule.num_forward)
            for number, kernel in enumerate(schedule.kernels)
        ),
        decisions=(*plan.decisions, *(_orders(plan, element_bytes) if backend == "cpp" else ())),
        without=tuple(sorted(plan.without)),
    )


def _orders(plan: Plan, element_bytes: int) -> Iterator[Decision]:
    """Where kernels run in another order than they were written in."""
    ordered = plan.ordered
    pairs = zip(("forward", "backward"), ordered.scratch, ordered.scratch_before, strict=True)
    for name, now, before in pairs:
        if now < before:
            sizes = (format_bytes(number * element_bytes) for number in (now, before))
            reason = "{} of scratch memory beside results for {}".format(*sizes)
            yield Decision("order", True, name, reason, "kernels and their parts")


def _planned(
    plan: Plan,
    kernel: Kernel,
    schedule: Schedule,
    graph: Graph,
    element_bytes: int,
    is_backward: bool,
) -> PlannedKernel:
    values = []
    for position in kernel.values:
        node = plan.program.nodes[position]
        num_rows = graph.counts.rows(node.space)
        in_memory = position in schedule.materialised
        values.append(
            PlannedValue(
                name=f"%{position}",
                expression=_expression(plan, node),
                rows_of=node.space.value,
                num_rows=num_rows,
                row_shape=node.shape,
                memory_bytes=num_rows * math.prod(node.shape) * element_bytes * in_memory,
                where=node.where,
            )
        )
    num_rows = graph.counts.rows(kernel.space)
    return PlannedKernel(
        kind=kernel.kind.value,
        is_backward=is_backward,
        rows_of=kernel.space.value,
        grouped_by=None if kernel.grouped_by is None else kernel.grouped_by.name,
        num_rows=num_rows,
        multiplications=num_rows * _multiplications(plan, kernel),
        values=tuple(values),
    )


def _multiplications(plan: Plan, kernel: Kernel) -> int:
    """Per row, of a kernel's matrix product."""
    nodes = plan.program.nodes
    node = nodes[kernel.values[0]]
    if kernel.kind in (KernelKind.GEMM, KernelKind.SUMMED_GEMM):
        vector, _ = (nodes[operand] for operand in node.operands)
        return math.prod(node.shape) * vector.shape[-1]
    if kernel.kind is KernelKind.WEIGHT_GRADIENT:
        outer = nodes[node.operands[0]]
        left, right = (nodes[operand].shape for operand in outer.operands)
        return max(math.prod(left) * right[-1], math.prod(right) * left[-1])
    return 0


def _expression(plan: Plan, node: Node) -> str:
    """An operator with its operands, gathers written as reads."""
    nodes = plan.program.nodes

    def say(position: int) -> str:
        found = nodes[position]
        if found.op == "gather":
            return f"{say(found.operands[0])}[{found.map.name}]"
        if found.op == "reshape":
            return f"{say(found.operands[0])}.reshape{found.shape}"
        if found.op == "inverse_count":
            return f"inverse_count({found.map.name})"
        if found.op == "outer":
            return f"outer({', '.join(say(operand) for operand in found.operands)})"
        return found["name"] if found.op == "input" else f"%{position}"

    parts = [say(operand) for operand in node.operands]
    parts += [f"{name}={value}" for name, value in node.attributes]
    return f"{node.op}({', '.join(parts)})"


def _kernel_lines(number: int, kernel: PlannedKernel) -> list[str]:
    head = f"  {number}. {kernel.kind} over {kernel.num_rows:,} {kernel.rows_of} rows"
    if kernel.grouped_by is not None:
        head += f", grouped by {kernel.grouped_by}"
    if kernel.multiplications:
        head += f", {kernel.multiplications:,} multiplications"
    lines = [head]
    for value in kernel.values:
        shape = "x".join(str(n) for n in (value.num_rows, *value.row_shape))
        memory = format_bytes(value.memory_bytes) if value.memory_bytes else "in registers"
        lines.append(f"       {value.name} = {value.expression}")
        file_and_line = value.where.partition(": ")[0]
        lines.append(f"          {value.rows_of} rows, {shape}, {memory}  [{file_and_line}]")
    return lines
