"""Lines of the user's program on the stack and in tracebacks, for messages.

A file is the user's unless it belongs to torch, Python or Penstock. Code of a model library counts
as the user's: that is where the model says what it does.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path

import torch

PENSTOCK = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{sysconfig.get_paths()['stdlib']}{os.sep}"


@dataclasses.dataclass(frozen=True, slots=True)
class UserLine:
    """A line of source."""

    file: str
    number: int
    function: str
    """Name of the function that it is a part of."""

    @property
    def text(self) -> str:
        """The line itself; empty where the source is not there."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        place = f"{self.file}:{self.number}, in {self.function}"
        return f"{place}: {self.text}" if self.text else place


@functools.lru_cache(4096)
def is_user_file(file: str, programs: str = "") -> bool:
    """Return whether code of a file is the user's.

    Args:
        file: Its name, as code objects have it.
        programs: Beginning of the names of Penstock's own files that are like the user's, as the
            programs of its layers are.
    """
    if programs and file.startswith(programs):
        return True
    if file.startswith(("<", _TORCH, PENSTOCK)):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


def user_line(programs: str = "") -> UserLine | None:
    """Return the innermost line on the stack that is of a user's file; None where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename, programs):
            return UserLine(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def user_line_of(error: BaseException, programs: str = "") -> UserLine | None:
    """Return the innermost such line between a handler of an error and where it was raised."""
    lines = [
        UserLine(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if is_user_file(frame.f_code.co_filename, programs)
    ]
    return lines[-1] if lines else None


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether an error was raised by the user's code, and not by torch, Python or Penstock.

    Args:
        error: An error that was raised.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or is_user_file(frames[-1].f_code.co_filename)
