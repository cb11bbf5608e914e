"""Where in the user's own files something happened."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from pathlib import Path

import torch

import penstock

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(penstock.__file__).parent),
    sysconfig.get_paths()["stdlib"],
)


@functools.cache
def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    site_packages = file.startswith(_LIBRARIES[2]) and "site-packages" not in file
    return not (file.startswith(_LIBRARIES[:2]) or site_packages)


def user_line() -> str:
    """Return `file:line, in function: source` of the innermost frame outside of torch and Penstock.

    Code of a model library counts as the user's: that is where the model says what it does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            source = linecache.getline(file, frame.f_lineno).strip()
            place = f"{file}:{frame.f_lineno}, in {frame.f_code.co_name}"
            return f"{place}: {source}" if source else place
        frame = frame.f_back
    return "a line that Python does not know"
