"""Kernels of a program, and the assignment of its values to them: which share a loop of which.

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
import itertools
import math
from collections.abc import Collection

from penstock.rgnn.ir import (
    BINARY,
    LEAVES,
    READS,
    ROWWISE,
    TYPES,
    UNARY,
    Node,
    Program,
    find_maps,
    find_source,
)
from penstock.rgnn.spaces import RowMap, Space

_EPILOGUE = -1
"""The stage of a value that is computed after all stages."""


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
    sources: list[int] = []  # `find_source` of each value
    for position, node in enumerate(program.nodes):
        reads: set[int] = set()
        for operand in node.operands:
            source = sources[operand]
            reads.update(found[source] if source in fused else (source,))
        found.append(frozenset(reads))
        sources.append(sources[node.operands[0]] if node.op in READS else position)
    return tuple(found)


@dataclasses.dataclass(slots=True)
class _OpenKernel:
    """A kernel that may still take more values."""

    kind: KernelKind
    space: Space
    grouped_by: RowMap | None = None
    stages: list[list[int]] = dataclasses.field(default_factory=list)
    epilogue: list[int] = dataclasses.field(default_factory=list)

    def values(self) -> list[int]:
        return [*itertools.chain.from_iterable(self.stages), *self.epilogue]


def assign_kernels(program: Program, forward: Collection[int]) -> KernelSchedule:
    """Assign every value of a laid-out program to a kernel.

    Args:
        program: Laid out; differentiated or not.
        forward: The values of the forward; none of them is computed together with one of the
            backward, which runs after all of them.

    Returns:
        The schedule. Every value that is no leaf, read or fused outer is in one kernel, and each
        kernel comes after those that compute what it reads.
    """
    lowering = _Lowering(program)
    for position in sorted(forward):
        lowering.place(position)
    lowering.close()
    for position in sorted(set(range(len(program.nodes))) - set(forward)):
        lowering.place(position)
    lowering.sink()
    return lowering.build_schedule()


class _Lowering:
    def __init__(self, program: Program) -> None:
        self._nodes = program.nodes
        self._program = program
        self._fused = find_fused_outers(program)
        self._outputs = {find_source(program, output) for output in program.outputs}
        self._reads = tuple(
            {value for value in read if program.nodes[value].op not in LEAVES}
            for read in find_reads(program)
        )
        """For each value, the computed values that it reads."""
        self._num_closed = 0
        self._open: list[_OpenKernel] = []
        self._kernel_of: dict[int, int] = {}
        self._stage_of: dict[int, int] = {}

    def place(self, position: int) -> None:
        """Put a value into the first kernel that can take it, or into a new one."""
        node = self._nodes[position]
        if node.op in LEAVES or node.op in READS:
            return
        if position in self._fused:
            return  # computed by the sum that reads it
        if is_typed_product(self._program, node):
            self._append(_OpenKernel(KernelKind.GEMM, node.space), position)
            return
        if node.op == "sum" and node.operands[0] in self._fused:
            space = node.map.rows
            self._append(_OpenKernel(KernelKind.WEIGHT_GRADIENT, space, node.map), position)
            return
        space, grouped_by = node.space, None
        if node.op in ("sum", "softmax"):
            space, grouped_by = node.map.rows, node.map
        if self._place_in_epilogue(position):
            return
        read = {self._kernel_of[value] for value in self._reads[position]}
        last = max([self._num_closed, *read])
        for kernel in range(self._num_closed, len(self._open)):
            if kernel < last and kernel not in read:
                continue
            stage = self._find_stage(kernel, position, space, grouped_by)
            if stage is None:
                continue
            if kernel >= last or self._move_behind(kernel, last):
                self._join(max(kernel, last), stage, position, grouped_by)
                return
        self._append(_OpenKernel(KernelKind.TRAVERSAL, space, grouped_by), position)

    def _place_in_epilogue(self, position: int) -> bool:
        """Put a rowwise value into the loop that finishes a sum that it reads, if it can be."""
        node = self._nodes[position]
        if node.op not in ROWWISE or node.space in TYPES:
            return False
        for operand in node.operands:
            value = find_source(self._program, operand)
            kernel = self._kernel_of.get(value, -1)
            if kernel < self._num_closed:
                continue
            opened = self._open[kernel]
            if opened.grouped_by is None or opened.grouped_by.into is not node.space:
                continue
            if self._nodes[value].space is not node.space or not self._reads_own_rows(node, kernel):
                continue
            last = max(self._kernel_of[read] for read in self._reads[position])
            if last == kernel or self._move_behind(kernel, last):
                opened.epilogue.append(position)
                self._kernel_of[position] = last
                self._stage_of[position] = _EPILOGUE
                return True
        return False

    def _reads_own_rows(self, node: Node, kernel: int) -> bool:
        """Return whether a value reads nothing of a kernel but values of its own row."""
        sources = ((operand, find_source(self._program, operand)) for operand in node.operands)
        return all(
            not find_maps(self._program, operand) and self._nodes[source].space is node.space
            for operand, source in sources
            if self._kernel_of.get(source) == kernel
        )

    def _move_behind(self, kernel: int, other: int) -> bool:
        """Let a kernel run right after a later one, unless something on the way reads it."""
        between = range(kernel + 1, other + 1)
        for value in itertools.chain.from_iterable(self._open[k].values() for k in between):
            if any(self._kernel_of[read] == kernel for read in self._reads[value]):
                return False
        self._open.insert(other, self._open.pop(kernel))
        for value, at in self._kernel_of.items():
            if kernel <= at <= other:
                self._kernel_of[value] = other if at == kernel else at - 1
        return True

    def close(self) -> None:
        """Let no kernel so far take more values."""
        self._num_closed = len(self._open)

    def sink(self) -> None:
        """Move values to the one kernel that reads them, where that leaves less in memory.

        A product per feature that only a later sum reads is computed beside that sum, from what it
        is made of, if that is smaller: an edge vector is then never written.
        """
        readers = self._find_readers()
        for value in sorted(self._kernel_of, reverse=True):
            kernel, node = self._kernel_of[value], self._nodes[value]
            later = {self._kernel_of[reader] for reader in readers.get(value, ())}
            # What is computed from its own row alone can be, in any loop over its space.
            is_movable = node.op in ROWWISE and node.space not in TYPES
            if value in self._outputs or len(later) != 1 or not is_movable:
                continue
            target = later.pop()
            if target == kernel or self._open[target].space is not node.space:
                continue
            if {self._open[at].kind for at in (kernel, target)} != {KernelKind.TRAVERSAL}:
                continue
            if (kernel < self._num_closed) != (target < self._num_closed):
                continue  # what the forward computes is kept, or is not: that is not decided here
            newly_written = {
                read
                for read in self._reads[value]
                if self._kernel_of[read] == kernel
                and not self._is_written(read, readers)
                and self._nodes[read].space is node.space
            }
            num_written = sum(math.prod(self._nodes[read].shape) for read in newly_written)
            if num_written >= math.prod(node.shape):
                continue
            opened = self._open[kernel]
            placed = [*opened.stages, opened.epilogue][self._stage_of[value]]
            placed.remove(value)
            self._open[target].stages[0].insert(0, value)
            self._kernel_of[value], self._stage_of[value] = target, 0

    def build_schedule(self) -> KernelSchedule:
        """Return the schedule of the values placed so far."""
        kept = [opened for opened in self._open if any(opened.stages)]
        num_forward = sum(any(opened.stages) for opened in self._open[: self._num_closed])
        kernels = []
        for k in kept:
            stages = tuple(tuple(stage) for stage in k.stages if stage)
            kernels.append(Kernel(k.kind, k.space, k.grouped_by, stages, tuple(k.epilogue)))
        of = self._kernel_of
        written = {read for value in of for read in self._reads[value] if of[read] != of[value]}
        written |= self._outputs & of.keys()
        return KernelSchedule(tuple(kernels), num_forward, frozenset(written))

    def _append(self, opened: _OpenKernel, position: int) -> None:
        self._open.append(opened)
        self._join(len(self._open) - 1, 0, position, opened.grouped_by)

    def _join(self, kernel: int, stage: int, position: int, grouped_by: RowMap | None) -> None:
        opened = self._open[kernel]
        while len(opened.stages) <= stage:
            opened.stages.append([])
        opened.stages[stage].append(position)
        opened.grouped_by = opened.grouped_by or grouped_by
        self._kernel_of[position] = kernel
        self._stage_of[position] = stage

    def _find_stage(
        self, kernel: int, position: int, space: Space, grouped_by: RowMap | None
    ) -> int | None:
        """Return the stage at which an open kernel can compute the value; None where it cannot."""
        opened = self._open[kernel]
        if opened.kind is not KernelKind.TRAVERSAL or opened.space is not space:
            return None
        if grouped_by is not None and opened.grouped_by not in (None, grouped_by):
            return None
        grouping = opened.grouped_by or grouped_by
        stage = 0
        for operand in self._nodes[position].operands:
            value, maps = find_source(self._program, operand), find_maps(self._program, operand)
            if self._kernel_of.get(value) != kernel:
                continue
            computed = self._nodes[value]
            if not maps:
                # The value itself, of the same row; a finished softmax waits for its group.
                if computed.space is not space:
                    return None
                stage = max(stage, self._stage_of[value] + (computed.op == "softmax"))
            elif computed.op == "sum" and maps == (computed.map,) == (grouping,):
                stage = max(stage, self._stage_of[value] + 1)
            else:
                return None  # another row's value, which may not be there yet
        if stage and grouping is not None and grouping.into in TYPES:
            return None  # such a group has no one loop: it is split among threads
        return stage

    def _find_readers(self) -> dict[int, set[int]]:
        """Return, for each value, the values that read it, through reads and fused outers."""
        readers: dict[int, set[int]] = {}
        for value in self._kernel_of:
            for read in self._reads[value]:
                readers.setdefault(read, set()).add(value)
        return readers

    def _is_written(self, value: int, readers: dict[int, set[int]]) -> bool:
        kernel = self._kernel_of[value]
        is_read_elsewhere = any(self._kernel_of[r] != kernel for r in readers.get(value, ()))
        return is_read_elsewhere or value in self._outputs
