"""Order of kernels: one in which fewer bytes are alive together.

A result has memory from the first kernel of its direction on, and until it is written others may
lie there. So results that nothing reads are best made last, and of two chains of kernels that make
a large value and use it up, one is best finished before the other begins. Where one traversal makes
the beginnings of both, it is split in two, if no long row is then read twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from penstock.rgnn.ir import TYPES, Program, find_source
from penstock.rgnn.lowering._schedule import (
    Kernel,
    KernelKind,
    KernelSchedule,
    find_reads,
    is_elementwise,
)
from penstock.rgnn.spaces import Counts

_LONG_ROW = 16  # features; shorter rows are cheap to read again
_LEAST_GAIN = 0.02  # of all bytes of a direction, below which the order stays
LiveRanges = dict[int, tuple[int, int]]
"""For each value, the kernel that computes it and the last that reads it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScratchNumbers:
    """Numbers in memory at most beside results and kept values, in one direction."""

    before: int
    """In the order of the program."""
    after: int
    """In the order that was chosen."""


def order_kernels(
    program: Program, schedule: KernelSchedule, owned: Collection[int], counts: Counts
) -> tuple[KernelSchedule, tuple[ScratchNumbers, ...]]:
    """Let kernels run in an order that needs less memory, where there is one."""
    model = _ScratchModel(
        program, schedule.materialised, frozenset(owned), counts, find_reads(program)
    )
    split = schedule.num_forward
    forward, saved_forward = _order_direction(model, schedule.kernels[:split])
    backward, saved_backward = _order_direction(model, schedule.kernels[split:])
    ordered = KernelSchedule((*forward, *backward), len(forward), schedule.materialised)
    return ordered, (saved_forward, saved_backward)


def _order_direction(
    model: _ScratchModel, kernels: Sequence[Kernel]
) -> tuple[Sequence[Kernel], ScratchNumbers]:
    parts = [part for kernel in kernels for part in _split(model, kernel)]
    candidates = [kernels]
    for these in [kernels] if len(parts) == len(kernels) else [kernels, parts]:
        candidates += [model.order_greedily(these, last=last) for last in (False, True)]
    scratch = [model.count_scratch(candidate) for candidate in candidates]
    before, after = scratch[0], min(scratch)
    if before - after <= _LEAST_GAIN * (before + model.count_results(kernels)):
        return kernels, ScratchNumbers(before, before)
    return candidates[scratch.index(after)], ScratchNumbers(before, after)


def find_live_ranges(
    program: Program, kernels: Sequence[Kernel], reads: Sequence[frozenset[int]] | None = None
) -> LiveRanges:
    """Return from which kernel to which each computed value is needed.

    Args:
        program: The program.
        kernels: Its kernels, or those of a direction, in their order.
        reads: The result of `find_reads` for the program, where that is at hand.
    """
    live_ranges: LiveRanges = {}
    reads = find_reads(program) if reads is None else reads
    for number, kernel in enumerate(kernels):
        for value in kernel.values:
            live_ranges[value] = (number, number)
        for value in set().union(*(reads[value] for value in kernel.values)):
            if value in live_ranges:
                live_ranges[value] = (live_ranges[value][0], number)
    return live_ranges


def find_overwritten(
    program: Program, kernels: Sequence[Kernel], live_ranges: LiveRanges
) -> dict[int, int]:
    """Find values that can overwrite one that they are computed from: in-place reuse.

    The row of that one is read by the same row's value alone, element by element, and by
    nothing later.
    """
    found = {}
    for number, kernel in enumerate(kernels):
        if kernel.kind not in (KernelKind.TRAVERSAL, KernelKind.SUMMED_GEMM):
            continue
        # Of a kernel that sums, what is done once for each sum: other rows' sums come later.
        own = kernel.values if kernel.grouped_by is None else kernel.epilogue
        readers: dict[int, list[int]] = {}
        for value in kernel.values:
            for operand in program.nodes[value].operands:
                readers.setdefault(find_source(program, operand), []).append(value)
        for read, by in readers.items():
            if len(by) != 1 or read not in live_ranges or live_ranges[read][1] != number:
                continue
            (value,) = by
            node = program.nodes[value]
            is_own_row = read in node.operands and program.nodes[read].space is node.space
            is_alike = program.nodes[read].shape == node.shape and is_elementwise(program, value)
            is_earlier = live_ranges[read][0] != number
            if value in own and is_own_row and is_alike and is_earlier and value not in found:
                found[value] = read
    return found


