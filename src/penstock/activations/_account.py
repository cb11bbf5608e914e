"""How many saved bytes the device tier holds, and on whose behalf; under the engine's lock."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from penstock.activations._record import Record
from penstock.memory import Ledger, Tier


class DeviceAccount:
    """Saved bytes resident on the device tier, those of them read ahead, and what is in use."""

    def __init__(self, ledger: Ledger) -> None:
        self.resident_bytes = 0
        self.ahead_bytes = 0  # prefetched and not asked for yet
        self._ledger = ledger
        self._in_use: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def add(self, record: Record) -> None:
        """The record's bytes are, or are about to be, resident."""
        if not record.counted:
            record.counted = True
            # What was given up, and is taken back before it was gone, counts once.
            back = [entry for entry in self._in_use if entry[0] is record.weak]
            if back:
                self._in_use = [entry for entry in self._in_use if entry[0] is not record.weak]
            self._change(record.num_bytes - sum(num_bytes for _, num_bytes in back))

    def remove(self, record: Record) -> None:
        """The record's bytes are resident no more."""
        if record.counted:
            record.counted = False
            self._change(-record.num_bytes)

    def release(self, record: Record) -> None:
        """We gave the storage up, but autograd may be using it: it counts until it is gone."""
        if record.counted and record.weak() is not None:
            record.counted = False
            self._in_use.append((record.weak, record.num_bytes))
        else:
            self.remove(record)

    def sweep(self) -> None:
        """Take off what was in use and is gone."""
        if not self._in_use:
            return
        self._in_use, in_use = [], self._in_use
        for weak, num_bytes in in_use:
            if weak() is None:
                self._change(-num_bytes)
            else:
                self._in_use.append((weak, num_bytes))

    def set_prefetched(self, record: Record, prefetched: bool) -> None:
        """Whether the record was read ahead, and nobody has asked for it yet."""
        if record.prefetched != prefetched:
            record.prefetched = prefetched
            self.ahead_bytes += record.num_bytes if prefetched else -record.num_bytes

    def recount(self, records: Iterable[Record]) -> None:
        """Take all sums anew from the living records."""
        records = list(records)
        self.sweep()
        resident = sum(record.num_bytes for record in records if record.counted)
        resident += sum(num_bytes for _, num_bytes in self._in_use)
        self._change(resident - self.resident_bytes)
        self.ahead_bytes = sum(record.num_bytes for record in records if record.prefetched)

    def _change(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)
