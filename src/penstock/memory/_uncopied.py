"""Owners of memory, files and threads, which are not copied."""

from __future__ import annotations

from typing import Any, NoReturn

from penstock.errors import PenstockError


class Uncopied:
    """Base of objects that `copy` and `pickle` refuse by name.

    Attributes:
        instead_of_copies: What to do in place of a copy, for the error.
    """

    instead_of_copies: str

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse.

        Raises:
            PenstockError: Always.
        """
        raise PenstockError(
            f"a {type(self).__name__} owns memory and files and cannot be copied or pickled; "
            f"{self.instead_of_copies}"
        )
