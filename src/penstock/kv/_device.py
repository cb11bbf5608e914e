"""Device tier: slots of records and the staging memory, together under one budget."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from penstock.errors import CapacityError
from penstock.kv._areas import Slots
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import Buffer
from penstock.memory import Ledger, Tier
from penstock.units import format_bytes

_BUFFER_BYTES = 4 * 2**20
_STAGING_SHARE = 8  # a buffer takes at most this part of the budget


class _Residents:
    """Slots of the records of one layout, and which record is in which."""

    def __init__(self, layout: BlockLayout) -> None:
        self.slots = Slots(layout.record_bytes)
        self.slot_of = np.full(0, -1, dtype=np.int64)  # by record: page * H + head

    def grow(self, num_records: int) -> None:
        if num_records > len(self.slot_of):
            more = max(num_records, 2 * len(self.slot_of), 1024) - len(self.slot_of)
            self.slot_of = np.concatenate([self.slot_of, np.full(more, -1, dtype=np.int64)])


class DeviceTier:
    """Records that are resident, in slots; a record is there or not, its page as a whole or not.

    Args:
        budget_bytes: The most bytes of slots, staging and selectors.
        ledger: Account of bytes.
    """

    def __init__(self, budget_bytes: int, ledger: Ledger) -> None:
        self.budget_bytes = budget_bytes
        self.selector_bytes = 0
        self._ledger = ledger
        self._residents: dict[BlockLayout, _Residents] = {}
        self._slot_bytes = 0
        self._buffers: list[Buffer] = []
        self._next_buffer = 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.area.num_bytes for buffer in self._buffers)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots in use."""
        return self._slot_bytes

    def room(self, layout: BlockLayout) -> int:
        """Return how many more records the budget has room for."""
        used_bytes = self._slot_bytes + self.staging_bytes + self.selector_bytes
        return max(0, self.budget_bytes - used_bytes) // layout.record_bytes

    def set_selector_bytes(self, num_bytes: int) -> None:
        """Count the bytes that a selector keeps.

        Raises:
            CapacityError: The budget has no room for them beside what is resident.
        """
        used_bytes = self._slot_bytes + self.staging_bytes + num_bytes
        if num_bytes > self.selector_bytes and used_bytes > self.budget_bytes:
            raise CapacityError(
                f"the selector keeps {format_bytes(num_bytes)}, which device_memory="
                f"{format_bytes(self.budget_bytes)} has no room for; raise device_memory"
            )
        self._ledger.add(Tier.DEVICE, num_bytes - self.selector_bytes)
        self.selector_bytes = num_bytes

    def make_staging(self, layout: BlockLayout) -> None:
        """Map the buffers, each for whole pages; larger ones where a layer has larger pages."""
        if self._buffers and self._buffers[0].area.num_bytes >= layout.page_bytes:
            return
        for buffer in self._buffers:
            buffer.wait()
        page = layout.page_bytes
        most = max(page, min(_BUFFER_BYTES, self.budget_bytes // _STAGING_SHARE) // page * page)
        num_buffers = 2 if self.budget_bytes - self._slot_bytes >= 2 * most else 1
        self._ledger.add(Tier.DEVICE, -self.staging_bytes)
        self._buffers = [Buffer(most) for _ in range(num_buffers)]
        self._ledger.add(Tier.DEVICE, self.staging_bytes)

    def take_buffer(self) -> Buffer:
        """Return the buffer whose turn it is, after its transfers have ended."""
        buffer = self._buffers[self._next_buffer % len(self._buffers)]
        self._next_buffer += 1
        buffer.wait()
        return buffer

    def wait(self) -> None:
        """Wait for all transfers of the buffers; the first error is raised."""
        for buffer in self._buffers:
            buffer.wait()

    def settle(self) -> None:
        """Wait for all transfers, whatever becomes of them: their errors were kept elsewhere."""
        for buffer in self._buffers:
            with contextlib.suppress(Exception):
                buffer.wait()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each buffer."""
        return self._buffers[0].area.num_bytes

    @property
    def num_buffers(self) -> int:
        """Buffers of the staging memory."""
        return len(self._buffers)

    def find(self, layout: BlockLayout, records: np.ndarray) -> np.ndarray:
        """Return the addresses of records, int64; 0 where they are not resident."""
        residents = self._of(layout)
        if not len(records):
            return np.zeros(0, dtype=np.int64)
        residents.grow(int(records.max()) + 1)
        slots = residents.slot_of[records]
        addresses = np.zeros(len(records), dtype=np.int64)
        there = slots >= 0
        addresses[there] = residents.slots.addresses(slots[there])
        return addresses

    def put(self, layout: BlockLayout, record: int) -> torch.Tensor:
        """Return the slot of a record that becomes resident, flat, to be filled at once."""
        residents = self._of(layout)
        residents.grow(record + 1)
        slot = residents.slots.take()
        residents.slot_of[record] = slot
        self._count(layout.record_bytes)
        return residents.slots.view(slot, layout.dtype)

    def drop(self, layout: BlockLayout, page: int) -> None:
        """Forget the records of a page."""
        residents = self._of(layout)
        first = page * layout.num_heads
        residents.grow(first + layout.num_heads)
        for record in range(first, first + layout.num_heads):
            slot = int(residents.slot_of[record])
            if slot >= 0:
                residents.slot_of[record] = -1
                residents.slots.give_back(slot)
                self._count(-layout.record_bytes)

    def _of(self, layout: BlockLayout) -> _Residents:
        residents = self._residents.get(layout)
        if residents is None:
            residents = self._residents[layout] = _Residents(layout)
        return residents

    def _count(self, num_bytes: int) -> None:
        self._slot_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)
