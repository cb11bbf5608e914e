"""Models and data of the examples, for the benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from _rows import REPOSITORY


def load_example(name: str) -> Any:
    """The module of `examples/NAME.py`."""
    folder = str(REPOSITORY / "examples")
    spec = importlib.util.spec_from_file_location(f"{name}_example", f"{folder}/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)  # as for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module
