"""What is done once for many tests is there for each."""

import faulthandler
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import quick_tests


def test_stacks_are_to_be_written_four_minutes_after_a_test_begins_at_the_latest(monkeypatch):
    seconds, started = [0.0], []
    monkeypatch.setattr(quick_tests, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda *args, **_: started.append((seconds[0], *args))
    )
    stash = pytest.Stash()
    stash[fault_handler_stderr_fd_key] = 2
    item: Any = SimpleNamespace(config=SimpleNamespace(stash=stash))
    tests = quick_tests.QuickTests()
    for now in (0.0, 5.0, 19.0, 20.0, 100.0):
        seconds[0] = now
        tests.pytest_runtest_protocol(item)
    tests.pytest_exception_interact()
    seconds[0] = 101.0
    tests.pytest_runtest_protocol(item)
    assert started == [(now, 240.0) for now in (0.0, 20.0, 100.0, 101.0)]


def test_hooks_of_a_file_are_found_once(request):
    assert request.node.ihook is request.session.gethookproxy(request.path)
    for path in (request.path, request.config.rootpath / "tests" / "kv" / "test_cache.py"):
        again = type(request.session).gethookproxy(request.session, path)
        kept = request.session.gethookproxy(path)
        assert (
            kept.pytest_runtest_setup.get_hookimpls() == again.pytest_runtest_setup.get_hookimpls()
        )
