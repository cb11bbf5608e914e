"""Work of pytest for each test that it may do once.

It looks for the `conftest.py` files above a test fifteen times. It starts a thread that writes down
where the test is if it hangs, and ends that thread with the test.
"""

from __future__ import annotations

import faulthandler
import functools
from time import monotonic

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

SECONDS_TO_DUMP = 240.0  # after which a test is thought to hang
SECONDS_TO_START = 20.0  # of these, which may have gone by when a test begins


class QuickTests:
    """A plugin for one run."""

    def __init__(self) -> None:
        self.started = -SECONDS_TO_START

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Look once for what is called for a file: all `conftest.py` have been imported."""
        session.gethookproxy = functools.cache(session.gethookproxy)  # pyright: ignore

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Have the stacks of all threads written if this test takes long."""
        file = item.config.stash.get(fault_handler_stderr_fd_key, None)
        if file is not None and (now := monotonic()) - self.started >= SECONDS_TO_START:
            faulthandler.dump_traceback_later(SECONDS_TO_DUMP, file=file)
            self.started = now

    @pytest.hookimpl(tryfirst=True)
    def pytest_exception_interact(self) -> None:
        """Start again with the next test: pytest stops what has been started."""
        self.started = -SECONDS_TO_START

    def pytest_sessionfinish(self) -> None:
        """Write nothing any more."""
        faulthandler.cancel_dump_traceback_later()
