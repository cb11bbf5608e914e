"""Functions that a command is given as `module:function`."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

_INSTALLED = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)


@contextmanager
def frames_of_user() -> Iterator[None]:
    """End the process with status 1 after an error of the user's code, shown from its line on.

    Errors of Penstock, and those without a line of the user's, pass.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_INSTALLED):
            shown = shown.tb_next
        if shown is None:
            raise
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        sys.exit(1)


def import_function(source: str) -> Callable[[], Any]:
    """Import a function by the names of its module and itself, from this directory too.

    Args:
        source: As in `"train:make"`.

    Raises:
        ValueError: There is no such module, it is not Python, or it has nothing to call.
    """
    module_name, _, function_name = source.partition(":")
    if not function_name:
        raise ValueError(f"{source!r} names no function: give module:function, as in train:make")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        if not callable(function):
            raise AttributeError(f"{function_name} is {function!r}")
    except (ImportError, SyntaxError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{source!r} cannot be imported ({error}): give module:function, as in train:make, "
            "from the directory that the module is in"
        ) from error
    finally:
        sys.path.remove("")
    return function
