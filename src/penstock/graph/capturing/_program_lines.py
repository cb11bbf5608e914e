"""Lines of the user's program in errors, noted as it runs where faults show only afterwards."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from penstock.compat.user_line import UserLine, is_user_file, user_line
from penstock.errors import CaptureError

SYSTEM = "the operating system's random numbers (random.SystemRandom, secrets, os.urandom)"
_READING = ("getstate", "get_state")


def error_here(message: str) -> CaptureError:
    """Return an error whose message begins with the user's line that is running."""
    return CaptureError(f"{describe_line(user_line())}: {message}")


def describe_line(line: UserLine | None) -> str:
    """Return a line as messages show it."""
    return "a line that Python does not know" if line is None else str(line)


def validation_remedy() -> str:
    """Name the alternative to the checks of torch's distributions, where one of them asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith("torch.distributions."):
            return (
                "; distributions look at their arguments unless they are made with "
                "validate_args=False (of all: Distribution.set_default_validate_args(False))"
            )
        frame = frame.f_back
    return ""


class ProgramLines:
    """Lines at which a program draws numbers without torch, or assigns attributes of modules.

    Attributes:
        draws: The first line by generator; none for functions that the program has imported by
            name.
        assignments: The first line by identity of the module and name of the attribute.
    """

    def __init__(self) -> None:
        self.draws: dict[str, str] = {}
        self.assignments: dict[tuple[int, str], str] = {}

    @contextlib.contextmanager
    def note(self) -> Iterator[None]:
        """Note the lines that this thread runs in the block."""
        assign = nn.Module.__setattr__
        noting = _note_first_call(
            assign, lambda module, name, _: (id(module), name), self.assignments
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_replace(nn.Module, "__setattr__", noting))
            for source, module, generator in default_generators():
                for name, function in list(vars(module).items()):
                    if getattr(function, "__self__", None) is generator and name not in _READING:
                        key = functools.partial(lambda source, *_, **__: source, source)
                        noting = _note_first_call(function, key, self.draws)
                        stack.enter_context(_replace(module, name, noting))
            for module, name in ((os, "urandom"), (random, "_urandom")):
                noting = _note_first_call(os.urandom, _name_system, self.draws)
                stack.enter_context(_replace(module, name, noting))
            noting = _note_first_call(random.Random.seed, _name_seed, self.draws)
            stack.enter_context(_replace(random.Random, "seed", noting))
            yield


@contextlib.contextmanager
def _replace(holder: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class for the block, as `mock.patch` does, which takes ten
    times as long.
    """
    before = vars(holder)[name]
    setattr(holder, name, function)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _note_first_call(
    function: Callable[..., Any], key: Callable[..., Any], lines: dict[Any, str]
) -> Callable[..., Any]:
    """Return a function that also notes the line of its first call in this thread, by key."""
    thread = threading.get_ident()

    def noting(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            place = key(*args, **kwargs)
            if place is not None and place not in lines:
                lines[place] = describe_line(user_line())
        return function(*args, **kwargs)

    return noting


def _name_system(*_: object) -> str | None:
    """Return the name of the system's random numbers; None for those of an id."""
    return None if sys._getframe(2).f_globals.get("__name__") == "uuid" else SYSTEM


def _name_seed(generator: object, seed: object = None, *_: object, **__: object) -> str | None:
    """Return the same for a generator that the program makes without a seed, else None."""
    frame = sys._getframe(3)  # below the generator's __init__
    return SYSTEM if seed is None and is_user_file(frame.f_code.co_filename) else None


def default_generators() -> Iterator[tuple[str, Any, object]]:
    """Yield a name for messages, a module, and the generator behind the module's functions."""
    yield "Python's random module", random, random._inst  # pyright: ignore[reportAttributeAccessIssue]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "NumPy's global generator (numpy.random)", numpy.random, numpy.random.mtrand._rand
