"""Owners of memory, a file and threads: neither copied, nor used in forked processes."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from penstock.errors import PenstockError


class Uncopied:
    """Base of objects that `copy` and `pickle` refuse by name."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse.

        Raises:
            PenstockError: Always.
        """
        raise PenstockError(
            f"a {type(self).__name__} owns memory and files and cannot be copied or pickled; "
            "save(path) it, and begin any number of others with prefix=path"
        )


class Owner(Uncopied):
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
