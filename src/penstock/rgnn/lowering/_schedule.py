"""Kernels of a program, and the predicates that decide which values share one.

A laid-out program becomes a list of kernels. Matrix products over typed rows are kernels of their
own, instances of a GEMM template: segments of contiguous rows, one per type, with the gather of
their operand as a prologue. The rest are traversals: rowwise operators, gathers and reductions over
the rows of one space, in one loop nest. A traversal that reduces runs its rows grouped by where
they are summed to (for edges into destinations: destination-major), so that every sum has one
writer and needs no atomics.

A value is *materialised* if a kernel other than its own reads it; all others live in registers of
their loop. Gathers and reshapes are never materialised: they are how a kernel reads. Leaves (inputs
and the graph's own inverse counts) are in memory before the first kernel.
"""

from __future__ import annotations

import dataclasses
import enum

from penstock.rgnn.ir import BINARY, TYPES, UNARY, Node, Program, find_source
from penstock.rgnn.spaces import RowMap, Space


class KernelKind(enum.Enum):
    """The templates of kernels."""

    GEMM = "segment GEMM"
    """One matmul: rows of one space, each times the matrix of its type, and maybe plus its row."""
    WEIGHT_GRADIENT = "weight gradient GEMM"
    """One sum of an outer: for each type the product of two tall matrices."""
    SUMMED_GEMM = "summed segment GEMM"
    """One matmul and the sum of its rows into nodes, which never leave a small block in between."""
    TRAVERSAL = "traversal"
    """Rowwise operators, gathers and reductions in one loop nest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One loop nest."""

    kind: KernelKind
    space: Space
    """The rows that the loops run over."""
    grouped_by: RowMap | None
    """The map to the targets of the outer loop; None where the order of rows does not matter."""
    stages: tuple[tuple[int, ...], ...]
    """Positions of the values computed, without reads. Each stage is a loop over the rows of a
    group. What it reduces (a sum, the maximum and the sum of a softmax) can be read when the loop
    has ended, so by values of later stages; the operands of a reduction may be of its own stage. A
    rowwise value that a later stage reads is recomputed there, or kept for the rows of the group.
    """
    epilogue: tuple[int, ...] = ()
    """Rowwise values of the space that the rows are summed to: of each group, once its last stage
    has ended. They read the group's finished sums, one another, and what is in memory."""

    @property
    def values(self) -> tuple[int, ...]:
        """The values that the kernel computes, in order."""
        return (*(value for stage in self.stages for value in stage), *self.epilogue)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSchedule:
    """Kernels in the order in which they run, and the values that they materialise."""

    kernels: tuple[Kernel, ...]
    num_forward: int
    """Number of kernels of the forward, which come first."""
    materialised: frozenset[int]
    """Values that are written to memory: read by another kernel, or an output."""


def is_typed_product(program: Program, node: Node) -> bool:
    """Return whether a matmul multiplies each row with the matrix of its type (or one for all).

    A matrix of one row or column is a vector: that product is no matrix product but rowwise.
    """
    if node.op != "matmul":
        return False
    matrix = program.nodes[node.operands[1]]
    if 1 in matrix.shape[-2:]:
        return False
    if matrix.op != "gather" or matrix.map.into not in TYPES:
        return False
    return matrix.map.into is Space.ONE or node.space not in TYPES


def is_elementwise(program: Program, position: int) -> bool:
    """Return whether an element of the result takes one element of each operand."""
    node = program.nodes[position]
    if node.op == "matmul":
        shape = program.nodes[node.operands[1]].shape
        return shape[-1 if node["transposed"] else -2] == 1
    if node.op == "outer":
        left, right = (program.nodes[operand].shape for operand in node.operands)
        return max(len(left), len(right)) - 1 == node["heads"]
    return node.op in BINARY or node.op in UNARY or node.op in ("expand", "slice")


def find_fused_outers(program: Program) -> frozenset[int]:
    """Return the outers that are only summed: each sum is one matrix product instead."""
    fused = {position for position, node in enumerate(program.nodes) if node.op == "outer"}
    fused.difference_update(program.outputs)
    for node in program.nodes:
        if node.op != "sum":
            fused.difference_update(node.operands)
    return frozenset(fused)


def find_reads(program: Program) -> tuple[frozenset[int], ...]:
    """Return, for each value, those that it reads, through gathers, reshapes and fused outers."""
    fused = find_fused_outers(program)
    found: list[frozenset[int]] = []
    for node in program.nodes:
        sources = [find_source(program, operand) for operand in node.operands]
        of_node = (found[read] if read in fused else {read} for read in sources)
        found.append(frozenset().union(*of_node))
    return tuple(found)
