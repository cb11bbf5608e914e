"""Signals in the middle of a step: handled at once if the step can be undone, else after it.

Python runs signal handlers between any two bytecodes, and many raise: that of Ctrl-C, one for
SIGTERM that exits. An exception between the two halves of an update tears it. While a step runs,
signals are noted instead, and their handlers called at boundaries at which the step can still be
undone, or when it is done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from penstock.errors import TornStepError

_DEFERRED = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # not all systems have all
]
_Handler = Callable[[int, FrameType | None], Any]


@contextlib.contextmanager
def end_early_on_interrupt() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block at Ctrl-C, at which planning ends early; the user's
    handler is called after the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[FrameType | None] = []

    def note(_: int, frame: FrameType | None) -> None:
        arrived.append(frame)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(signal.SIGINT, arrived[0])


class Interrupts:
    """Signals with handlers of Python's, deferred during a `with` block."""

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._pending: dict[int, _Handler] = {}
        self._is_masked = False

    def __enter__(self) -> Interrupts:
        self._pending = {}
        self._is_masked = False
        if threading.current_thread() is threading.main_thread():
            for number in _DEFERRED:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        if isinstance(error, TornStepError):  # no handler's exception may take its place
            self._pending = {}
        elif error is not None:
            self.check()

    def check(self) -> None:
        """Call the handlers of deferred signals; they may raise."""
        while self._pending:
            number = next(iter(self._pending))
            self._pending.pop(number)(number, None)

    @contextlib.contextmanager
    def mask(self) -> Iterator[None]:
        """Defer also a signal that comes twice: the block must reach its end."""
        self._is_masked = True
        try:
            yield
        finally:
            self._is_masked = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending and not self._is_masked:  # twice: the user is in a hurry
            self._pending.pop(number)(number, frame)
        else:
            self._pending[number] = self._handlers[number]
