"""When kernels run: an order in which fewer bytes are alive together.

A result has memory from the first kernel of its direction on, and until it is written others may
lie there. So results that nothing reads are best made last, and of two chains of kernels that make
a large value and use it up, one is best finished before the other begins. Where one traversal makes
the beginnings of both, it is cut in two, if no long row is then read twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from penstock.rgnn._ir import Program
from penstock.rgnn._rows import Counts
from penstock.rgnn._schedule import TYPES, Kernel, KernelKind, Schedule, is_elementwise, source

_LONG_ROW = 16  # features; shorter rows are cheap to read again
_LEAST_GAIN = 0.02  # of all bytes of a direction, below which the order stays
Lives = dict[int, tuple[int, int]]
"""For each value, the kernel that computes it and the last that reads it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ordered:
    """A schedule, and what its order saves."""

    schedule: Schedule
    scratch: tuple[int, int]
    """Numbers beside results and kept values, of the forward and the backward."""
    scratch_before: tuple[int, int]


def order(program: Program, schedule: Schedule, seen: Collection[int], counts: Counts) -> Ordered:
    """Let kernels run in an order that needs less memory, where there is one.

    Args:
        program: Laid out.
        schedule: Its kernels.
        seen: Values that have memory of their own: results, and what the backward reads.
        counts: Rows of the graphs that it is for.
    """
    split = schedule.num_forward
    found, scratch, before = [], [], []
    for kernels in (schedule.kernels[:split], schedule.kernels[split:]):
        memory = _Memory(program, schedule.materialised, frozenset(seen), counts)
        apart = [part for kernel in kernels for part in _parts(program, schedule, kernel)]
        candidates = [list(kernels)]
        for these in [list(kernels)] if len(apart) == len(kernels) else [list(kernels), apart]:
            candidates += [memory.greedy(these, last=last) for last in (False, True)]
        best = min(candidates, key=memory.scratch)  # the first of those that are alike
        gain = memory.scratch(candidates[0]) - memory.scratch(best)
        if gain <= _LEAST_GAIN * memory.all(candidates[0]):
            best = candidates[0]
        before.append(memory.scratch(candidates[0]))
        scratch.append(memory.scratch(best))
        found.append(best)
    forward, backward = found
    ordered = Schedule((*forward, *backward), len(forward), schedule.materialised)
    return Ordered(ordered, (scratch[0], scratch[1]), (before[0], before[1]))


def lifetimes(program: Program, kernels: Sequence[Kernel]) -> Lives:
    """From which kernel to which each computed value is needed."""
    lives: Lives = {}
    for number, kernel in enumerate(kernels):
        for value in kernel.values:
            lives[value] = (number, number)
        for value in _read(program, kernel.values):
            if value in lives:
                lives[value] = (lives[value][0], number)
    return lives


