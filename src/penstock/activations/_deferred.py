"""What may still be filled by the operator that saves it.

Operators save their inputs before they run, and a few (`rrelu`'s noise) fill one of them while
they run without raising its version: its bytes are there only afterwards. What has a history of
its own was computed by an operator that has run; the rest waits for some more saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.activations._record import Record

_NUM_SAVES = 4  # after which the operator that saved an input has surely run


class DeferredSaves:
    """Records without a history of their own, in the order of saving, until they are due."""

    def __init__(self) -> None:
        self._records: deque[tuple[Record, int]] = deque()  # with the number of its save
        self._num_saves = 0

    def add(self, record: Record) -> None:
        """Defer what is being saved."""
        self._records.append((record, self._num_saves))

    def note_save(self) -> None:
        """Something was saved, deferred or not."""
        self._num_saves += 1

    def due(self, *, everything: bool = False) -> Iterator[Record]:
        """Take out what was saved long enough ago, or all that there is."""
        last = self._num_saves - (0 if everything else _NUM_SAVES + 1)
        while self._records and self._records[0][1] <= last:
            yield self._records.popleft()[0]
