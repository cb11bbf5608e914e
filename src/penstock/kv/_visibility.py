"""Visibility: the keys that each query sees, evaluated for ranges of both when it is needed.

A mask of all queries and keys of a long context would be larger than the budget. A rule over
indices, as masks of causality, windows and padding are, has a value for any range of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Visibility by indices of batch, head, query and key, which broadcast."""


@dataclass(eq=False)
class Visibility:
    """Keys that the queries of one call see. All parts that are given must allow a key.

    Attributes:
        batch_size: Sequences, B.
        query_start: Position of the first query among the tokens.
        is_causal: Whether a query sees no key behind its own position.
        window: Keys that a query sees up to its own position, that included; None: all before it.
        rule: A rule over batch, head, position of the query and of the key; None: no further rule.
        padding: bool `(B, tokens)`, False for tokens that no query sees; tokens beyond it are not
            seen either. None: no padding.
        table: bool `(1 or B, 1 or Hq, n, tokens)`, for a mask that is given as a whole.
        table_start: Token of the table's first column.
        device: Device of the parts that are tensors, and of the indices that the rule is given.
    """

    batch_size: int = 1
    query_start: int = 0
    is_causal: bool = False
    window: int | None = None
    rule: Rule | None = None
    padding: torch.Tensor | None = None
    table: torch.Tensor | None = None
    table_start: int = 0
    device: torch.device | str = "cpu"
    _last: tuple[tuple[int, int, int, int], torch.Tensor | None] | None = field(
        default=None, init=False, repr=False
    )

    def sees_all(self, first: int, last: int) -> bool:
        """Return whether every query is known to see all keys of `[first, last)`."""
        if self.rule is not None or self.table is not None or self.window is not None:
            return False
        if self.is_causal and last > self.query_start + 1:
            return False
        return self._hidden_by_padding(first, last) is None

    def is_triangle(self, first: int, last: int, num_queries: int) -> bool:
        """Return whether the keys `[first, last)` are those of the queries, plainly causal."""
        return (
            self.is_causal
            and self.rule is None
            and self.table is None
            and first == self.query_start
            and last - first == num_queries
            and (self.window is None or num_queries <= self.window)
            and self._hidden_by_padding(first, last) is None
        )

    def between(self, queries: slice, first: int, last: int) -> torch.Tensor | None:
        """Return which of the keys `[first, last)` some queries see.

        Args:
            queries: Numbers of the queries within the call.
            first: First key.
            last: End of the keys.

        Returns:
            bool `(1 or B, 1 or Hq, 1 or n, last - first)`, or None where all are seen.
        """
        parts = []
        begin, end = self.query_start + queries.start, self.query_start + queries.stop
        hides_later = self.is_causal and last > begin + 1
        window = self.window if self.window is not None and first < end - self.window else None
        if hides_later or window is not None or self.rule is not None:
            positions = torch.arange(begin, end, device=self.device)[:, None]
            keys = torch.arange(first, last, device=self.device)
            if hides_later:
                parts.append((keys <= positions)[None, None])
            if window is not None:
                parts.append((keys > positions - window)[None, None])
            if self.rule is not None:
                batch = torch.arange(self.batch_size, device=self.device)[:, None, None, None]
                head = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.device)
                seen = self.rule(batch, head, positions[None, None], keys[None, None, None])
                parts.append(seen.expand(*seen.shape[:3], last - first))
        hidden = self._hidden_by_padding(first, last)
        if hidden is not None:
            parts.append(hidden[:, None, None, :])
        if self.table is not None:
            columns = slice(first - self.table_start, last - self.table_start)
            parts.append(self.table[:, :, queries, columns])
        whole = None
        for part in parts:
            whole = part if whole is None else whole & part
        return whole

    def of_call(self, num_queries: int, first: int, last: int) -> torch.Tensor | None:
        """Return `between` for all queries, None where all are seen; kept for the next layer."""
        key = (num_queries, first, last, id(self.table))
        if self._last is None or self._last[0] != key:
            seen = self.between(slice(0, num_queries), first, last)
            self._last = key, None if seen is not None and bool(seen.all()) else seen
        return self._last[1]

    def _hidden_by_padding(self, first: int, last: int) -> torch.Tensor | None:
        """Return the padding's part for keys; None where all of them are tokens."""
        if self.padding is None:
            return None
        seen = self.padding[:, first:last]
        if seen.shape[1] < last - first:
            seen = torch.nn.functional.pad(seen, (0, last - first - seen.shape[1]))
        return None if bool(seen.all()) else seen
