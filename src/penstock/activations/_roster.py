"""All living records: by storage, and in the order of saving."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.activations._record import Record


class Roster:
    """Records by number and by storage; every change is a single operation on a dict."""

    def __init__(self) -> None:
        self._by_number: dict[int, Record] = {}  # numbers rise, so the order is that of saving
        self._by_storage: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Record]:
        """From the oldest to the newest; the roster must not change meanwhile."""
        return iter(self._by_number.values())

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Record | None:
        """The record that holds what `tensor`, a view of `storage`, shows now."""
        record = self._by_storage.get(storage._cdata)
        if record is None or record.origin() is not storage:
            return None
        return record if record.describes(tensor) else None

    def add(self, record: Record) -> bool:
        """Add the newest record; False if its storage had one already, of another version."""
        known = self._by_storage.get(record.key)
        is_new = known is None or known.origin() is not record.origin()
        self._by_storage[record.key] = record
        self._by_number[record.number] = record
        return is_new

    def remove(self, record: Record) -> None:
        """Take the record out."""
        if self._by_storage.get(record.key) is record:
            del self._by_storage[record.key]
        self._by_number.pop(record.number, None)

    def older_than(self, record: Record, at_most: int) -> Iterator[Record]:
        """What was saved before `record` and is alive, the newest first, `at_most` numbers back."""
        for number in range(record.number - 1, record.number - 1 - at_most, -1):
            older = self._by_number.get(number)
            if older is not None:
                yield older
