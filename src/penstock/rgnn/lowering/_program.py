"""Lowered programs, and the two ways to lower one."""

from __future__ import annotations

import dataclasses

from penstock.rgnn.ir import find_source
from penstock.rgnn.lowering._fuse import fuse_biases, fuse_sums
from penstock.rgnn.lowering._order import ScratchNumbers, order_kernels
from penstock.rgnn.lowering._schedule import Kernel, KernelSchedule, assign_kernels
from penstock.rgnn.passes import OptimizedProgram


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Direction:
    """The forward or the backward of a program: its values, its kernels, and what leaves it."""

    values: frozenset[int]
    """Positions of the values to compute."""
    kernels: tuple[Kernel, ...]
    first_kernel: int
    """The number of its first kernel in the schedule."""
    outputs: tuple[int, ...]
    """Positions of the results: the program's outputs, or its gradients."""
    keep: tuple[int, ...]
    """Positions of the values, besides outputs, that the backward is given."""


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredProgram:
    """A program as kernels: all that a backend is told before it gets a graph."""

    optimized: OptimizedProgram
    schedule: KernelSchedule
    """The kernels of the forward, then those of the backward."""
    forward: Direction
    backward: Direction
    scratch: tuple[ScratchNumbers, ...] = ()
    """Scratch memory of each direction, if the order of kernels was chosen for it."""

    def directions(self) -> dict[str, Direction]:
        """Return the directions by name."""
        return {"forward": self.forward, "backward": self.backward}


def lower(optimized: OptimizedProgram) -> LoweredProgram:
    """Assign values to kernels, which run in the order of the program."""
    schedule = assign_kernels(optimized.program, optimized.forward)
    return _lowered(optimized, schedule)


def lower_for_arena(optimized: OptimizedProgram) -> LoweredProgram:
    """Lower for a backend that sums products where it makes them and owns its memory.

    Products are fused with their sums and biases, and kernels run in an order that needs less
    scratch memory.
    """
    program, counts = optimized.program, optimized.counts
    schedule = assign_kernels(program, optimized.forward)
    schedule = fuse_biases(program, fuse_sums(program, schedule, counts))
    outputs = {find_source(program, output) for output in program.outputs}
    schedule, scratch = order_kernels(program, schedule, optimized.kept | outputs, counts)
    return _lowered(optimized, schedule, scratch)


def _lowered(
    optimized: OptimizedProgram, schedule: KernelSchedule, scratch: tuple[ScratchNumbers, ...] = ()
) -> LoweredProgram:
    program, split = optimized.program, schedule.num_forward
    outputs = program.outputs[: optimized.num_outputs]
    gradients = program.outputs[optimized.num_outputs :]
    keep = tuple(sorted(optimized.kept.difference(program.inputs().values())))
    kernels = schedule.kernels
    return LoweredProgram(
        optimized,
        schedule,
        Direction(optimized.forward, kernels[:split], 0, outputs, keep),
        Direction(optimized.backward, kernels[split:], split, gradients, ()),
        scratch,
    )
