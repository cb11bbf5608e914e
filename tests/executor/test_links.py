"""Links: transfers run in their order, each waiting thread goes on, and none is woken in vain."""

import threading

import pytest

from penstock.executor.device.base import Device
from penstock.executor.device.links import ThreadLink
from penstock.memory import Ledger, Link

pytestmark = pytest.mark.timeout(60)


def link_of(moves):
    return ThreadLink(Link.DEVICE_TO_HOST, moves, [1] * len(moves), Ledger(), Device())


def test_transfers_run_in_their_order_up_to_where_they_may():
    ran = []
    link = link_of([lambda number=number: ran.append(number) for number in range(100)])
    for count in (1, 2, 50, 100):
        link.release(count)
        link.wait(count)
        assert ran == list(range(count))
    link.next_step()
    link.release(1)
    link.wait(1)
    link.wait(-3)
    assert ran[100:] == [0]
    link.stop()


def test_no_release_is_missed_in_many_turns():
    """A thread that falls asleep just as it is released would hang here."""
    link = link_of([lambda: None] * 2)
    for _ in range(5000):
        link.release(1)
        link.wait(1)
        link.release(2)
        link.wait(2)
        link.next_step()
    assert link.done == 10002
    link.stop()


def test_a_busy_thread_is_not_woken():
    go, begun = threading.Event(), threading.Event()

    def first():
        begun.set()
        go.wait()

    link = link_of([first, *[lambda: None] * 9])
    link.release(1)
    begun.wait()
    for count in range(2, 11):
        link.release(count)
    assert link._wake.empty()
    go.set()
    link.wait(10)
    link.drain()
    link.stop()


def test_halted_and_reset_it_begins_anew():
    ran, go, begun = [], threading.Event(), threading.Event()

    def first():
        ran.append(0)
        begun.set()
        go.wait()

    link = link_of([first, lambda: ran.append(1)])
    link.release(2)
    begun.wait()
    halting = threading.Thread(target=link.halt)
    halting.start()
    while not link._halted:
        pass
    go.set()
    halting.join()
    assert ran == [0]
    link.reset()
    link.release(2)
    link.wait(2)
    assert ran == [0, 0, 1]
    link.stop()


def test_an_error_is_raised_by_waits():
    def fails():
        raise OSError("no")

    link = link_of([fails, lambda: None])
    link.release(2)
    with pytest.raises(OSError, match="no"):
        link.wait(1)
    with pytest.raises(OSError, match="no"):
        link.drain()
    link.stop()
