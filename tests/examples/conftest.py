"""The programs of `examples/` as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The program that the file of tests has its name from."""
    yield from load(EXAMPLES / f"{request.path.stem.removeprefix('test_')}.py")


@pytest.fixture
def load_example() -> Iterator[Any]:
    """Loads programs by their names below `examples/`."""
    loaded = []

    def load_one(name: str) -> Any:
        loaded.append(load(EXAMPLES / f"{name}.py"))
        return next(loaded[-1])

    yield load_one
    for each in reversed(loaded):
        next(each, None)


def load(path: Path) -> Iterator[Any]:
    sys.path.insert(0, str(path.parent))  # as for a script: it has `_shared`
    spec = importlib.util.spec_from_file_location(f"{path.stem}_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for theirs
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path.remove(str(path.parent))
