"""Signals in the middle of a step: at once where the step can be undone, else after it.

Python runs signal handlers between any two bytecodes, and many raise: Ctrl-C's, one for SIGTERM
that exits. An exception between the two halves of an update tears it. While a step runs, signals
are noted instead, and their handlers called where the step can still be undone, or when it is done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from penstock.errors import TornStepError

_HELD_BACK = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # not all systems have all
]
_Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def heard_afterwards() -> Iterator[None]:
    """Let Ctrl-C end early what stops at a `KeyboardInterrupt`, as planning does; its handler is
    called after the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def note(_: int, frame: FrameType | None) -> None:
        came.append(frame)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])


class Interrupts:
    """Holds signals back during a `with` block, those that Python handles."""

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._came: dict[int, _Handler] = {}
        self._is_masked = False

    def __enter__(self) -> Interrupts:
        self._came = {}
        self._is_masked = False
        if threading.current_thread() is threading.main_thread():
            for number in _HELD_BACK:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if isinstance(error, TornStepError):  # which is what has to be heard
            self._came = {}
        elif error is not None:
            self.check()

    def check(self) -> None:
        """Call the handlers of what was held back; they may raise."""
        while self._came:
            number = next(iter(self._came))
            self._came.pop(number)(number, None)

    @contextlib.contextmanager
    def masked(self) -> Iterator[None]:
        """Hold back also what comes twice: what runs now must come to its end."""
        self._is_masked = True
        try:
            yield
        finally:
            self._is_masked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._came and not self._is_masked:  # twice: it is not to wait any longer
            self._came.pop(number)(number, frame)
        else:
            self._came[number] = self._handlers[number]
