"""Report on a compiled program: its kernels, rows, products, bytes, and every decision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import Program, describe_read
from penstock.rgnn.lowering import Kernel, KernelKind, LoweredProgram
from penstock.rgnn.passes import Decision
from penstock.rgnn.spaces import Counts
from penstock.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedValue:
    """One value of a compiled program."""

    name: str
    """`%` and its number; numbers of gathers and inputs are left out of the report."""
    expression: str
    rows_of: str
    """The space of its rows."""
    num_rows: int
    row_shape: tuple[int, ...]
    memory_bytes: int
    """Bytes it takes in memory; 0 where it stays in registers of its kernel."""
    where: str
    """The user's line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedKernel:
    """One kernel of a compiled program."""

    kind: str
    is_backward: bool
    rows_of: str
    """The space of the rows that its loops run over."""
    grouped_by: str | None
    """The map to the targets that the outer loop runs over."""
    num_rows: int
    multiplications: int
    """Multiplications of its matrix product; 0 for a traversal."""
    values: tuple[ExplainedValue, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """A compiled program on a graph."""

    name: str
    num_nodes: int
    num_edges: int
    num_src_pairs: int
    num_dst_pairs: int
    backend: str
    """The back end that runs the kernels."""
    kernels: tuple[ExplainedKernel, ...]
    decisions: tuple[Decision, ...]
    without: tuple[str, ...]
    """Rewrites that were switched off."""

    @property
    def materialised_bytes(self) -> int:
        """Bytes of all values that cross from one kernel to another, results included."""
        return sum(value.memory_bytes for kernel in self.kernels for value in kernel.values)

    @property
    def multiplications(self) -> int:
        """Multiplications in all matrix products."""
        return sum(kernel.multiplications for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sums as plain data, for JSON."""
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
            lines += _write_kernel_lines(number, kernel)
        lines += ["", "rewrites, decided for about this size and as many rows for each edge"]
        lines += [f"  {decision}" for decision in self.decisions] or ["  none found a place"]
        lines += [f"  {name} is switched off" for name in self.without]
        return "\n".join(lines)


def explain(
    lowered: LoweredProgram, graph: Graph, *, name: str, element_bytes: int, backend: str
) -> Explanation:
    """Put a program's kernels beside a graph's counts."""
    counts = graph.counts
    return Explanation(
        name=name,
        num_nodes=counts.num_nodes,
        num_edges=counts.num_edges,
        num_src_pairs=counts.num_src_pairs,
        num_dst_pairs=counts.num_dst_pairs,
        backend=backend,
        kernels=tuple(
            _explain_kernel(lowered, kernel, counts, element_bytes, is_backward)
            for is_backward, direction in enumerate(lowered.directions().values())
            for kernel in direction.kernels
        ),
        decisions=(*lowered.optimized.decisions, *_explain_order(lowered, element_bytes)),
        without=tuple(sorted(lowered.optimized.without)),
    )


def _explain_order(lowered: LoweredProgram, element_bytes: int) -> Iterator[Decision]:
    """Yield a decision for each direction with kernels in another order than written."""
    for name, scratch in zip(lowered.directions(), lowered.scratch, strict=False):
        if scratch.after < scratch.before:
            after, before = (
                format_bytes(number * element_bytes) for number in (scratch.after, scratch.before)
            )
            reason = f"about {after} of scratch memory beside results for {before}"
            yield Decision("order", True, name, reason, "kernels and their parts")


def _explain_kernel(
    lowered: LoweredProgram, kernel: Kernel, counts: Counts, element_bytes: int, is_backward: int
) -> ExplainedKernel:
    program, materialised = lowered.optimized.program, lowered.schedule.materialised
    values = []
    for position in kernel.values:
        node = program.nodes[position]
        num_rows = counts.rows(node.space)
        parts = [describe_read(program, operand) for operand in node.operands]
        parts += [f"{name}={value}" for name, value in node.attributes]
        row_bytes = math.prod(node.shape) * element_bytes
        values.append(
            ExplainedValue(
                name=f"%{position}",
                expression=f"{node.op}({', '.join(parts)})",
                rows_of=node.space.value,
                num_rows=num_rows,
                row_shape=node.shape,
                memory_bytes=num_rows * row_bytes if position in materialised else 0,
                where=node.where,
            )
        )
    num_rows = counts.rows(kernel.space)
    return ExplainedKernel(
        kind=kernel.kind.value,
        is_backward=bool(is_backward),
        rows_of=kernel.space.value,
        grouped_by=None if kernel.grouped_by is None else kernel.grouped_by.name,
        num_rows=num_rows,
        multiplications=num_rows * _count_multiplications(program, kernel),
        values=tuple(values),
    )


def _count_multiplications(program: Program, kernel: Kernel) -> int:
    """Return the multiplications of a kernel's matrix product, per row."""
    nodes = program.nodes
    node = nodes[kernel.values[0]]
    if kernel.kind in (KernelKind.GEMM, KernelKind.SUMMED_GEMM):
        vector, _ = (nodes[operand] for operand in node.operands)
        return math.prod(node.shape) * vector.shape[-1]
    if kernel.kind is KernelKind.WEIGHT_GRADIENT:
        outer = nodes[node.operands[0]]
        left, right = (nodes[operand].shape for operand in outer.operands)
        return max(math.prod(left) * right[-1], math.prod(right) * left[-1])
    return 0


def _write_kernel_lines(number: int, kernel: ExplainedKernel) -> list[str]:
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
