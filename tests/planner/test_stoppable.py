"""Long calls in threads: all are made and waited for; an interrupt stops them, and is raised."""

import functools
import threading
import time

import numpy as np
import pytest

from interrupts import interrupts
from penstock.compat.threads import Thread
from penstock.planner import _native_calls
from penstock.planner._native_calls import run_stoppable


def test_all_calls_are_made_and_waited_for():
    stop, returned = np.zeros(1, np.int32), []
    both_run = threading.Barrier(2, timeout=60)

    def call(number: int) -> None:
        both_run.wait()  # at the same time, not one after the other
        returned.append(number)

    run_stoppable([functools.partial(call, number) for number in range(2)], stop, name="test")
    assert sorted(returned) == [0, 1]
    assert stop[0] == 0


def test_an_error_of_a_call_stops_the_others_and_is_raised():
    stop, returned = np.zeros(1, np.int32), []

    def fail() -> None:
        raise OverflowError("too large")

    def call() -> None:
        while not stop[0]:
            time.sleep(0.001)
        returned.append(1)

    with pytest.raises(OverflowError, match="too large"):
        run_stoppable([fail, call], stop, name="e")
    assert returned == [1]


@pytest.mark.parametrize("num_interrupts", [1, 3])
def test_an_interrupt_stops_the_calls_and_is_raised_when_they_are_over(num_interrupts, monkeypatch):
    """The first call, which is waited for, interrupts the wait, and what waits for it then."""
    stop, returned, waits = np.zeros(1, np.int32), [], threading.Semaphore(0)

    class WaitedFor(Thread):
        def join(self, timeout: float | None = None) -> None:
            waits.release()
            super().join(timeout)

    def call(number: int) -> None:
        for _ in range(num_interrupts if number == 0 else 0):
            assert waits.acquire(timeout=60)
            interrupt()
        while not stop[0] or (number == 0 and not returned):  # the first one takes longest
            time.sleep(0.001)
        returned.append(number)

    monkeypatch.setattr(_native_calls, "Thread", WaitedFor)
    calls = [functools.partial(call, number) for number in range(2)]
    with interrupts() as interrupt, pytest.raises(KeyboardInterrupt):
        run_stoppable(calls, stop, name="test")
    assert returned == [1, 0]
    assert stop[0] == 1


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_while_a_thread_is_started_stops_the_calls(moment, interrupted, monkeypatch):
    """No call goes on, or begins, once the interrupt is raised: it uses the caller's memory."""
    stop, begun, returned = np.zeros(1, np.int32), [], []

    class Interrupted(Thread):
        def start(self) -> None:
            if self.name == f"penstock-test-{interrupted}":
                if moment == "after":
                    super().start()
                raise KeyboardInterrupt
            super().start()

    def call(number: int) -> None:
        begun.append(number)
        while not stop[0]:
            time.sleep(0.001)
        time.sleep(0.02)
        returned.append(number)

    monkeypatch.setattr(_native_calls, "Thread", Interrupted)
    calls = [functools.partial(call, number) for number in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run_stoppable(calls, stop, name="test")
    assert stop[0] == 1 and sorted(begun) == sorted(returned)
    time.sleep(0.01)
    assert sorted(begun) == sorted(returned) and len(begun) <= interrupted + (moment == "after")
