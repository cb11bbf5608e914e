"""Assignment of values to kernels: which are computed together, in which loop of which kernel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection

from penstock.rgnn.ir import LEAVES, READS, ROWWISE, TYPES, Node, Program, find_maps, find_source
from penstock.rgnn.lowering._schedule import (
    Kernel,
    KernelKind,
    KernelSchedule,
    find_fused_outers,
    find_reads,
    is_typed_product,
)
from penstock.rgnn.spaces import RowMap, Space

_EPILOGUE = -1
"""The stage of a value that is computed after all stages."""


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
        for operand in node.operands:
            if self._kernel_of.get(find_source(self._program, operand)) != kernel:
                continue
            computed = self._nodes[find_source(self._program, operand)]
            if find_maps(self._program, operand) or computed.space is not node.space:
                return False
        return True

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
            kernel = self._kernel_of[value]
            later = {self._kernel_of[reader] for reader in readers.get(value, ())}
            if value in self._outputs or len(later) != 1 or not self._is_movable(value):
                continue
            target = later.pop()
            if target == kernel or self._open[target].space is not self._nodes[value].space:
                continue
            if self._open[target].kind is not KernelKind.TRAVERSAL:
                continue
            if (kernel < self._num_closed) != (target < self._num_closed):
                continue  # what the forward computes is kept, or is not: that is not decided here
            newly_written = {
                read
                for read in self._reads[value]
                if self._kernel_of[read] == kernel
                and not self._is_written(read, readers)
                and self._nodes[read].space is self._nodes[value].space
            }
            if sum(self._count_features(read) for read in newly_written) >= self._count_features(
                value
            ):
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

    def _is_movable(self, value: int) -> bool:
        """Return whether a value is computed from its own row alone, in any loop over its space."""
        node = self._nodes[value]
        kind = self._open[self._kernel_of[value]].kind
        return node.op in ROWWISE and kind is KernelKind.TRAVERSAL and node.space not in TYPES

    def _is_written(self, value: int, readers: dict[int, set[int]]) -> bool:
        kernel = self._kernel_of[value]
        is_read_elsewhere = any(self._kernel_of[r] != kernel for r in readers.get(value, ()))
        return is_read_elsewhere or value in self._outputs

    def _count_features(self, value: int) -> int:
        return math.prod(self._nodes[value].shape)
