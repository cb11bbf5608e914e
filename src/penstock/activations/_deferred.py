"""Saved storages that the operator which saves them may still fill.

Operators save their inputs before they run, and a few (`rrelu`'s noise) fill one of them while
they run without raising its version: its bytes are there only afterwards. What has a history of
its own was computed by an operator that has run. Anything else waits for the same thread to record
another operator: autograd numbers them, and one has run before the next one is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from penstock.activations._record import Record
from penstock.compat.autograd import next_sequence_number


class DeferredSaves:
    """Records whose operator may not have run yet, by the thread that runs it."""

    def __init__(self) -> None:
        self._records: dict[int, list[Record]] = {}
        self._operators: dict[int, int] = {}  # that their thread was recording

    def add(self, record: Record) -> None:
        """Defer what this thread is saving."""
        thread = threading.get_ident()
        record.filled = False
        self._operators[thread] = next_sequence_number()
        self._records.setdefault(thread, []).append(record)

    def take_due(self) -> Iterator[Record]:
        """Take out the records that this thread's earlier operators have filled."""
        if not self._records:
            return
        thread = threading.get_ident()
        if thread in self._records and self._operators[thread] != next_sequence_number():
            for record in self._records.pop(thread):
                record.filled = True
                yield record
