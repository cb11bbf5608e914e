"""Small operators everywhere."""

import pytest


@pytest.fixture(autouse=True)
def _small_operators(one_thread: None) -> None:
    """Every test here asks for one thread."""
