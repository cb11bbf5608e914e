"""Functions that a command is given as `module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def import_function(source: str) -> Callable[[], Any]:
    """Import a function by the names of its module and itself, from this directory too.

    Args:
        source: As in `"train:make"`.

    Raises:
        ValueError: There is no such module, it is not Python, or it has nothing to call.
    """
    module_name, _, function_name = source.partition(":")
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