@dataclasses.dataclass(slots=True)
class _ScratchModel:
    """Counts of the numbers in memory while the kernels of a direction run in an order."""

    program: Program
    materialised: frozenset[int]
    owned: frozenset[int]
    counts: Counts
    reads: Sequence[frozenset[int]]
    """The result of `find_reads` for the program."""

    def find_read(self, values: Iterable[int]) -> set[int]:
        """Return what some values read."""
        return set().union(*(self.reads[value] for value in values))

    def count_scratch(self, kernels: Sequence[Kernel]) -> int:
        """Count numbers beside results: at most, and as if no memory were lost between values."""
        live_ranges = find_live_ranges(self.program, kernels, self.reads)
        in_place = find_overwritten(self.program, kernels, live_ranges)
        for value in sorted(in_place, key=lambda value: live_ranges[value][0]):
            operand = in_place[value]
            if operand not in self.owned:  # one value that is there from the first to the last
                first, _ = live_ranges.pop(operand)
                live_ranges[value] = (first, live_ranges[value][1])
        alive, unwritten = [0] * len(kernels), [0] * len(kernels)
        for value, (first, last) in live_ranges.items():
            if value not in self.materialised:
                continue
            is_owned, places = value in self.owned, range(first, last + 1)
            for place in range(first) if is_owned else places:
                (unwritten if is_owned else alive)[place] += self._count_numbers(value)
        pairs = zip(alive, unwritten, strict=True)
        return max((max(0, numbers - free) for numbers, free in pairs), default=0)

    def count_results(self, kernels: Sequence[Kernel]) -> int:
        """Count numbers of results."""
        computed = {value for kernel in kernels for value in kernel.values} & self.owned
        return sum(self._count_numbers(value) for value in computed)

    def order_greedily(self, kernels: Sequence[Kernel], *, last: bool) -> list[Kernel]:
        """Take always the kernel next after which the fewest numbers are alive.

        With `last`, those that make nothing but results wait until no other can run.
        """
        maker = {value: n for n, kernel in enumerate(kernels) for value in kernel.values}
        read = [self.find_read(kernel.values) & maker.keys() for kernel in kernels]
        needs = [{maker[value] for value in values} - {n} for n, values in enumerate(read)]
        waiting, done, order = set(range(len(kernels))), set(), []

        def measure_growth(number: int) -> tuple[bool, int, int]:
            computed = [v for v in kernels[number].values if v in self.materialised]
            freed = [
                value
                for value in read[number]
                if value in self.materialised
                and value not in self.owned
                and all(other == number or value not in read[other] for other in waiting)
            ]
            numbers = sum(map(self._count_numbers, computed)) - sum(map(self._count_numbers, freed))
            is_end = all(
                v in self.owned and self.program.nodes[v].space not in TYPES for v in computed
            )
            return last and is_end and numbers > 0, numbers, number

        while waiting:
            ready = [number for number in waiting if needs[number] <= done]
            number = min(ready, key=measure_growth)
            order.append(kernels[number])
            waiting.remove(number)
            done.add(number)
        return order

    def _count_numbers(self, value: int) -> int:
        node = self.program.nodes[value]
        return self.counts.rows(node.space) * math.prod(node.shape)


def _split(model: _ScratchModel, kernel: Kernel) -> list[Kernel]:
    """Split a traversal: one for each sum that shares neither values nor long rows with others."""
    program, materialised = model.program, model.materialised
    if kernel.kind is not KernelKind.TRAVERSAL or kernel.grouped_by is None or kernel.epilogue:
        return [kernel]
    rest, parts = set(kernel.values), []
    for value in kernel.values:
        if program.nodes[value].op != "sum" or value not in materialised:
            continue
        computed = _find_computation(model, value, rest)
        others = rest - computed
        is_needed = computed & model.find_read(others)
        has_sum = any(program.nodes[other].op in ("sum", "softmax") for other in others)
        if (
            is_needed
            or not has_sum
            or _find_long_rows(model, computed, rest) & _find_long_rows(model, others, rest)
        ):
            continue
        rest = others
        parts.append(computed)
    found = []
    for part in (rest, *parts):
        stages = (tuple(v for v in stage if v in part) for stage in kernel.stages)
        found.append(dataclasses.replace(kernel, stages=tuple(stage for stage in stages if stage)))
    return found


def _find_computation(model: _ScratchModel, value: int, among: Collection[int]) -> set[int]:
    """Find the values that a kernel computes for one of its values alone; others are in memory."""
    found, pending = {value}, [value]
    while pending:
        for operand in model.program.nodes[pending.pop()].operands:
            read = find_source(model.program, operand)
            if read in among and read not in found and read not in model.materialised:
                found.add(read)
                pending.append(read)
    return found


def _find_long_rows(
    model: _ScratchModel, values: Collection[int], among: Collection[int]
) -> set[int]:
    """Find the long rows that some values of a kernel read from memory."""
    return {
        read
        for read in model.find_read(values)
        if read not in among and math.prod(model.program.nodes[read].shape) > _LONG_ROW
    }
