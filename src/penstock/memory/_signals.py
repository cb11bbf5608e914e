"""Signals that wait until a function has ended, so that no handler's exception tears it in two.

Python runs signal handlers in the main thread between any two bytecodes, and many raise: Ctrl-C's
KeyboardInterrupt, a SIGTERM handler that exits, an alarm. An exception there leaves a lock held, a
count too high or an extent without an owner. While an `Offload` or a table watches, each handler is
wrapped: the wrapper looks at the stack that it has interrupted, and where a function marked
`uninterrupted` is on it, the handler runs when that function ends. A call costs a comparison for
this, no system call.

A function that waits is marked `interruptible`: what it is called from is consistent, and
exceptions may come out of it at once. A signal that comes again after a second is not held back.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time

# That of `signal` itself looks for what it returns in an enumeration, for ten times as long.
from _signal import getsignal  # pyright: ignore[reportMissingImports]
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Handler = Callable[[int, FrameType | None], Any]

_PATIENCE_SECONDS = 1.0


class DeferredSignals:
    """Signals that came while an uninterrupted function ran.

    Attributes:
        pending: Handlers to be called, by signal; looked at when an uninterrupted function ends.
    """

    def __init__(self) -> None:
        self.pending: dict[int, _Handler] = {}
        self._since: dict[int, float] = {}
        self._users: dict[int, bool] = {}
        self._is_uninterrupted: dict[CodeType, bool] = {}
        self._main = threading.main_thread().ident

    def mark(self, function: Any, *, uninterrupted: bool) -> None:
        """Hold signals back while `function` runs, or let them through again."""
        self._is_uninterrupted[function.__code__] = uninterrupted

    def watch(self, user: object) -> None:
        """Wrap the handlers that there are, until `user` does not watch any more.

        May be interrupted anywhere, and called again for the same user.
        """
        self._users[id(user)] = True
        self.renew()

    def unwatch(self, user: object) -> None:
        """End a user's watch; after the last one handlers are put back, where still wrapped."""
        self._users.pop(id(user), None)
        self.renew()

    def renew(self) -> None:
        """Wrap new handlers, or unwrap all when nothing watches any more; in the main thread."""
        if threading.get_ident() != self._main:
            return
        for number in _NUMBERS:
            handler = getsignal(number)
            if type(handler) is int:  # SIG_DFL or SIG_IGN, as of nearly all
                continue
            if self._users:
                if callable(handler) and not isinstance(handler, _Wrapped):
                    signal.signal(number, _Wrapped(handler))
            elif isinstance(handler, _Wrapped):
                signal.signal(number, handler.handler)

    def deliver(self, frame: FrameType | None) -> None:
        """Call the handlers that were held back, if nothing holds them back in `frame`."""
        if threading.get_ident() != self._main or self._is_held_back(frame):
            return
        while self.pending:
            number = next(iter(self.pending))
            self.pending.pop(number)(number, frame)

    def holds_back(self, number: int, frame: FrameType | None) -> bool:
        """Return whether a signal that interrupts `frame` has to wait."""
        if not self._is_held_back(frame):
            return False
        now = time.monotonic()
        if number not in self.pending:
            self._since[number] = now
        return now - self._since[number] < _PATIENCE_SECONDS

    def _is_held_back(self, frame: FrameType | None) -> bool:
        while frame is not None:
            uninterrupted = self._is_uninterrupted.get(frame.f_code)
            if uninterrupted is not None:
                return uninterrupted
            frame = frame.f_back
        return False

    def forget(self) -> None:
        """Forget signals in a forked child: they came to the parent."""
        self.pending.clear()
        self._main = threading.get_ident()


class _Wrapped:
    """Handler of a signal that waits for uninterrupted functions."""

    __slots__ = ("handler",)

    def __init__(self, handler: _Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> object:
        if deferred_signals.holds_back(number, frame):
            deferred_signals.pending[number] = self.handler
            return None
        deferred_signals.pending.pop(number, None)
        return self.handler(number, frame)


_NUMBERS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
deferred_signals = DeferredSignals()
deferred_signals.mark(DeferredSignals.deliver, uninterrupted=False)  # handlers as they come
os.register_at_fork(after_in_child=deferred_signals.forget)


def uninterrupted(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have signals wait for the end of each call; works while `deferred_signals` watches.

    Example:
        >>> @uninterrupted
        ... def move(stack, other):
        ...     other.append(stack.pop())
    """

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        finally:
            # Between this and the return Python looks for no signal.
            if deferred_signals.pending:
                deferred_signals.deliver(sys._getframe(1))

    deferred_signals.mark(call, uninterrupted=True)
    return call


def interruptible(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let signals through while `function` waits, and what came before it."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if deferred_signals.pending:
            deferred_signals.deliver(sys._getframe())
        return function(*args, **options)

    deferred_signals.mark(call, uninterrupted=False)
    return call
