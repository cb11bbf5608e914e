"""Owners of memory, a file and threads: neither copied, nor used in forked processes."""

from __future__ import annotations

import os

from penstock.errors import PenstockError
from penstock.memory import Uncopied


class Savable(Uncopied):
    """Base of objects that are saved to a file and begun from it."""

    instead_of_copies = "save(path) it, and begin any number of others with prefix=path"


class Owner(Savable):
    """Base of objects with threads, which are used in their own process until they are closed."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._closed = False

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that made the object, where its threads are not."""
        return os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `PenstockError` where the object is closed, or in a forked process."""
        if self._closed:
            raise PenstockError("this pool is closed; make a new one")
        if self.is_forked:
            raise PenstockError(
                f"this pool belongs to process {self._process}, and this is its fork "
                f"{os.getpid()}; make one here, with prefix= to begin with its tokens"
            )
