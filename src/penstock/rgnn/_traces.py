"""Traced programs, remembered by what a function can see of its arguments.

A traced function sees the shapes of rows, not how many there are. So mini-batches, whose tensors
differ in their number of rows, share one trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.rgnn._arguments import Constant, Kind, TensorKind
from penstock.rgnn._frontend import Argument, Trace, TracedGraph, Value
from penstock.rgnn._ir import Program, Shape
from penstock.rgnn._plan import needed
from penstock.rgnn._rows import Space

_NUM_KEPT = 256  # kinds of arguments whose traces are remembered


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced program and how its outputs make up the function's result."""

    program: Program
    is_tuple: bool
    lengths: tuple[tuple[str, Shape], ...]
    """The first axis of each tensor that is used as a whole; it is part of the program."""
    used: frozenset[str]
    """The inputs that an output depends on."""

    def differentiable(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the inputs that can have a gradient."""
        return tuple(name for name in names if name in self.used)

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """The outputs as the function returns them."""
        return outputs if self.is_tuple else outputs[0]


class Traces:
    """The traces of one function.

    Args:
        function: The plain Python function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._alike = functools.lru_cache(_NUM_KEPT)(_no_traces)
        self.num_traces = 0

    def get(self, kinds: Mapping[str, Kind]) -> Traced:
        """The trace for arguments of these kinds, in the order of the parameters."""
        shapes = {
            name: tuple(kind.shape) for name, kind in kinds.items() if isinstance(kind, TensorKind)
        }
        alike = self._alike(tuple(_seen(name, kind) for name, kind in kinds.items()))
        for traced in alike:
            if all(shapes[name][:1] == length for name, length in traced.lengths):
                return traced
        constants = {n: kind.value for n, kind in kinds.items() if isinstance(kind, Constant)}
        traced = self._trace(list(kinds), shapes, constants)
        alike.append(traced)
        self.num_traces += 1
        return traced

    def _trace(
        self, names: list[str], shapes: dict[str, Shape], constants: dict[str, Any]
    ) -> Traced:
        trace = Trace(shapes)
        arguments = {
            name: Argument(trace, name, functools.partial(trace.bind, name))
            if name in shapes
            else constants[name]
            for name in names
        }
        result = self._function(TracedGraph(trace), **arguments)
        values = result if isinstance(result, tuple) else (result,)
        for value in values:
            if not isinstance(value, Value):
                raise TypeError(
                    f"{self._function.__name__} must return values of nodes or edges, one or a "
                    f"tuple; it returns {type(value).__name__} {value!r:.60}"
                )
        program = trace.builder.program(value.position for value in values)
        used = needed(program, program.outputs)
        inputs = program.inputs()
        whole = {
            n: program.nodes[at] for n, at in inputs.items() if program.nodes[at].space is Space.ONE
        }
        return Traced(
            program,
            isinstance(result, tuple),
            lengths=tuple((name, node.shape[:1]) for name, node in whole.items()),
            used=frozenset(name for name, at in inputs.items() if at in used),
        )


def _no_traces(seen: tuple[Any, ...]) -> list[Traced]:
    return []


def _seen(name: str, kind: Kind) -> tuple[Any, ...]:
    if isinstance(kind, TensorKind):
        return name, len(kind.shape), kind.shape[1:]
    return name, kind
