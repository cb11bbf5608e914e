"""An extent file on a real disk."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.memory import ExtentFile


@pytest.fixture
def file(store: Path) -> Iterator[ExtentFile]:
    """Open while a test runs."""
    with contextlib.closing(ExtentFile(store)) as file:
        yield file
