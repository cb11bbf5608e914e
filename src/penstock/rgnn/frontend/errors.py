"""Which line of the user's a traced operation comes from, for errors and for plans."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_HERE = os.path.dirname(__file__)
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_STANDARD_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line of source."""

    file: str
    number: int
    text: str

    @property
    def short(self) -> str:
        """The file's name, the number and the text, for plans."""
        return f"{Path(self.file).name}:{self.number}: {self.text}"

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.number}\n    {self.text}'


def users_line() -> Line:
    """Return the innermost line on the stack that is the user's, as programs of layers are."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return _line(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def at_users_line(function: Callable[..., Any]) -> Iterator[None]:
    """Let an error that is raised while `function` is traced say at which line of the user's."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        places = [(frame.f_code.co_filename, number) for frame, number in frames]
        code = getattr(function, "__code__", None)
        if code is not None:  # what it returns may be wrong, and not what it does
            places.insert(0, (code.co_filename, code.co_firstlineno))
        places = [place for place in places if _is_users(place[0])]
        if not places:
            raise
        line = _line(*places[-1])
        if type(error) is TypeError:
            raise TraceError(str(error), line) from error
        error.add_note(str(line))
        raise


def _line(file: str, number: int) -> Line:
    return Line(file, number, linecache.getline(file, number).strip())


@functools.lru_cache(1024)
def _is_users(file: str) -> bool:
    if os.path.dirname(file) == _HERE or file.startswith((_TORCH, "<frozen ")):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


class TraceError(TypeError):
    """A compiled function does what cannot be compiled; the message ends with its line.

    Args:
        message: What is wrong and what to do instead.
        line: The line, if it is not the one that runs.
    """

    def __init__(self, message: str, line: Line | None = None) -> None:
        self.line = users_line() if line is None else line
        super().__init__(f"{message}\n{self.line}")
