"""Where in the user's own files something happened."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import CodeType

import torch

_LIBRARIES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{sysconfig.get_paths()['stdlib']}{os.sep}",
)


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    site_packages = file.startswith(_LIBRARIES[2]) and "site-packages" not in file
    return not (file.startswith(_LIBRARIES[:2]) or site_packages)


_UNKNOWN = "a line that Python does not know"


def user_line() -> str:
    """Return `file:line, in function: source` of the innermost frame outside of torch and Penstock.

    Code of a model library counts as the user's: that is where the model says what it does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return _described(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return _UNKNOWN


def line_of(error: BaseException) -> str:
    """Return the innermost such line on the way to where an error was raised."""
    found, trace = _UNKNOWN, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            found = _described(code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def is_raised_by_torch(error: BaseException) -> bool:
    """Whether torch has raised it, and not a program that runs on it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not _is_users(trace.tb_frame.f_code.co_filename)


def _described(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    place = f"{code.co_filename}:{number}, in {code.co_name}"
    return f"{place}: {source}" if source else place
