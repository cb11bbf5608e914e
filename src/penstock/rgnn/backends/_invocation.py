"""Interface of back ends: one value with everything that a run needs, and what comes back."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from penstock.rgnn import interpreter
from penstock.rgnn.graph import Graph
from penstock.rgnn.ir import READS, Program
from penstock.rgnn.lowering import Direction, LoweredProgram
from penstock.rgnn.passes import OptimizedProgram
from penstock.rgnn.spaces import Space

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
        tensors = itertools.chain(self.arguments.values(), self.given.values())
        return next((tensor.dtype for tensor in tensors), torch.get_default_dtype())


class Backend(abc.ABC):
    """A way to run lowered programs: constructed for one of them, called for each run."""

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
    """Return the arguments of a run as rows, by position, with their numbers in memory."""
    arguments = invocation.arguments
    return {
        position: interpreter.enter(
            invocation.graph, program.nodes[position].space, arguments[name].detach().resolve_neg()
        )
        for name, position in program.inputs().items()
        if name in arguments
    }


def read_rows(
    program: Program,
    graph: Graph,
    rows: Mapping[int, torch.Tensor],
    position: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the rows of a value; a read, or the graph's inverse counts, are made here."""
    node = program.nodes[position]
    if node.op == "inverse_count":
        return interpreter.inverse_count(graph, node.map, dtype)
    if node.op not in READS:
        return rows[position]
    source = read_rows(program, graph, rows, node.operands[0], dtype)
    if node.op == "reshape":
        return source.reshape(source.shape[0], *node.shape)
    if node.map.into is Space.ONE:  # the same for all rows: broadcasting does it
        return source.expand(graph.counts.rows(node.map.rows), *source.shape[1:])
    return source.index_select(0, graph.index(node.map))


def leave_results(
    program: Program, invocation: Invocation, rows: Mapping[int, torch.Tensor]
) -> Results:
    """Return what comes back of a run."""
    graph = invocation.graph
    kept = {position: rows[position] for position in invocation.direction.keep}
    others = (*invocation.arguments.values(), *invocation.given.values(), *kept.values())
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    found = []
    for output in invocation.direction.outputs:
        value = read_rows(program, graph, rows, output, invocation.dtype)
        result = interpreter.leave(graph, program.nodes[output].space, value)
        if result.untyped_storage().data_ptr() in taken or not result.is_contiguous():
            result = result.clone(memory_format=torch.contiguous_format)
        taken.add(result.untyped_storage().data_ptr())
        found.append(result.data)  # a view could not be changed in place under autograd
    return tuple(found), kept
