"""Generated C++ is compiled without optimization here, where only its results matter."""

from __future__ import annotations

import pytest

from penstock.rgnn.backends.cpp import _backend


@pytest.fixture(autouse=True)
def _quick_compiler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "optimized" not in request.fixturenames:
        monkeypatch.setattr(_backend, "FLAGS", ("-O0", "-fopenmp-simd"))


@pytest.fixture
def optimized() -> None:
    """Asked for by a test of the code that users run."""
