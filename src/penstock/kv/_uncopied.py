"""Refusal to copy what owns memory, a file and threads."""

from __future__ import annotations

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
