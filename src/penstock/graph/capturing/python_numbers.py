"""Python numbers that a step's program can read: constants of a graph, compared between steps.

They are attributes of modules, of other objects and of classes, global variables, variables of
enclosing functions, and items of the lists and dictionaries among these. Nothing of the program is
run to find them: the search follows closures and the names that code reads, and reads instance
dictionaries, slots and the items of built-in containers past what classes make of them.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import decimal
import dis
import enum
import fractions
import functools
import itertools
import operator
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from penstock.compat.user_line import is_user_file

_DEPTH = 8  # steps from the program, or from a module, to a variable
_MAX_ITEMS = 256  # of a container that is looked into; those of vocabularies are data
_MAX_NUMBERS = 4096  # beside those of modules: more are data
_MAX_VISITS = 50_000
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_ATOMS += (fractions.Fraction, decimal.Decimal)
_KEYS = (bool, int, float, str)  # that a name shows
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = ("torch", "numpy", "penstock")
_GONE = object()
_MAX_CODE = 2**14  # of which names are kept
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_GLOBAL_READS = re.compile(
    b"[%b]" % re.escape(bytes([_LOAD_GLOBAL, dis.opmap["LOAD_NAME"]])), re.DOTALL
)
_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
# Of a module: its mode is a guard, and its modules are visited by themselves.
_NO_ATTRIBUTES = vars(nn.Module()).keys() - _HOOKS


class Identity(int):
    """The identity of an object that is no number."""


class Number(NamedTuple):
    """A number or a string in a variable, or the identity of what else it held, when it was found.

    Attributes:
        name: The variable, as a program would write it.
        place: The function or object that has it.
        read: Returns what the variable holds now.
        value: What it held then.
        holder: Identity of what has the variable: changes of one holder's are counted together.
        is_public: Whether it is an attribute of a module without an underscore.
    """

    name: str
    place: str
    read: Callable[[], Any]
    value: Any
    holder: int
    is_public: bool = False

    @property
    def is_identity(self) -> bool:
        """True if the variable held no number."""
        return type(self.value) is Identity

    def has_changed(self) -> bool:
        """Return whether the variable holds something else now."""
        held, value = self._read(), self.value
        if held is value or (type(value) is Identity and id(held) == value):  # as most times
            return False
        now = _to_value(held)
        if type(now) is not type(value):
            return True
        return not (now == value or repr(now) == repr(value))  # a NaN is unlike itself

    def renew(self) -> Number:
        """Return it with what the variable holds now."""
        return self._replace(value=_to_value(self._read()))

    def _read(self) -> Any:
        try:
            return self.read()
        except Exception:  # an empty cell, an iterator of what has changed, a deleted attribute
            return _GONE


def find_numbers(roots: Mapping[str, Any]) -> list[Number]:
    """Return the numbers that modules and functions can read, each once.

    Example:
        >>> def loss(y, batch, *, state={"scale": 2.0}):
        ...     return state["scale"] * y
        >>> [each.name for each in find_numbers({"loss": loss}) if not each.is_identity]
        ["len(loss's defaults['state'])", "loss's defaults['state']['scale']"]

    Args:
        roots: Modules, functions and other objects that can be called, by their names in messages.
    """
    search = _NumberSearch()
    for name, root in roots.items():
        search.add(root, name, name, _DEPTH)
    search.run()
    return search.numbers


def find_again(numbers: list[Number], roots: Mapping[str, Any]) -> list[Number]:
    """Return what `find_numbers` finds now; `numbers`, which it found before, if none has changed.

    The search finds the same where it reads the same, and takes 30 times as long as looking.
    """
    return find_numbers(roots) if any(each.has_changed() for each in numbers) else numbers


class _NumberSearch:
    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self._num_others = 0  # beside those of modules
        self._seen: dict[int, Any] = {}  # by identity, and alive, so that no other one has it
        self._classes: set[type] = set()
        self._visited_classes: set[type] = set()  # with their bases
        self._is_of_user = functools.cache(_is_of_user)
        self._found: set[tuple[int, Any]] = set()
        self._queue: collections.deque[tuple[Any, str, str, int]] = collections.deque()

    def add(self, value: Any, name: str, place: str, depth: int) -> None:
        """Have a value looked into that is no number itself."""
        has_room = self._num_others < _MAX_NUMBERS or issubclass(type(value), nn.Module)
        if depth and has_room and id(value) not in self._seen and len(self._seen) < _MAX_VISITS:
            self._seen[id(value)] = value
            self._queue.append((value, name, place, depth))

    def run(self) -> None:
        """Look into all values that were added, and into what they hold."""
        while self._queue:
            self._visit(*self._queue.popleft())

    def _visit(self, value: Any, name: str, place: str, depth: int) -> None:
        if self._num_others >= _MAX_NUMBERS and not issubclass(type(value), nn.Module):
            return
        kind = type(value)  # not `__class__`, which may be anything
        if kind is types.FunctionType:  # as most are; no class is derived from it
            if value.__module__ == "__main__" or is_user_file(value.__code__.co_filename):
                self._visit_function(value, depth)
        elif issubclass(kind, nn.Module):
            self._visit_module(value, name)
        elif issubclass(kind, type):
            self._visit_class(value, name, depth)
        elif issubclass(kind, types.MethodType):
            self.add(value.__self__, name, place, depth)
            self.add(value.__func__, name, place, depth)
        elif issubclass(kind, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self.add(each, name, place, depth)
        elif kind is itertools.count:
            self._take(value, None, functools.partial(repr, value), name, place, 0)
        elif kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):  # an iterator
            self._take(value, None, functools.partial(operator.length_hint, value), name, place, 0)
        elif issubclass(kind, np.ndarray):
            if value.dtype != object and value.size <= _MAX_ITEMS:
                self._take(
                    value, None, functools.partial(np.ndarray.tobytes, value), name, place, 0
                )
        else:
            self._visit_container(value, name, place, depth)
            if issubclass(kind, _NAMESPACES) or self._is_of_user(kind):
                self._visit_object(value, name, depth)

    def _visit_module(self, root: nn.Module, name: str) -> None:
        for path, module in nn.Module.named_modules(root, prefix=name):
            self._seen[id(module)] = module
            attributes = module.__dict__
            read = functools.partial(dict.__len__, attributes)
            self._take(attributes, len, read, f"len(vars({path}))", path, 0, of_module=True)
            for key, value in list(attributes.items()):
                if key in _HOOKS:
                    read = functools.partial(dict.__len__, value)
                    self._take(value, len, read, f"len({path}.{key})", path, 0, of_module=True)
                    self.add(value, f"{path}.{key}", path, _DEPTH)
                elif key not in _NO_ATTRIBUTES:
                    read = functools.partial(dict.get, attributes, key, _GONE)
                    self._take(attributes, key, read, f"{path}.{key}", path, _DEPTH, of_module=True)
            self._visit_class(type(module), path, _DEPTH, of_module=True)

    def _visit_object(self, value: Any, name: str, depth: int) -> None:
        place = type(value).__qualname__
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if type(attributes) is dict:
            length = functools.partial(dict.__len__, attributes)
            self._take(attributes, len, length, f"len(vars({name}))", place, 0)
            for key in list(attributes):
                read = functools.partial(dict.get, attributes, key, _GONE)
                self._take(attributes, key, read, f"{name}.{key}", place, depth)
        for base in type(value).__mro__:
            for key, member in list(vars(base).items()):
                if type(member) is types.MemberDescriptorType and self._is_of_user(base):  # a slot
                    read = functools.partial(member.__get__, value)
                    self._take(value, (base, key), read, f"{name}.{key}", place, depth)
        self._visit_class(type(value), name, depth)

    def _visit_class(self, kind: type, name: str, depth: int, *, of_module: bool = False) -> None:
        """Look at the numbers and functions of a class of the user's, and of its bases."""
        if kind in self._visited_classes:
            return
        self._visited_classes.add(kind)
        for base in kind.__mro__:
            is_constant = issubclass(base, enum.Enum)
            if base in self._classes or is_constant or not self._is_of_user(base):
                continue
            self._classes.add(base)
            length, place = functools.partial(len, vars(base)), base.__qualname__
            self._take(base, len, length, f"len(vars({place}))", place, 0, of_module=of_module)
            for key, each in list(vars(base).items()):
                function = each.fget if type(each) is property else getattr(each, "__func__", each)
                if isinstance(function, types.FunctionType):
                    self.add(function, f"{base.__qualname__}.{key}", name, depth - 1)
                elif not key.startswith("__") and issubclass(type(each), _ATOMS):
                    read = functools.partial(operator.getitem, vars(base), key)
                    self._take(base, key, read, f"{place}.{key}", place, 0, of_module=of_module)

    def _visit_container(self, value: Any, name: str, place: str, depth: int) -> None:
        """Look at the items of a built-in container, past what a class makes of it."""
        kind = type(value)
        base = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
        if base is None:
            return
        length = base.__len__(value)
        if base is not tuple:
            self._take(value, len, functools.partial(base.__len__, value), f"len({name})", place, 0)
        if length > _MAX_ITEMS or issubclass(base, set | frozenset):
            return
        for key in list(dict.keys(value)) if base is dict else range(length):
            if base is dict:
                read = functools.partial(dict.get, value, key, _GONE)
            else:
                read = functools.partial(base.__getitem__, value, key)  # pyright: ignore
            shown = repr(key) if type(key) in _KEYS else type(key).__name__
            place_in = id(key) if base is dict else key
            self._take(value, place_in, read, f"{name}[{shown}]", place, depth)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        code, place = function.__code__, function.__qualname__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents")
            self._take(cell, None, read, name, place, depth)
        for each in (function.__defaults__, function.__kwdefaults__):
            if each:
                self.add(each, f"{place}'s defaults", place, depth)
        (names, global_names), holder = _names_in(code), function.__globals__
        for name in global_names:
            if name not in holder and hasattr(builtins, name):
                continue
            value = holder.get(name, _GONE)  # it may come into being in a call
            if isinstance(value, type | types.ModuleType):
                self._visit_namespace(value, names, name, depth)
            else:
                read = functools.partial(dict.get, holder, name, _GONE)
                self._take(holder, name, read, name, place, depth)

    def _visit_namespace(self, value: Any, names: Set[str], name: str, depth: int) -> None:
        """Look into a class that code names, and at the attributes of a module that it names."""
        if isinstance(value, type):
            self._visit_class(value, name, depth)
            return
        if not _is_module_of_user(value):
            return
        for key in names & vars(value).keys():
            each = vars(value)[key]
            if isinstance(each, type):
                self._visit_class(each, f"{name}.{key}", depth)
            elif isinstance(each, types.ModuleType):
                if id(each) not in self._seen:
                    self._seen[id(each)] = each
                    self._visit_namespace(each, names, f"{name}.{key}", depth)
            else:
                read = functools.partial(dict.get, vars(value), key, _GONE)
                self._take(value, key, read, f"{name}.{key}", name, depth)

    def _take(
        self,
        holder: Any,
        key: Any,
        read: Callable[[], Any],
        name: str,
        place: str,
        depth: int,
        *,
        of_module: bool = False,
    ) -> None:
        """Add what a variable holds, and look into it if it is no number."""
        try:
            held = read()
            value = _to_value(held)
            if (id(holder), key) in self._found:
                return
            self._found.add((id(holder), key))
        except Exception:  # an empty cell, a key whose hash raises
            return
        if of_module or self._num_others < _MAX_NUMBERS:
            self._num_others += not of_module
            is_public = of_module and isinstance(key, str) and key[0] != "_"
            self.numbers.append(Number(name, place, read, value, id(holder), is_public))
        if type(value) is Identity:
            self.add(held, name, place, depth - 1)


