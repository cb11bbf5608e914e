"""Saved bytes on the device tier: their number, and the storages that they are in.

All of it is used under the engine's lock.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from penstock.activations._record import Activity, HandleWatch, Record
from penstock.memory import Ledger, Tier

_SWEEP = 8  # storages in use that one call looks at


class _InUse(NamedTuple):
    """A storage that was given up while autograd may be using it."""

    weak: weakref.ref[torch.UntypedStorage]
    num_bytes: int  # that count
    numbers: frozenset[int]  # of the records that gave it up


class DeviceAccount:
    """Saved bytes resident on the device tier: counted, read ahead, given up, freed."""

    def __init__(self, ledger: Ledger) -> None:
        self.resident_bytes = 0
        self.ahead_bytes = 0  # prefetched and not asked for yet
        self._ledger = ledger
        self.ahead: dict[int, Record] = {}  # prefetched records by number
        self._in_use: OrderedDict[int, _InUse] = OrderedDict()  # by the reference's identity

    def add(self, record: Record) -> None:
        """Count a record's bytes as resident, or about to be."""
        if not record.counted:
            record.counted = True
            # What was given up, and is taken back before it was gone, counts once.
            in_use = self._in_use.pop(id(record.weak), None)
            self._change(record.num_bytes - (in_use.num_bytes if in_use else 0))

    def remove(self, record: Record) -> None:
        """Count a record's bytes as resident no more."""
        if record.counted:
            record.counted = False
            self._change(-record.num_bytes)

    def release(self, record: Record) -> None:
        """Count a storage that was given up until it is gone, as autograd may be using it.

        `end_use` ends that before.
        """
        if not record.counted or record.weak() is None:
            self.remove(record)
            return
        record.counted = False
        # Two records may show one storage; it has one weak reference, and counts once.
        known = self._in_use.pop(id(record.weak), _InUse(record.weak, 0, frozenset()))
        num_bytes = max(record.num_bytes, known.num_bytes)
        numbers = known.numbers | {record.number}
        self._in_use[id(record.weak)] = _InUse(record.weak, num_bytes, numbers)
        self._change(num_bytes - record.num_bytes - known.num_bytes)

    def end_use(self, record: Record) -> None:
        """Stop counting a dead record's storage, which now is the caller's, as a batch is."""
        in_use = self._in_use.get(id(record.weak))
        if in_use is None or record.number not in in_use.numbers:
            return
        numbers = in_use.numbers - {record.number}
        if numbers:
            self._in_use[id(record.weak)] = in_use._replace(numbers=numbers)
        else:
            del self._in_use[id(record.weak)]
            self._change(-in_use.num_bytes)

    def sweep(self, at_most: int | None = _SWEEP) -> None:
        """Take off storages in use that are gone, looking at a few in turn; None: at all."""
        num = len(self._in_use) if at_most is None else min(at_most, len(self._in_use))
        for _ in range(num):
            key, in_use = self._in_use.popitem(last=False)
            if in_use.weak() is None:
                self._change(-in_use.num_bytes)
            else:
                self._in_use[key] = in_use

    def set_prefetched(self, record: Record, prefetched: bool) -> None:
        """Note whether a record was read ahead and not asked for yet."""
        if record.prefetched != prefetched:
            record.prefetched = prefetched
            self.ahead_bytes += record.num_bytes if prefetched else -record.num_bytes
            if prefetched:
                self.ahead[record.number] = record
            else:
                self.ahead.pop(record.number, None)

    def serve(self, record: Record, watch: HandleWatch) -> None:
        """Note that a handle was unpacked; the storage goes once every living handle was."""
        self.set_prefetched(record, False)
        watch.epoch = record.epoch
        self.drop_if_served(record)

    def drop_if_served(self, record: Record) -> None:
        """Give up a storage that has a copy once every living handle was unpacked."""
        if record.copy is not None and record.activity is Activity.IDLE and record.is_served():
            self.drop(record)

    def drop(self, record: Record) -> None:
        """Give up the strong reference to a storage that has a copy.

        Autograd may still be using the tensor: its bytes stay counted until it is gone.
        """
        if record.storage is None or record.unpacked:
            return
        self._end_read_ahead(record)
        record.storage = None
        record.epoch += 1
        self.release(record)

    def free(self, record: Record) -> None:
        """Free a dead record's bytes in every tier."""
        self._end_read_ahead(record)
        record.storage = None
        self.remove(record)
        self.end_use(record)
        copy, record.copy = record.copy, None
        if copy is not None and record.route is not None:
            record.route.discard(copy)

    def _end_read_ahead(self, record: Record) -> None:
        if record.prefetched and record.route is not None:  # nothing has waited for its read
            record.route.settle(record.ready, record.storage)
        self.set_prefetched(record, False)

    def recount(self, records: Iterable[Record]) -> None:
        """Compute all sums anew from the living records."""
        records = list(records)
        self.sweep(None)
        resident = sum(record.num_bytes for record in records if record.counted)
        resident += sum(in_use.num_bytes for in_use in self._in_use.values())
        self._change(resident - self.resident_bytes)
        self.ahead = {record.number: record for record in records if record.prefetched}
        self.ahead_bytes = sum(record.num_bytes for record in self.ahead.values())

    def _change(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)
