"""All living records: by storage, and in the order of saving."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from penstock.activations._record import Record


class Roster:
    """A map from storages to records and a list that records leave in constant time."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Record] = {}
        self._oldest: Record | None = None
        self._newest: Record | None = None
        self._num_records = 0

    def __len__(self) -> int:
        return self._num_records

    def __iter__(self) -> Iterator[Record]:
        """From the oldest to the newest; the list must not change meanwhile."""
        record = self._oldest
        while record is not None:
            yield record
            record = record.newer

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Record | None:
        """The record that holds what `tensor`, a view of `storage`, shows now."""
        record = self._by_storage.get(storage._cdata)
        return record if record is not None and record.describes(tensor) else None

    def add(self, record: Record) -> bool:
        """Add the newest record; False if its storage had one already, of another version."""
        is_new = record.key not in self._by_storage
        self._by_storage[record.key] = record
        record.older, self._newest = self._newest, record
        if record.older is None:
            self._oldest = record
        else:
            record.older.newer = record
        self._num_records += 1
        return is_new

    def remove(self, record: Record) -> None:
        """Take the record out."""
        if self._by_storage.get(record.key) is record:
            del self._by_storage[record.key]
        older, newer = record.older, record.newer
        record.older = record.newer = None
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        self._num_records -= 1
