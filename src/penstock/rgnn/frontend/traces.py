"""Traced programs, remembered by the properties of arguments that a function can see.

A traced function sees the shapes of rows, not how many there are. So mini-batches, which
differ in their number of rows, share one trace. Its free values are part of the key; where those
cannot be compared, the function is traced at each call, and the programs are compared.

Free values: numbers and all else that a function reads besides its arguments.

They end up as constants in a traced program, so a trace is right only as long as they are the same.
Numbers, strings, containers of such, and functions with what those read are compared at each call.
Anything else (attributes of objects, generators of random numbers, the clock) can change in ways
that no comparison sees: a function that reads it is traced again at each call.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import inspect
import logging
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from penstock.rgnn.frontend.arguments import Constant, Kind, TensorKind, check_constants
from penstock.rgnn.frontend.errors import add_user_line
from penstock.rgnn.frontend.values import Argument, Trace, TracedGraph, Value, describe_operand
from penstock.rgnn.ir import Program, Shape, find_dependencies
from penstock.rgnn.spaces import Space

_logger = logging.getLogger(__name__)

_NUM_KEPT = 256  # kinds of arguments whose traces are remembered
_MANY_TRACES = 32  # of one function with the same shapes: its numbers should be tensors
_ATOMS = frozenset({int, bool, str, bytes, complex, type(None), type(...), range, slice})
_ATOMS |= {torch.dtype, torch.device}
_SEQUENCES = frozenset({list, tuple, set, frozenset})
_MOST_PARTS = 10_000
"""Numbers that are compared at a call; with more of them, tracing again is as good."""
_PURE_MODULES = frozenset({"builtins", "math", "cmath", "operator", "_operator"})
_IMPURE = frozenset(
    {"eval", "exec", "compile", "globals", "locals", "vars", "getattr", "input", "open", "next"}
    | {"__import__", "id", "dir"}
)
_MISSING = object()


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


class _Opaque(Exception):
    """A value that cannot be compared with what it was."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """Names that the code of a function, and of those inside it, refers to."""

    global_names: tuple[str, ...]
    attributes: frozenset[str]
    has_imports: bool


def read_free_values(
    function: Callable[..., Any],
) -> tuple[tuple[Hashable, ...] | None, tuple[str, ...]]:
    """Return a function's free values and the variables that hold them.

    Returns:
        Their present values, to be compared; None if only another trace can tell. The variables of
        this function and of those that it calls, up to the first one that cannot be compared.
    """
    if _is_ours(getattr(function, "__module__", None)):
        return (), ()  # ours read nothing that changes
    snapshot = _ValueSnapshot()
    try:
        snapshot.add(function, _NO_NAMES)
    except (_Opaque, RuntimeError):  # too deep, or changed by another thread
        return None, tuple(snapshot.names) or ("something that has no name",)
    return tuple(snapshot.parts), tuple(snapshot.names)


class _ValueSnapshot:
    """A snapshot of all free values, as comparable `parts`."""

    def __init__(self) -> None:
        self.parts: list[Hashable] = []
        self.names: dict[str, None] = {}
        """Variables that hold neither functions, classes nor modules."""
        self._seen: set[tuple[int, int]] = set()

    def add(self, value: Any, names: _Names) -> None:
        """Add a value that code with these names reads."""
        kind = type(value)
        parts = self.parts
        if kind is float:
            parts += (kind, value if value else str(value))  # 0.0 equals -0.0
        elif kind in _ATOMS:
            parts += (kind, value if kind is not slice else str(value))
        elif kind in _SEQUENCES:
            parts += (kind, len(value))
            self._add_all(value, names)
        elif kind is dict:
            parts += (kind, len(value))
            self._add_all(value.keys(), names)
            self._add_all(value.values(), names)
        elif kind is types.FunctionType:
            parts.append(value)
            if not _is_ours(value.__module__):
                self._add_function(value)
                self._add_all(
                    [value.__dict__[n] for n in names.attributes & set(value.__dict__)], names
                )
        elif kind is types.ModuleType:
            self._add_module(value, names)
        elif value is _MISSING or _is_pure(value):
            parts.append(value)
        else:
            raise _Opaque

    def _add_all(self, values: Any, names: _Names) -> None:
        if len(self.parts) + len(values) > _MOST_PARTS:
            raise _Opaque
        for value in values:
            self.add(value, names)

    def _add_function(self, function: types.FunctionType) -> None:
        if not self._is_first(function, function):
            return
        names = _find_names(function.__code__)
        if names.has_imports:
            raise _Opaque
        self.parts.append(function.__code__)
        for name, value in _read_variables(function):
            self._add_variable(name, value, names)
        if function.__defaults__ is not None:
            self.add(function.__defaults__, names)
        if function.__kwdefaults__ is not None:
            self.add(function.__kwdefaults__, names)

    def _add_module(self, module: types.ModuleType, names: _Names) -> None:
        """Add what of a module the code may read: all that has a name which occurs in the code."""
        self.parts.append(module)
        if _is_ours(module.__name__) or not self._is_first(module, names):
            return
        held = vars(module)
        if "__getattr__" in held and not module.__name__.startswith("torch"):
            raise _Opaque
        for name in names.attributes.intersection(held):
            self._add_variable(f"{module.__name__}.{name}", held[name], names)

    def _add_variable(self, name: str, value: Any, names: _Names) -> None:
        if not isinstance(value, types.FunctionType | types.ModuleType) and not _is_pure(value):
            self.names[name] = None
        self.add(value, names)

    def _is_first(self, value: object, of: object) -> bool:
        key = (id(value), id(of))
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first


_NO_NAMES = _Names((), frozenset(), False)


def _read_variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function and those inside it read, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            yield name, _MISSING
    known = function.__globals__
    for name in _find_names(function.__code__).global_names:
        yield name, known[name] if name in known else getattr(builtins, name, _MISSING)


@functools.lru_cache(4096)
def _find_names(code: types.CodeType) -> _Names:
    global_names: dict[str, None] = {}
    attributes: set[str] = set()
    has_imports = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_names[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            has_imports = True
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = _find_names(inner)
            global_names |= dict.fromkeys(names.global_names)
            attributes |= names.attributes
            has_imports = has_imports or names.has_imports
    return _Names(tuple(global_names), frozenset(attributes), has_imports)


def _is_pure(value: Any) -> bool:
    """Return whether a foreign function or class gives the same for the same arguments."""
    if isinstance(value, types.BuiltinFunctionType):
        is_method = not isinstance(value.__self__, types.ModuleType | None)
        return not is_method and value.__module__ in _PURE_MODULES and value.__name__ not in _IMPURE
    if isinstance(value, type):
        return value.__module__ == "builtins" or value.__module__.split(".")[0] == "torch"
    return False


def _is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "penstock"