def _to_value(held: Any) -> Any:
    return held if issubclass(type(held), _ATOMS) else Identity(id(held))


_names_of_code: dict[int, tuple[types.CodeType, frozenset[str], tuple[str, ...]]] = {}
"""Names in code by its identity: hashing code takes longer than looking for its names. Code is kept
alive, so that no other has its identity."""


def _names_in(code: types.CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that code reads, and those of global variables among these, with the
    functions within it.
    """
    known = _names_of_code.get(id(code))
    if known is None:
        names, global_names = set(code.co_names), dict.fromkeys(_globals_in(code))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                inner_names, inner_globals = _names_in(constant)
                names |= inner_names
                global_names |= dict.fromkeys(inner_globals)
        if len(_names_of_code) >= _MAX_CODE:
            _names_of_code.clear()
        known = _names_of_code[id(code)] = code, frozenset(names), tuple(global_names)
    return known[1:]


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code reads as global variables, as `dis` shows them."""
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    for match in _GLOBAL_READS.finditer(operations):
        place = match.start()
        argument, shift = arguments[place], 8
        while place and operations[place - 1] == dis.EXTENDED_ARG:
            place -= 1
            argument |= arguments[place] << shift
            shift += 8
        is_global = operations[match.start()] == _LOAD_GLOBAL
        yield code.co_names[argument >> 1 if is_global else argument]


def _is_of_user(kind: type) -> bool:
    name = kind.__module__
    if not isinstance(name, str) or name.partition(".")[0] in _LIBRARIES:
        return False
    return _is_module_of_user(sys.modules.get(name))


def _is_module_of_user(module: types.ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":  # a notebook's has no file
        return module is not None
    return is_user_file(getattr(module, "__file__", None) or "<")
