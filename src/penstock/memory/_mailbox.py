"""A lock that destructors can use: they leave a message and never wait.

An offloaded tensor frees its bytes when it dies, and Python may let it die anywhere: in the middle
of `allocate` on the same thread, or while another thread holds a lock that this one is after. A
destructor that waits for a lock can therefore deadlock. Here it leaves its request in a queue;
whoever holds the lock applies it, and nobody ever waits inside a destructor.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Message = TypeVar("_Message")


class Mailbox(Generic[_Message]):
    """State guarded by one lock, with messages that change it and never wait.

    `put` is for destructors and hot paths; `with mailbox:` is for everyone who reads the state or
    changes it at once, and sees every message that was put before.

    Example:
        >>> total = []
        >>> mailbox = Mailbox(total.append)
        >>> mailbox.put(1)
        >>> with mailbox:
        ...     total
        [1]

    Args:
        apply: Changes the state by one message. Runs under the lock, one message at a time, on any
            thread; it must not raise.
    """

    __slots__ = ("_apply", "_lock", "_messages")

    def __init__(self, apply: Callable[[_Message], object]) -> None:
        self._apply = apply
        self._lock = threading.Lock()
        self._messages: deque[_Message] = deque()

    def put(self, message: _Message) -> None:
        """Apply a message, now or as soon as the thread that holds the lock lets go of it.

        Args:
            message: What `apply` is called with.
        """
        messages, lock, apply = self._messages, self._lock, self._apply
        messages.append(message)
        # Whoever holds the lock looks again after letting go, so a message left here is not lost.
        while messages and lock.acquire(False):
            try:
                while messages:
                    apply(messages.popleft())
            finally:
                lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            while self._messages:
                self._apply(self._messages.popleft())
        except BaseException:  # an interrupt from the keyboard must not leave the lock held
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        # For messages that came meanwhile; the one that is put last finds the lock free, or is seen
        # by whoever holds it.
        while self._messages and self._lock.acquire(False):
            try:
                while self._messages:
                    self._apply(self._messages.popleft())
            finally:
                self._lock.release()
