"""A budget of bytes: each buffer of a search is entered before it is allocated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor


class BudgetExceeded(Exception):
    """The next buffer would exceed the budget; nothing of it was allocated."""


class SearchBudget:
    """The account of the buffers of one search.

    Args:
        max_bytes: Bytes that all buffers together may have at once; None for any number.

    Attributes:
        max_bytes: As given.
        held_bytes: Bytes of the buffers now.
        peak_bytes: The most that they were.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes, self.held_bytes, self.peak_bytes = max_bytes, 0, 0

    def check(self, num_bytes: int) -> None:
        """Raise unless so many bytes more would be within the budget.

        Raises:
            BudgetExceeded: They would not.
        """
        if self.max_bytes is not None and self.held_bytes + num_bytes > self.max_bytes:
            raise BudgetExceeded

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, whose content is not set."""
        self._enter(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=device)

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer of zeroes."""
        self._enter(math.prod(shape) * dtype.itemsize)
        return torch.zeros(shape, dtype=dtype, device=device)

    def hold(self, num_bytes: int) -> None:
        """Enter bytes that the caller has."""
        self._enter(num_bytes)

    def release(self, buffer: Tensor) -> None:
        """Take a buffer out of the account; the caller drops it before the next one is made."""
        self.held_bytes -= buffer.numel() * buffer.dtype.itemsize

    @contextlib.contextmanager
    def temporary(self, num_bytes: int) -> Iterator[None]:
        """Enter what torch's operators allocate for themselves within the context, at most."""
        self._enter(num_bytes)
        try:
            yield
        finally:
            self.held_bytes -= num_bytes

    def _enter(self, num_bytes: int) -> None:
        self.check(num_bytes)
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