def written_over(program: Program, kernels: Sequence[Kernel], lives: Lives) -> dict[int, int]:
    """Values that can be written over one that they are computed from, and which that is.

    Its row is read by the same row's value alone, element by element, and by nothing later.
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
                readers.setdefault(source(program, operand), []).append(value)
        for read, by in readers.items():
            if len(by) != 1 or read not in lives or lives[read][1] != number:
                continue
            (value,) = by
            node = program.nodes[value]
            is_own_row = read in node.operands and program.nodes[read].space is node.space
            is_alike = program.nodes[read].shape == node.shape and is_elementwise(program, value)
            is_earlier = lives[read][0] != number
            if value in own and is_own_row and is_alike and is_earlier and value not in found:
                found[value] = read
    return found


def _read(program: Program, values: Iterable[int]) -> set[int]:
    """What is read by some values, through reads and products that are only summed."""
    found: set[int] = set()
    pending = list(values)
    while pending:
        for operand in program.nodes[pending.pop()].operands:
            value = source(program, operand)
            found.add(value)
            if program.nodes[value].op == "outer":
                pending.append(value)
    return found


@dataclasses.dataclass(slots=True)
class _Memory:
    """How many numbers the kernels of a direction take, in an order."""

    program: Program
    materialised: frozenset[int]
    seen: frozenset[int]
    counts: Counts

    def scratch(self, kernels: Sequence[Kernel]) -> int:
        """Numbers beside results: at most, and as if no room were lost between values."""
        lives = lifetimes(self.program, kernels)
        in_place = written_over(self.program, kernels, lives)
        for value in sorted(in_place, key=lambda value: lives[value][0]):
            operand = in_place[value]
            if operand not in self.seen:  # one value that is there from the first to the last
                first, _ = lives.pop(operand)
                lives[value] = (first, lives[value][1])
        alive, unwritten = [0] * len(kernels), [0] * len(kernels)
        for value, (first, last) in lives.items():
            if value not in self.materialised:
                continue
            is_seen, places = value in self.seen, range(first, last + 1)
            for place in range(first) if is_seen else places:
                (unwritten if is_seen else alive)[place] += self._numbers(value)
        pairs = zip(alive, unwritten, strict=True)
        return max((max(0, numbers - room) for numbers, room in pairs), default=0)

    def all(self, kernels: Sequence[Kernel]) -> int:
        """Numbers of results and scratch."""
        made = {value for kernel in kernels for value in kernel.values} & self.seen
        return self.scratch(kernels) + sum(self._numbers(value) for value in made)

    def greedy(self, kernels: Sequence[Kernel], *, last: bool) -> list[Kernel]:
        """Always the kernel next after which the fewest numbers are alive.

        Args:
            kernels: In an order in which they can run.
            last: Whether those that make nothing but results wait until no other can run.
        """
        maker = {value: n for n, kernel in enumerate(kernels) for value in kernel.values}
        read = [_read(self.program, kernel.values) & maker.keys() for kernel in kernels]
        needs = [{maker[value] for value in values} - {n} for n, values in enumerate(read)]
        waiting, done, order = set(range(len(kernels))), set(), []

        def growth(number: int) -> tuple[bool, int, int]:
            made = [v for v in kernels[number].values if v in self.materialised]
            freed = [
                value
                for value in read[number]
                if value in self.materialised
                and value not in self.seen
                and all(other == number or value not in read[other] for other in waiting)
            ]
            numbers = sum(map(self._numbers, made)) - sum(map(self._numbers, freed))
            is_end = all(v in self.seen and self.counts_many(v) for v in made)
            return last and is_end and numbers > 0, numbers, number

        while waiting:
            ready = [number for number in waiting if needs[number] <= done]
            number = min(ready, key=growth)
            order.append(kernels[number])
            waiting.remove(number)
            done.add(number)
        return order

    def counts_many(self, value: int) -> bool:
        """Whether a value has a row for each of many, not for each type."""
        return self.program.nodes[value].space not in TYPES

    def _numbers(self, value: int) -> int:
        node = self.program.nodes[value]
        return self.counts.rows(node.space) * math.prod(node.shape)


def _parts(program: Program, schedule: Schedule, kernel: Kernel) -> list[Kernel]:
    """A traversal as one for each sum that shares neither values nor long rows with the rest."""
    if kernel.kind is not KernelKind.TRAVERSAL or kernel.grouped_by is None or kernel.epilogue:
        return [kernel]
    rest, parts = set(kernel.values), []
    for value in kernel.values:
        if program.nodes[value].op != "sum" or value not in schedule.materialised:
            continue
        made = _made_for(program, schedule, value, rest)
        others = rest - made
        is_needed = made & _read(program, others)
        has_sum = any(program.nodes[other].op in ("sum", "softmax") for other in others)
        if is_needed or not has_sum or _long(program, made, rest) & _long(program, others, rest):
            continue
        rest = others
        parts.append(made)
    return [_restricted(kernel, values) for values in (rest, *parts)]


def _made_for(program: Program, schedule: Schedule, value: int, among: Collection[int]) -> set[int]:
    """What a kernel computes for one of its values; what it writes to memory is read from there."""
    found, pending = {value}, [value]
    while pending:
        for operand in program.nodes[pending.pop()].operands:
            read = source(program, operand)
            if read in among and read not in found and read not in schedule.materialised:
                found.add(read)
                pending.append(read)
    return found


def _long(program: Program, values: Collection[int], among: Collection[int]) -> set[int]:
    """The long rows that some values of a kernel read from memory."""
    return {
        read
        for read in _read(program, values)
        if read not in among and math.prod(program.nodes[read].shape) > _LONG_ROW
    }


def _restricted(kernel: Kernel, values: Collection[int]) -> Kernel:
    stages = (tuple(v for v in stage if v in values) for stage in kernel.stages)
    return dataclasses.replace(kernel, stages=tuple(stage for stage in stages if stage))
