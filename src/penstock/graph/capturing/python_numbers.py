"""Python numbers that a step's program can read: constants of a graph, compared between steps.

They are attributes of modules and of other objects, global variables, variables of enclosing
functions, and items of the lists and dictionaries among these. Functions are not run to find them:
the search follows closures, and the names that code reads.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from penstock.compat.user_line import is_user_file

_DEPTH = 5  # steps from the program to a variable
_MAX_ITEMS = 256  # of a container that is looked into; those of vocabularies are data
_MAX_VISITS = 50_000
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = (list, tuple, dict, set, collections.deque)
# Of an empty cell, and of an iterator of what has changed.
_GONE = (AttributeError, IndexError, KeyError, ValueError, RuntimeError)
_LIBRARIES = ("torch", "numpy", "penstock")
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
# Of a module: its mode is a guard, and its modules are visited by themselves.
_NO_ATTRIBUTES = vars(nn.Module()).keys() - _HOOKS


class Number(NamedTuple):
    """A number or a string in a variable, as it was when it was found.

    Attributes:
        name: The variable, as a program would write it.
        place: The function or object that has it.
        read: Returns what the variable holds now.
        value: What it held then.
        is_public: Whether it is an attribute of a module without an underscore.
    """

    name: str
    place: str
    read: Callable[[], Any]
    value: Any
    is_public: bool = False

    def renew(self) -> Number:
        """Return it with what the variable holds now; None where there is no variable any more."""
        try:
            return self._replace(value=self.read())
        except _GONE:
            return self._replace(read=lambda: None, value=None)

    def has_changed(self) -> bool:
        """Return whether the variable holds something else now."""
        try:
            now = self.read()
        except _GONE:
            return True
        if now is self.value:
            return False
        return type(now) is not type(self.value) or repr(now) != repr(self.value)


def find_numbers(roots: Mapping[str, Any]) -> list[Number]:
    """Return the numbers that modules and functions can read, each once.

    Example:
        >>> scale = 2.0
        >>> [number.name for number in find_numbers({"loss": lambda y, batch: scale * y})]
        []

    Args:
        roots: Modules, functions and other objects that can be called, by their names in messages.
    """
    search = _NumberSearch()
    for name, root in roots.items():
        search.visit(root, name, name, _DEPTH)
    return search.numbers


class _NumberSearch:
    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self._seen: dict[int, Any] = {}  # by identity, and alive, so that no other one has it
        self._found: set[tuple[int, Any]] = set()

    def visit(self, value: Any, name: str, place: str, depth: int) -> None:
        """Look for numbers in a value that is none itself."""
        if not depth or id(value) in self._seen or len(self._seen) > _MAX_VISITS:
            return
        if isinstance(value, type | types.ModuleType):
            return  # of these only what code names
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, types.FunctionType):
            if value.__module__ == "__main__" or is_user_file(value.__code__.co_filename):
                self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, name, place, depth)
            self.visit(value.__func__, name, place, depth)
        elif isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self.visit(each, name, place, depth)
        elif isinstance(value, itertools.count):
            self._add(value, None, name, place, functools.partial(repr, value))
        elif hasattr(type(value), "__length_hint__"):  # an iterator of a list, a range
            self._add(value, None, name, place, functools.partial(operator.length_hint, value))
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, name, place, depth)
        elif isinstance(value, _NAMESPACES) or _is_of_user(type(value)):
            self._visit_object(value, name, depth)

    def _visit_module(self, root: nn.Module, name: str) -> None:
        for path, module in root.named_modules(prefix=name):
            self._seen[id(module)] = module
            attributes = vars(module)
            for key, each in list(attributes.items()):
                if key not in _NO_ATTRIBUTES:
                    read = functools.partial(dict.__getitem__, attributes, key)
                    public = not key.startswith("_")
                    self._take(attributes, key, read, f"{path}.{key}", path, _DEPTH, public)
            self._visit_class(type(module), _DEPTH)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        place = type(value).__qualname__
        attributes = getattr(value, "__dict__", {})
        for key in list(attributes):
            read = functools.partial(dict.__getitem__, attributes, key)
            self._take(attributes, key, read, f"{name}.{key}", place, depth)
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    read = functools.partial(getattr, value, key)
                    self._take(value, key, read, f"{name}.{key}", place, depth)
        self._visit_class(type(value), depth)

    def _visit_class(self, kind: type, depth: int) -> None:
        """Look into the functions of a class of the user's, and of those that it inherits from."""
        for base in kind.__mro__:
            if id(base) not in self._seen and _is_of_user(base):
                self._seen[id(base)] = base
                for each in list(vars(base).values()):
                    if isinstance(each, types.FunctionType):
                        self.visit(each, each.__qualname__, each.__qualname__, depth - 1)

    def _visit_container(self, value: Any, name: str, place: str, depth: int) -> None:
        if not isinstance(value, tuple):
            self._add(value, None, f"len({name})", place, functools.partial(len, value))
        if len(value) > _MAX_ITEMS or isinstance(value, set):
            return
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, _ in list(pairs):
            read = functools.partial(type(value).__getitem__, value, key)
            self._take(value, key, read, f"{name}[{key!r}]", place, depth)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        code, place = function.__code__, function.__qualname__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents")
            self._take(cell, None, read, name, place, depth)
        for each in (function.__defaults__, function.__kwdefaults__):
            if each:
                self.visit(each, f"defaults of {place}", place, depth)
        names = set(_names_in(code))
        for name in names & function.__globals__.keys():
            holder = function.__globals__
            value = holder[name]
            if isinstance(value, type | types.ModuleType):
                self._visit_namespace(value, names, name, depth)
            else:
                read = functools.partial(dict.__getitem__, holder, name)
                self._take(holder, name, read, name, place, depth)

    def _visit_namespace(self, value: Any, names: set[str], name: str, depth: int) -> None:
        """Look at the attributes of a class or a module that code names."""
        module = value if isinstance(value, types.ModuleType) else _module_of(value)
        if not _is_module_of_user(module):
            return
        for key in names & vars(value).keys():
            if not isinstance(vars(value)[key], type | types.ModuleType):
                read = functools.partial(getattr, value, key)
                self._take(value, key, read, f"{name}.{key}", name, depth)

    def _take(
        self,
        holder: Any,
        key: Any,
        read: Callable[[], Any],
        name: str,
        place: str,
        depth: int,
        is_public: bool = False,
    ) -> None:
        """Add the number that a variable holds, or look into what else it holds."""
        try:
            value = read()
        except Exception:  # an empty cell, a property that raises
            return
        if isinstance(value, bool | int | float | str):
            self._add(holder, key, name, place, read, is_public)
        else:
            self.visit(value, name, place, depth - 1)

    def _add(
        self,
        holder: Any,
        key: Any,
        name: str,
        place: str,
        read: Callable[[], Any],
        is_public: bool = False,
    ) -> None:
        if (id(holder), key) not in self._found:
            self._found.add((id(holder), key))  # the number's `read` keeps the holder alive
            self.numbers.append(Number(name, place, read, read(), is_public))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code reads, with the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_user(kind: type) -> bool:
    is_library = kind.__module__.partition(".")[0] in _LIBRARIES
    return not is_library and _is_module_of_user(_module_of(kind))


def _is_module_of_user(module: types.ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":  # a notebook's has no file
        return module is not None
    return is_user_file(getattr(module, "__file__", None) or "<")


def _module_of(kind: type) -> types.ModuleType | None:
    return sys.modules.get(kind.__module__)
