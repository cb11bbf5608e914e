"""Work that is put off until its first use: imports of a package (PEP 562), and attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


def load_lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    What its `__init__.py` imports under `if TYPE_CHECKING:` is loaded when it is first asked for,
    so type checkers and programs find the same names at the same places:

        if TYPE_CHECKING:
            from penstock.memory._probe import probe

        __getattr__, __dir__ = load_lazily(__name__)

    Args:
        package: Its `__name__`. Its `__all__` is set by the time that a name is asked for.
    """
    module = sys.modules[package]
    homes: dict[str, str] = {}

    def load(name: str) -> Any:
        if not homes:
            homes.update(_typed_imports(module.__file__ or ""))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:  # a package or module below it
            value = import_module(f"{package}.{name}")
        else:
            value = getattr(import_module(home), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted(module.__all__)


def _typed_imports(path: str) -> dict[str, str]:
    """Read from a file the module that each name is imported from under `if TYPE_CHECKING:`."""
    import ast  # not needed to import a package

    homes = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for imported in node.body:
                assert isinstance(imported, ast.ImportFrom), "names are imported with from"
                assert imported.module, "modules are named in full"
                homes |= {alias.name: imported.module for alias in imported.names}
    return homes


class cached_property(Generic[T]):  # as that of functools
    """An attribute that a method computes on first use, without a lock.

    `functools.cached_property` of Python 3.11 has one lock for all objects, which a child that was
    forked while another thread held it would wait for without end. Threads that ask at once may
    compute twice; the attribute is then that of the last one.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> Self | T:
        if instance is None:
            return self
        # Found there from now on: a descriptor without __set__ comes after the object's own.
        value = instance.__dict__[self._name] = self._function(instance)
        return value
