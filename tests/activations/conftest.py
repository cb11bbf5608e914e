"""The two languages of the hooks' common cases: what one passes, the other must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.activations import _hooks


@pytest.fixture(scope="module", params=["C++", "Python"])
def language(request: pytest.FixtureRequest) -> Iterator[str]:
    """The language of each `Offload` that is made while a test runs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr(_hooks, "load_common_saves", lambda: None)
        elif _hooks.load_common_saves() is None:
            pytest.skip("the hooks cannot be built here")
        yield request.param
