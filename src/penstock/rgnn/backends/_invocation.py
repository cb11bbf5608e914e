"""Interface of back ends: one value with everything that a run needs, and what comes back."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch

from penstock.rgnn import interpreter
from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import Program
from penstock.rgnn.lowering import Direction, LoweredProgram
from penstock.rgnn.passes import OptimizedProgram

Results = tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]
"""Outputs as the user has them, and the rows of `Direction.keep` by position. No output shares
memory with another, with an argument or with what is kept."""


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """A run of one direction of a program."""

    direction: Direction
    graph: Graph
    """On the device of the tensors; its counts are about those that the program was made for."""
    arguments: Mapping[str, torch.Tensor]
    """Inputs by name, as the user has them (edges in the order given)."""
    given: Mapping[int, torch.Tensor]
    """Rows of values that have been computed before, by position."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arguments, else of the given values."""
        for tensors in (self.arguments, self.given):
            for tensor in tensors.values():
                return tensor.dtype
        return torch.get_default_dtype()


class Backend(abc.ABC):
    """A way to run lowered programs: constructed for one of them, called for each run.

    Args:
        lowered: The program.
    """

    lower: ClassVar[Callable[[OptimizedProgram], LoweredProgram]]
    """Lowers programs for it."""
    has_half_precision: ClassVar[bool] = False
    """True if it keeps values in half precision; else they are converted to float32."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self._lowered = lowered
        self._program = lowered.optimized.program

    @abc.abstractmethod
    def __call__(self, invocation: Invocation) -> Results:
        """Compute the values of a direction."""


def enter_arguments(program: Program, invocation: Invocation) -> dict[int, torch.Tensor]:
    """Return the arguments of a run as rows, by position."""
    arguments = invocation.arguments
    return {
        position: interpreter.enter(
            invocation.graph, program.nodes[position].space, arguments[name].detach()
        )
        for name, position in program.inputs().items()
        if name in arguments
    }


def leave_outputs(
    program: Program,
    invocation: Invocation,
    read: Callable[[int], torch.Tensor],
    others: Iterable[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Return outputs as the user has them, each with memory of its own.

    Args:
        program: The program that the outputs belong to.
        invocation: The run.
        read: Returns the rows of a value.
        others: Tensors with memory that no output may share.
    """
    taken = {tensor.data_ptr() for tensor in others}
    found = []
    for output in invocation.direction.outputs:
        space = program.nodes[output].space
        result = interpreter.leave(invocation.graph, space, read(output))
        if result.data_ptr() in taken:
            result = result.clone()
        taken.add(result.data_ptr())
        found.append(result)
    return tuple(found)
