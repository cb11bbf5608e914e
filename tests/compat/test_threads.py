"""Threads that are waited for again after an interrupt, in this process and in a forked one."""

from __future__ import annotations

import _thread
import os
import threading
import time

import pytest

from interrupts import interrupts
from penstock.compat.threads import Thread, watch_this_thread


def test_join_waits_again_after_an_interrupt():
    is_waited_for, go_on, returned = threading.Event(), threading.Event(), []

    class WaitedFor(Thread):
        def join(self, timeout: float | None = None) -> None:
            is_waited_for.set()
            super().join(timeout)

    def call() -> None:
        assert is_waited_for.wait(60)
        interrupt()
        go_on.wait(60)
        time.sleep(0.2)
        returned.append(True)

    thread = WaitedFor(target=call)
    thread.start()
    with interrupts() as interrupt, pytest.raises(KeyboardInterrupt):
        thread.join()
    assert thread.is_alive()
    thread.join(timeout=0.01)
    assert thread.is_alive() and not returned
    go_on.set()
    thread.join()
    assert returned and not thread.is_alive()


def test_one_that_raises_has_run(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    thread = Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="before it is started"):
        Thread(target=print).join()


def test_a_forked_child_does_not_wait_for_what_it_has_not_got():
    end = threading.Event()
    thread = Thread(target=end.wait, args=(60,))
    thread.start()
    child = os.fork()
    if not child:
        thread.join()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_the_end_of_a_thread_is_told_where_it_is_known():
    """Of one that `threading` has not started it is not, even after the end."""
    watched, is_watched = [], threading.Event()

    def watch() -> None:
        watched.append(watch_this_thread())
        assert not watched[-1]()
        is_watched.set()

    started = threading.Thread(target=watch)
    started.start()
    started.join()
    is_watched.clear()
    _thread.start_new_thread(watch, ())
    assert is_watched.wait(10)
    watch()  # in this one
    assert [has_ended() for has_ended in watched] == [True, False, False]
