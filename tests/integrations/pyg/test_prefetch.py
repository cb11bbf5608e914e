"""One job ahead: in order, errors where the result would be, no thread left behind."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from penstock.integrations.pyg import run_ahead


def loader_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("penstock-loader")]


def wait_for_no_thread() -> None:
    deadline = time.monotonic() + 60
    while loader_threads():
        assert time.monotonic() < deadline, "a thread of the loader lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_results_come_in_order_and_the_thread_ends(ahead):
    waits = []
    jobs = ((lambda n=n: n * n) for n in range(20))
    found = run_ahead(jobs, ahead=ahead, count_wait=waits.append)
    assert list(found) == [n * n for n in range(20)]
    assert len(waits) == 20 and min(waits) >= 0
    assert next(found, "over") == "over"
    wait_for_no_thread()


@pytest.mark.parametrize("ahead", [1, 3])
def test_no_more_than_asked_for_is_computed_ahead(ahead):
    begun, drawn = [], []

    def jobs():
        for number in range(10):
            drawn.append(threading.current_thread())
            yield lambda number=number: begun.append(number)

    found = run_ahead(jobs(), ahead=ahead, count_wait=lambda _: None)
    next(found)
    deadline = time.monotonic() + 60
    while len(begun) < 1 + ahead and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # time enough to begin one too many
    assert begun == list(range(1 + ahead))
    assert set(drawn) == {threading.current_thread()}  # and by whoever iterates


def test_an_error_comes_where_the_result_would_be_and_ends_the_iteration():
    ran = []

    def job(number: int) -> int:
        ran.append(number)
        if number == 2:
            raise OSError("the disk is gone")
        return number

    found = run_ahead(((lambda n=n: job(n)) for n in range(50)), ahead=1, count_wait=lambda _: None)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert next(found, "over") == "over"
    wait_for_no_thread()
    assert len(ran) <= 4


def test_an_error_of_the_next_job_does_not_come_early():
    def fail() -> int:
        raise ValueError("second")

    found = run_ahead(iter([lambda: 1, fail]), ahead=1, count_wait=lambda _: None)
    assert next(found) == 1
    with pytest.raises(ValueError, match="second"):
        next(found)


def test_an_abandoned_iteration_ends_its_thread():
    ran = []
    found = run_ahead(
        ((lambda n=n: ran.append(n)) for n in range(1000)), ahead=2, count_wait=lambda _: None
    )
    next(found)
    del found
    gc.collect()
    wait_for_no_thread()
    assert len(ran) <= 4


def test_no_jobs():
    found = run_ahead(iter(()), ahead=1, count_wait=lambda _: None)
    assert list(found) == []
    wait_for_no_thread()
