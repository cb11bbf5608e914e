"""Free values: numbers and all else that a function reads besides its arguments.

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
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

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
