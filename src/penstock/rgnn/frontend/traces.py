"""Traced programs, remembered by the properties of arguments that a function can see.

A traced function sees the shapes of rows, not how many there are. So mini-batches, which
differ in their number of rows, share one trace. Its free values are part of the key; where those
cannot be compared, the function is traced at each call, and the programs are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from penstock.rgnn.frontend._free_values import read_free_values
from penstock.rgnn.frontend.arguments import Constant, Kind, TensorKind, check_constants
from penstock.rgnn.frontend.errors import add_user_line
from penstock.rgnn.frontend.values import Argument, Trace, TracedGraph, Value, describe_operand
from penstock.rgnn.ir import Program, Shape, find_dependencies
from penstock.rgnn.spaces import Space

_logger = logging.getLogger(__name__)

_NUM_KEPT = 256  # kinds of arguments whose traces are remembered
_MANY_TRACES = 32  # of one function with the same shapes: its numbers should be tensors


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFunction:
    """A traced program and how its outputs make up the function's result."""

    program: Program
    is_tuple: bool
    lengths: tuple[tuple[str, Shape], ...]
    """The first axis of each tensor that is used as a whole; it is part of the program."""
    used: frozenset[str]
    """The inputs that an output depends on."""

    whole_weights: tuple[tuple[str, int, str], ...]
    """Matrices for heads that the vector did not have: name, number of heads, line."""

    def warn_of_missing_index(self, num_relations: int) -> None:
        """Warn of `x @ W` where `x @ W[e.type]` may be meant, for a matrix of each relation."""
        for name, num_heads, where in self.whole_weights:
            if num_heads == num_relations > 1:
                warnings.warn(
                    f"{name} has {num_heads} matrices, as many as the graph has relations, and is "
                    f"not indexed, so each row is multiplied with all of them, as heads; write "
                    f"{name}[g.edges.type] for the one of its relation, or .heads(1) on the left "
                    f"if heads are meant ({where})",
                    stacklevel=2,
                )

    def result(self, outputs: tuple[Any, ...]) -> Any:
        """Return the outputs as the function returns them."""
        return outputs if self.is_tuple else outputs[0]


State = tuple[Hashable, ...] | TracedFunction
"""Inputs of a trace beside the arguments: the free values, or else the result of tracing."""


class Traces:
    """The traces of one function."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self._function, self._signature = function, signature
        self._lock = threading.RLock()
        self._by_shapes: Any = functools.lru_cache(_NUM_KEPT)(lambda shapes: [])
        self._by_program: Any = functools.lru_cache(_NUM_KEPT)(lambda program: [])
        self._num_by_shapes = functools.lru_cache(_NUM_KEPT)(lambda shapes: [0])

    def state(self, names: Iterable[str], kinds: Iterable[Kind]) -> State:
        """Return the free values, which decide the trace too; or else the trace itself."""
        known, _ = read_free_values(self._function)
        if known is not None:
            return known
        by_name = dict(zip(names, kinds, strict=True))
        with self._lock:
            traced = self._trace(by_name)
            equal = self._by_program((traced.program, traced.is_tuple))
            if not equal:
                equal.append(traced)
                self._count(by_name)
            return equal[0]

    def get(self, kinds: Mapping[str, Kind], state: State) -> TracedFunction:
        """Return the trace for arguments of these kinds, in the order of the parameters."""
        if isinstance(state, TracedFunction):
            return state
        with self._lock:
            visible = (
                (name, len(kind.shape), kind.shape[1:])
                if isinstance(kind, TensorKind)
                else (name, kind)
                for name, kind in kinds.items()
            )
            alike: list[TracedFunction] = self._by_shapes((*visible, *state))
            for traced in alike:
                lengths = ((kinds[name], length) for name, length in traced.lengths)
                if all(isinstance(k, TensorKind) and k.shape[:1] == n for k, n in lengths):
                    return traced
            traced = self._trace(kinds)
            alike.append(traced)
            self._count(kinds)
            return traced

    def make_check(
        self, traced: TracedFunction, state: State, kinds: Mapping[str, Kind]
    ) -> Callable[[], None] | None:
        """Return a check that raises if a trace is out of date; None without free values."""
        if not read_free_values(self._function)[1]:
            return None
        whole = {name for name, _ in traced.lengths}
        # Numbers of rows may be symbols of a compiler, which are not to be kept.
        plain = {
            name: kind._replace(shape=(int(kind.shape[0]) if name in whole else 0, *kind.shape[1:]))
            if isinstance(kind, TensorKind) and kind.shape
            else kind
            for name, kind in kinds.items()
        }

        def check() -> None:
            now = self.state(plain, plain.values())
            is_same = (
                now.program == traced.program if isinstance(now, TracedFunction) else now == state
            )
            if not is_same:
                read = ", ".join(read_free_values(self._function)[1])
                raise RuntimeError(
                    f"{self._function.__name__} reads values besides its arguments ({read}), which "
                    f"changed since torch.compile compiled it; pass what changes as an argument, "
                    f"numbers as tensors without axes, or call torch.compiler.reset()"
                )

        return check

    def _count(self, kinds: Mapping[str, Kind]) -> None:
        """Say once that a number which changes from call to call is compiled again and again."""
        shapes = tuple(tuple(k.shape[1:]) for k in kinds.values() if isinstance(k, TensorKind))
        count = self._num_by_shapes(shapes)
        count[0] += 1
        if count[0] == _MANY_TRACES:
            _logger.warning(
                "%s has been compiled for %d different values of its numbers (%s), for tensors of "
                "the same row shapes; pass a number that changes as a tensor without axes",
                self._function.__name__,
                _MANY_TRACES,
                ", ".join(
                    [n for n, kind in kinds.items() if isinstance(kind, Constant)]
                    + list(read_free_values(self._function)[1])
                ),
            )

    def _trace(self, kinds: Mapping[str, Kind]) -> TracedFunction:
        check_constants(kinds)
        trace = Trace({n: tuple(k.shape) for n, k in kinds.items() if isinstance(k, TensorKind)})
        arguments = {
            name: kind.value
            if isinstance(kind, Constant)
            else Argument(trace, name, functools.partial(trace.bind, name))
            for name, kind in kinds.items()
        }
        bound = self._signature.bind_partial(TracedGraph(trace))
        bound.arguments.update(arguments)
        with add_user_line(self._function):
            result = self._function(*bound.args, **bound.kwargs)
            values = result if isinstance(result, tuple) else (result,)
            for value in values:
                if not isinstance(value, Value):
                    raise TypeError(
                        f"{self._function.__name__} must return values of nodes or edges, one or a "
                        f"tuple; it returns {describe_operand(value)}"
                    )
        program = trace.builder.program(value.position for value in values)
        used = find_dependencies(program.nodes, program.outputs)
        inputs = program.inputs()
        whole = {
            n: program.nodes[at] for n, at in inputs.items() if program.nodes[at].space is Space.ONE
        }
        return TracedFunction(
            program,
            isinstance(result, tuple),
            lengths=tuple((name, node.shape[:1]) for name, node in whole.items()),
            used=frozenset(name for name, at in inputs.items() if at in used),
            whole_weights=tuple(trace.whole_weights),
        )
