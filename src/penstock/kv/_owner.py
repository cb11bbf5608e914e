"""Owners of memory, a file and threads: neither copied, nor used in forked processes."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from penstock.errors import PenstockError
from penstock.memory import Uncopied


class Savable(Uncopied):
    """Base of objects that are saved to a file and begun from it."""

    instead_of_copies = "save(path) it, and begin any number of others with prefix=path"


class Owner(Savable):
    """Base of objects with threads, which are used in their own process until they are closed.

    Attributes:
        lock: Held by a thread while it uses the object.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that made the object, where its threads are not."""
        return os.getpid() != self._process

    @property
    def is_open(self) -> bool:
        """True until it is closed."""
        return not self._closed

    def check_open(self) -> None:
        """Raise `PenstockError` where the object is closed, or in a forked process."""
        if self._closed:
            raise PenstockError("this pool is closed; make a new one")
        if self.is_forked:
            raise PenstockError(
                f"this pool belongs to process {self._process}, and this is its fork "
                f"{os.getpid()}; make one here, with prefix= to begin with its tokens"
            )


P = ParamSpec("P")
R = TypeVar("R")
Own = TypeVar("Own", bound=Owner)


def one_at_a_time(method: Callable[Concatenate[Own, P], R]) -> Callable[Concatenate[Own, P], R]:
    """Let a method of an owner wait until no other thread uses the object."""

    @functools.wraps(method)
    def run(self: Own, *args: P.args, **options: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **options)

    return run
