"""Ctrl-C that a thread sends to the main one: once each time, and never lost."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    """A function for another thread: it raises KeyboardInterrupt in this one, and waits for that.

    A signal that comes after Python has last looked for one, and before the system call that waits,
    ends no wait. A second one does, whose handler raises nothing.
    """
    here, is_handled = threading.get_ident(), threading.Semaphore(0)

    def handle(*_: object) -> NoReturn:
        is_handled.release()
        raise KeyboardInterrupt

    def interrupt() -> None:
        signal.pthread_kill(here, signal.SIGINT)
        for _ in range(6000):
            if is_handled.acquire(timeout=0.01):
                return
            signal.pthread_kill(here, signal.SIGUSR1)
        raise AssertionError("nothing was interrupted")

    before = [
        signal.signal(signal.SIGUSR1, lambda *_: None),
        signal.signal(signal.SIGINT, handle),
    ]
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before[1])
        signal.signal(signal.SIGUSR1, before[0])
