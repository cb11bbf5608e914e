"""Lines of the user's program, noted as it runs, for what is found out only afterwards."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from penstock.graph._user_line import user_line

PYTHONS_RANDOM = "Python's random module"
NUMPYS_RANDOM = "NumPy's global generator (numpy.random)"
_READING = ("getstate", "get_state")


class NotedLines:
    """Places at which a program draws numbers without torch, or assigns attributes of modules.

    Attributes:
        draws: The first line by generator; none for functions that the program has imported by
            name.
        assignments: The first line by identity of the module and name of the attribute.
    """

    def __init__(self) -> None:
        self.draws: dict[str, str] = {}
        self.assignments: dict[tuple[int, str], str] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what this thread does."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(nn.Module, "__setattr__", self._setattr()))
            for source, module, generator in _generators():
                for name, function in list(vars(module).items()):
                    if getattr(function, "__self__", None) is generator and name not in _READING:
                        noting = self._drawing(source, function)
                        stack.enter_context(mock.patch.object(module, name, noting))
            yield

    def _setattr(self) -> Callable[[nn.Module, str, Any], None]:
        thread, assign = threading.get_ident(), nn.Module.__setattr__

        def noting(module: nn.Module, name: str, value: Any) -> None:
            if threading.get_ident() == thread:
                self.assignments.setdefault((id(module), name), user_line())
            assign(module, name, value)

        return noting

    def _drawing(self, source: str, function: Callable[..., Any]) -> Callable[..., Any]:
        thread = threading.get_ident()

        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                self.draws.setdefault(source, user_line())
            return function(*args, **kwargs)

        return noting


def _generators() -> Iterator[tuple[str, Any, object]]:
    """Yield what a message calls them, their module, and the generator behind its functions."""
    yield PYTHONS_RANDOM, random, random._inst  # pyright: ignore[reportAttributeAccessIssue]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield NUMPYS_RANDOM, numpy.random, numpy.random.mtrand._rand
