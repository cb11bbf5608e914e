"""Mailbox: a lock that destructors can use, as they leave a message and never wait.

An offloaded tensor frees its bytes when it dies, and Python may let it die anywhere: in the middle
of `allocate` on the same thread, or while another thread holds a lock that this one is after. A
destructor that waits for a lock can therefore deadlock. Here it leaves its request in a queue; the
thread that holds the lock applies it, and nothing ever waits inside a destructor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.memory import _fork
from penstock.memory._signals import uninterrupted

_Message = TypeVar("_Message")
_Result = TypeVar("_Result")


class Mailbox(Generic[_Message]):
    """State guarded by one lock, with messages that change it and never wait.

    `put` is for destructors and hot paths; `read` and `with mailbox:` see every message that was
    put before. In a forked child the lock is free.

    Example:
        >>> total = []
        >>> mailbox = Mailbox(total.append)
        >>> mailbox.put(1)
        >>> mailbox.read(lambda: total)
        [1]

    Args:
        apply: Changes the state by one message. Runs under the lock, one message at a time, on any
            thread; it must not raise.
        patience: How many messages may wait for the next reader before one that is put applies
            them all.
    """

    __slots__ = ("__weakref__", "_apply", "_lock", "_messages", "_patience")

    def __init__(self, apply: Callable[[_Message], object], *, patience: int = 1) -> None:
        self._apply = apply
        self._patience = patience
        self._lock = threading.Lock()
        self._messages: deque[_Message] = deque()
        _fork.set_right_in_children(self)

    def put(self, message: _Message) -> None:
        """Apply a message: now if the lock is free, else with the next read."""
        self._messages.append(message)
        if len(self._messages) >= self._patience:
            self._apply_unless_locked()

    @uninterrupted
    def read(self, read: Callable[[], _Result]) -> _Result:
        """Return what `read` returns, called with the lock held."""
        with self._lock:  # a lock of C's: between taking it and the block nothing can come
            self._apply_all()
            return read()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._apply_all()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._apply_unless_locked()  # what came meanwhile

    @uninterrupted
    def _apply_unless_locked(self) -> None:
        # The thread that holds the lock looks again after releasing it: no message is forgotten.
        while self._messages and self._lock.acquire(False):
            try:
                self._apply_all()
            finally:
                self._lock.release()

    def _apply_all(self) -> None:
        while self._messages:
            self._apply(self._messages.popleft())

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread that is not there may hold the old one
