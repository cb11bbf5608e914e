"""Fixture of the tests of codegen: a cache of their own."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, which the library creates itself."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(directory))
    return directory
