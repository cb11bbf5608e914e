"""What may still be filled by the operator that saves it.

Operators save their inputs before they run, and a few (`rrelu`'s noise) fill one of them while
they run without raising its version: its bytes are there only afterwards. What has a history of
its own was computed by an operator that has run. Anything else waits for the same thread to record
another operator: autograd numbers them, and one has run before the next one is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torch._C._autograd import _get_sequence_nr as _number_of_operator

from penstock.activations._record import Record


class DeferredSaves:
    """Records whose operator may not have run yet, by the thread that runs it."""

    def __init__(self) -> None:
        self._records: dict[int, list[Record]] = {}
        self._operators: dict[int, int] = {}  # that their thread was recording

    def add(self, record: Record) -> None:
        """Defer what this thread is saving."""
        thread = threading.get_ident()
        record.filled = False
        self._operators[thread] = _number_of_operator()
        self._records.setdefault(thread, []).append(record)

    def due(self) -> Iterator[Record]:
        """Take out what this thread's earlier operators have filled."""
        if not self._records:
            return
        thread = threading.get_ident()
        if thread in self._records and self._operators[thread] != _number_of_operator():
            for record in self._records.pop(thread):
                record.filled = True
                yield record
