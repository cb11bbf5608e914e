"""How many saved bytes the device tier holds, and on whose behalf; under the engine's lock."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable

import torch

from penstock.activations._record import Record
from penstock.memory import Ledger, Tier

_SWEEP = 8  # storages in use that one call looks at


class DeviceAccount:
    """Saved bytes resident on the device tier, those of them read ahead, and what is in use."""

    def __init__(self, ledger: Ledger) -> None:
        self.resident_bytes = 0
        self.ahead_bytes = 0  # prefetched and not asked for yet
        self._ledger = ledger
        self.ahead: dict[int, Record] = {}  # prefetched records by number
        self._in_use: OrderedDict[int, tuple[weakref.ref[torch.UntypedStorage], int]]
        self._in_use = OrderedDict()  # by the weak reference's identity

    def add(self, record: Record) -> None:
        """The record's bytes are, or are about to be, resident."""
        if not record.counted:
            record.counted = True
            # What was given up, and is taken back before it was gone, counts once.
            _, back_bytes = self._in_use.pop(id(record.weak), (None, 0))
            self._change(record.num_bytes - back_bytes)

    def remove(self, record: Record) -> None:
        """The record's bytes are resident no more."""
        if record.counted:
            record.counted = False
            self._change(-record.num_bytes)

    def release(self, record: Record) -> None:
        """We gave the storage up, but autograd may be using it: it counts until it is gone."""
        if record.counted and record.weak() is not None:
            record.counted = False
            # Two records may show one storage; it has one weak reference, and counts once.
            _, known_bytes = self._in_use.pop(id(record.weak), (None, 0))
            self._in_use[id(record.weak)] = record.weak, max(record.num_bytes, known_bytes)
            self._change(-min(record.num_bytes, known_bytes))
        else:
            self.remove(record)

    def sweep(self, at_most: int | None = _SWEEP) -> None:
        """Take off what was in use and is gone, looking at a few in turn; None: at all."""
        num = len(self._in_use) if at_most is None else min(at_most, len(self._in_use))
        for _ in range(num):
            key, (weak, num_bytes) = self._in_use.popitem(last=False)
            if weak() is None:
                self._change(-num_bytes)
            else:
                self._in_use[key] = weak, num_bytes

    def set_prefetched(self, record: Record, prefetched: bool) -> None:
        """Whether the record was read ahead, and nobody has asked for it yet."""
        if record.prefetched != prefetched:
            record.prefetched = prefetched
            self.ahead_bytes += record.num_bytes if prefetched else -record.num_bytes
            if prefetched:
                self.ahead[record.number] = record
            else:
                self.ahead.pop(record.number, None)

    def recount(self, records: Iterable[Record]) -> None:
        """Take all sums anew from the living records."""
        records = list(records)
        self.sweep(None)
        resident = sum(record.num_bytes for record in records if record.counted)
        resident += sum(num_bytes for _, num_bytes in self._in_use.values())
        self._change(resident - self.resident_bytes)
        self.ahead = {record.number: record for record in records if record.prefetched}
        self.ahead_bytes = sum(record.num_bytes for record in self.ahead.values())

    def _change(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)
