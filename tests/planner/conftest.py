"""Clock of searches: how much they find is to depend on the planner, and not on a busy machine."""

import time

import pytest


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time are those of this process's processor time, which other processes do not take.

    For tests whose result depends on how much of a search there is time for.
    """
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, time.process_time)
