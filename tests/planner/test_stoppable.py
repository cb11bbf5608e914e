"""Long calls in threads: all are made and waited for; an interrupt stops them, and is raised."""

import functools
import signal
import threading
import time

import numpy as np
import pytest

from penstock.planner._native_calls import run_stoppable


def until_stopped(stop: np.ndarray, returned: list[int], number: int) -> None:
    """As C++ does that looks at the flag."""
    give_up = time.monotonic() + 30
    while not stop[0] and time.monotonic() < give_up:
        time.sleep(0.001)
    time.sleep(0.2 * (2 - number))  # the first, which is waited for, longest
    returned.append(number)


def test_all_calls_are_made_and_waited_for():
    stop, returned = np.zeros(1, np.int32), []
    both_run = threading.Barrier(2, timeout=60)

    def call(number: int) -> None:
        both_run.wait()  # at the same time, not one after the other
        returned.append(number)

    run_stoppable([functools.partial(call, number) for number in range(2)], stop, name="test")
    assert sorted(returned) == [0, 1]
    assert stop[0] == 0


@pytest.mark.parametrize("num_interrupts", [1, 3])
def test_an_interrupt_stops_the_calls_and_is_raised_when_they_are_over(num_interrupts: int):
    stop, returned = np.zeros(1, np.int32), []
    calls = [functools.partial(until_stopped, stop, returned, number) for number in range(2)]
    here = threading.get_ident()
    for number in range(num_interrupts):
        threading.Timer(0.1 + 0.1 * number, signal.pthread_kill, [here, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        run_stoppable(calls, stop, name="test")
    assert sorted(returned) == [0, 1]
    assert stop[0] == 1
