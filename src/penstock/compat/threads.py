"""Threads that can be waited for again after an interrupt, and the end of any thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any


class Thread(threading.Thread):
    """A thread whose `join` an exception may interrupt, such as that of Ctrl-C.

    Before Python 3.13 an interrupted `threading.Thread.join` takes the thread for ended: the next
    one returns at once, and memory that the thread still uses is freed (bpo-45274).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_run = threading.Event()

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._has_run.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the target has returned.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.
        """
        if self.is_alive() and not self._has_run.wait(timeout):  # in a forked child none is alive
            return
        super().join(timeout)


def watch_this_thread() -> Callable[[], bool]:
    """Return a function that tells whether the thread that called this has ended.

    It is always False of threads that Python has not started: what Python has of one may come and
    go with each call of Python code.
    """
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        return lambda: False
    weak = weakref.ref(thread)  # the interpreter keeps it until the thread has ended

    def has_ended() -> bool:
        known = weak()
        return known is None or not known.is_alive()

    return has_ended
