"""Errors of traced functions: they end with the user's line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.compat.user_line import UserLine, is_user_file, user_line, user_line_of

PROGRAMS = f"{Path(__file__).parents[1] / 'layers'}{os.sep}"
"""Penstock's own programs; their lines are like the user's."""


class TraceError(TypeError):
    """A compiled function does what cannot be compiled; the message ends with its line.

    Args:
        message: What is wrong and what to do instead.
        line: The line, if it is not the one that runs.
    """

    def __init__(self, message: str, line: UserLine | None = None) -> None:
        self.line = line or user_line(PROGRAMS)
        super().__init__(message if self.line is None else f"{message}\n{self.line}")


@contextmanager
def add_user_line(function: Callable[..., Any]) -> Iterator[None]:
    """Add the user's line to an error that is raised while `function` is traced."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        line, code = user_line_of(error, PROGRAMS), getattr(function, "__code__", None)
        if line is None and code is not None and is_user_file(code.co_filename, PROGRAMS):
            # The function's result is wrong, not a line of it.
            line = UserLine(code.co_filename, code.co_firstlineno, code.co_name)
        if line is None:
            raise
        if type(error) is TypeError:
            raise TraceError(str(error), line) from error
        error.add_note(str(line))
        raise


def describe_user_line() -> str:
    """Return the file's name, the number and the text of the user's line, for reports."""
    line = user_line(PROGRAMS)
    return "" if line is None else f"{os.path.basename(line.file)}:{line.number}: {line.text}"
