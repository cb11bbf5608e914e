"""Device tier: slots of records and the staging memory, together under one budget."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from penstock.errors import CapacityError, InfeasibleError
from penstock.kv._areas import SlotMemory
from penstock.kv._cuda import CudaPlatform
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTiers, TransferBuffer
from penstock.kv._pages import PageTable
from penstock.kv._platform import Platform
from penstock.kv._residency import RecordResidency
from penstock.memory import Ledger, Tier
from penstock.units import ceil_bytes, format_bytes

_BUFFER_BYTES = 2 * 2**20
_LEAST_BUFFER_BYTES = 2**20  # of smaller ones there are no more than two
_STAGING_SHARE = 2  # of the budget: staging takes at most 1 / this, and
_SELECTIVE_SHARE = 8  # the buffers of a file where steps read few blocks, most of them resident
_MOST_BUFFERS = 8
_NUM_CHUNKS = 2  # one is filled while another one is read
_CHUNK_BYTES = 4 * 2**20


@dataclass(eq=False)
class _Residents:
    """Records of one layout: number page * H + head, slots, and which record is in which."""

    residency: RecordResidency
    slots: SlotMemory


class DeviceTier:
    """Records that are resident, in slots.

    A page that was not written below yet is resident as a whole; it is written when one of its
    records loses its slot.

    Args:
        platform: The device.
        budget_bytes: The most bytes of slots, staging and selectors.
        pages: Places of pages below.
        lower: The tiers below.
        ledger: Account of bytes.
        is_selective: Whether a selector chooses the blocks of a step.
    """

    def __init__(
        self,
        platform: Platform,
        budget_bytes: int,
        pages: PageTable,
        lower: PageTiers,
        ledger: Ledger,
        *,
        is_selective: bool,
    ) -> None:
        self.platform = platform
        self.budget_bytes = budget_bytes
        self.selector_bytes = 0
        self.staging_bytes = 0
        self._piece_bytes = 0  # the most that passes the staging memory at once
        self._pages = pages
        self._lower = lower
        self._ledger = ledger
        self._buffer_share = _SELECTIVE_SHARE if is_selective else _STAGING_SHARE
        self._residents: dict[BlockLayout, _Residents] = {}
        self._slot_bytes = 0
        self.version = 0  # of the places of records: a change makes other numbers
        self._buffers: list[TransferBuffer] = []
        self._idle: deque[TransferBuffer] = deque()  # the one that was given back first is first

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots in use, or of all where they are occupied when they are mapped."""
        return self._slot_bytes

    @property
    def _left_bytes(self) -> int:
        return self.budget_bytes - self._slot_bytes - self.staging_bytes - self.selector_bytes

    def room(self, layout: BlockLayout) -> int:
        """Return how many more records the budget has room for."""
        residency, slots = self._of(layout).residency, self._of(layout).slots
        num_free = residency.num_slots - residency.num_resident
        if self.platform.is_lazy:  # slots that a selector took out of use do not come back
            return min(max(0, self._left_bytes) // layout.record_bytes, num_free)
        return max(0, min(num_free, self._most_slots(slots) - residency.num_resident))

    def _most_slots(self, slots: SlotMemory) -> int:
        """Return how many slots whole slabs within the budget have."""
        bytes_of_slabs = max(0, slots.mapped_bytes + self._left_bytes)
        return bytes_of_slabs // slots.slab_bytes * slots.slots_per_slab

    def check_budget(self, least_bytes: int, block_tokens: int) -> None:
        """Raise `InfeasibleError` if the budget is below the bytes of one block per layer."""
        if self.budget_bytes < least_bytes:
            raise InfeasibleError(
                f"device_memory={format_bytes(self.budget_bytes)} is below one block per layer, "
                f"{ceil_bytes(least_bytes)} with blocks of {block_tokens} tokens; raise "
                "device_memory or lower block_tokens",
                minimum_device_bytes=least_bytes,
                proved=True,
            )

    def count_selector(self, selector: object) -> None:
        """Count the bytes that a selector keeps, as `set_selector_bytes` does."""
        self.set_selector_bytes(int(getattr(selector, "nbytes", 0)))

    def set_selector_bytes(self, num_bytes: int) -> None:
        """Count the bytes that a selector keeps; records make room for them.

        Raises:
            CapacityError: The budget has no room for them beside the staging memory.
        """
        more = num_bytes - self.selector_bytes
        if more > 0 and not self._make_room(more):
            raise CapacityError(
                f"the selector keeps {format_bytes(num_bytes)} so far, which "
                f"device_memory={format_bytes(self.budget_bytes)} has no room for; raise it to "
                f"{self._name_least(num_bytes)}, and further for more layers and tokens"
            )
        self._ledger.add(Tier.DEVICE, more)
        self.selector_bytes = num_bytes

    def _name_least(self, selector_bytes: int) -> str:
        """Write a budget that holds so much of a selector, and the staging memory that it has."""
        parts = _STAGING_SHARE if self.platform.has_staging else self._buffer_share
        beside_share = -(-selector_bytes * parts // (parts - 1))
        # Staging is at most that share, or two pieces of the blocks that pass it.
        return ceil_bytes(max(beside_share, selector_bytes + 2 * self._piece_bytes))

    def _make_room(self, num_bytes: int) -> bool:
        """Take slots out of use until so many bytes are left; False where they are too few."""
        for layout, residents in self._residents.items():
            excess = num_bytes - self._left_bytes
            if not self.platform.is_lazy:
                self._cut(layout, residents, num_bytes)
            elif excess > 0:
                self._shrink(layout, residents, -(-excess // layout.record_bytes))
        return num_bytes <= self._left_bytes

    def _shrink(self, layout: BlockLayout, residents: _Residents, num_records: int) -> None:
        """Take the slots of so many records out of use, and free ones."""
        residency = residents.residency
        num_free = residency.num_slots - residency.num_resident
        evicted, slots = residency.shrink(num_free + num_records)
        self.version += 1
        if len(evicted):
            self._save(layout, evicted, residents.slots.addresses(slots))
        self._count(-len(evicted) * layout.record_bytes)

    def _cut(self, layout: BlockLayout, residents: _Residents, num_bytes: int) -> None:
        """Give back the last slabs, such that so many bytes are left, and use no slot beyond."""
        slots = residents.slots
        bytes_of_slabs = max(0, slots.mapped_bytes + self._left_bytes - num_bytes)
        most = bytes_of_slabs // slots.slab_bytes * slots.slots_per_slab
        if most < residents.residency.num_slots:
            evicted, numbers = residents.residency.cut(most)
            self.version += 1
            if len(evicted):
                self._save(layout, evicted, slots.addresses(numbers))
            before = slots.mapped_bytes
            slots.cut(most)
            self._occupy(slots.mapped_bytes - before)

    def restart(self) -> None:
        """Make all slots anew, after the last record has left."""
        for residents in self._residents.values():
            assert residents.residency.num_resident == 0, "no record is resident"
        self._residents.clear()
        self._occupy(-self._slot_bytes)
        self.version += 1

    def make_staging(self, page_bytes: int, *, has_file: bool) -> None:
        """Make buffers of files and chunks, each for whole pages; larger ones for larger pages."""
        self._piece_bytes = max(self._piece_bytes, page_bytes)
        self.make_chunks(page_bytes)
        if has_file and (not self._buffers or self.buffer_bytes < page_bytes):
            self._make_buffers(page_bytes)

    def make_chunks(self, num_bytes: int) -> None:
        """Make chunks of at least so many bytes, in place of slots, where blocks pass such.

        Raises:
            CapacityError: The budget has no room for one.
        """
        platform = self.platform
        if not isinstance(platform, CudaPlatform) or platform.chunk_bytes >= num_bytes:
            return
        number, each = self._divide_staging(num_bytes, _NUM_CHUNKS, _CHUNK_BYTES)
        if not self._make_room(number * each - self.staging_bytes):
            number, each = 1, num_bytes
            if not self._make_room(each - self.staging_bytes):
                raise CapacityError(
                    f"a block of every sequence of a layer takes {format_bytes(num_bytes)}, which "
                    f"device_memory={format_bytes(self.budget_bytes)} has no room for; raise "
                    "device_memory, or lower block_tokens or the number of sequences"
                )
        platform.make_chunks(number, each)
        self._count_staging(number * each - self.staging_bytes)

    def _make_buffers(self, page_bytes: int) -> None:
        for buffer in self._buffers:
            buffer.wait()
        assert len(self._idle) == len(self._buffers), "no buffer is in use"
        in_host = self.platform.has_staging
        number, each = _MOST_BUFFERS, max(1, _BUFFER_BYTES // page_bytes) * page_bytes
        if not in_host:
            number, each = self._divide_staging(
                page_bytes, _MOST_BUFFERS, _BUFFER_BYTES, self._buffer_share
            )
        more = number * each - sum(buffer.area.num_bytes for buffer in self._buffers)
        if not in_host and more > 0 and not self._make_room(more):
            raise CapacityError(
                f"a block takes {format_bytes(page_bytes)}, which device_memory="
                f"{format_bytes(self.budget_bytes)} has no room for beside the "
                f"{format_bytes(self.selector_bytes)} of the selector; raise it to "
                f"{self._name_least(self.selector_bytes)}, and further for more layers and tokens"
            )
        area = self.platform.host_area(number * each)
        self._buffers = [TransferBuffer(part) for part in area.cut(number)]
        self._idle = deque(self._buffers)
        if in_host:
            self._ledger.add(Tier.HOST, more)
        else:
            self._count_staging(more)

    def _divide_staging(
        self, piece_bytes: int, most: int, most_bytes: int, parts: int = _STAGING_SHARE
    ) -> tuple[int, int]:
        """Return a number of parts of the staging memory, and the bytes of each: whole pieces."""
        share = self.budget_bytes // parts
        number = min(most, max(2, share // max(piece_bytes, _LEAST_BUFFER_BYTES)))
        each = min(most_bytes, share // number) // piece_bytes * piece_bytes
        each = max(piece_bytes, each)
        return max(1, min(number, (self.budget_bytes - self._slot_bytes) // each)), each

    def _count_staging(self, num_bytes: int) -> None:
        self.staging_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)

    def take_buffer(self) -> TransferBuffer:
        """Return a buffer after its transfers have ended, to be given back.

        Raises:
            StoreError: An earlier write of it failed; the buffer is not taken then.
        """
        self._idle[0].wait()
        buffer = self._idle.popleft()
        buffer.wait_for_uses()
        return buffer

    def give_back(self, buffer: TransferBuffer) -> None:
        """Let a buffer be taken again; writes of it, and launched reads, may be under way."""
        buffer.uses = self.platform.marks()
        self._idle.append(buffer)

    @property
    def num_idle(self) -> int:
        """Buffers that can be taken."""
        return len(self._idle)

    def wait(self) -> None:
        """Wait for the writes of buffers; the first error is raised."""
        for buffer in self._idle:
            buffer.wait()

    def settle(self) -> None:
        """Wait for writes, whatever becomes of them: their errors were kept elsewhere."""
        for buffer in self._idle:
            with contextlib.suppress(Exception):
                buffer.wait()

    @property
    def is_writing(self) -> bool:
        """True while writes are under way."""
        return any(buffer.is_moving for buffer in self._idle)

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
        slots = residents.residency.look_up(records)
        addresses = np.zeros(len(records), dtype=np.int64)
        there = slots >= 0
        addresses[there] = residents.slots.addresses(slots[there])
        return addresses

    def residency(self, layout: BlockLayout) -> RecordResidency:
        """Return which records of a layout are in which slot."""
        return self._of(layout).residency

    def admit(self, layout: BlockLayout, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give slots to records that are worth one, to be filled at once.

        Args:
            layout: Their layout.
            records: Distinct records without a slot.

        Returns:
            The records that have one now, and its address; both int64.
        """
        residents = self._of(layout)
        admitted, slots, evicted = residents.residency.admit(records, self.room(layout))
        if len(slots):
            before = residents.slots.mapped_bytes
            residents.slots.reach(int(slots.max()) + 1)
            if not self.platform.is_lazy:
                self._occupy(residents.slots.mapped_bytes - before)
        addresses = residents.slots.addresses(slots)
        if len(evicted):
            self._save(layout, evicted, addresses[len(addresses) - len(evicted) :])
        self.version += len(admitted) > 0
        self._count((len(admitted) - len(evicted)) * layout.record_bytes)
        return admitted, addresses

    def _save(self, layout: BlockLayout, evicted: np.ndarray, addresses: np.ndarray) -> None:
        """Write the pages of records that lost their slots, where this was not done before."""
        heads = np.arange(layout.num_heads)
        for page in np.unique(evicted // layout.num_heads).tolist():
            if self._pages.is_below(page):
                continue
            records = page * layout.num_heads + heads
            places = self.find(layout, records)
            of_page = evicted // layout.num_heads == page
            places[evicted[of_page] % layout.num_heads] = addresses[of_page]
            assert places.all(), "a page that is nowhere else is resident as a whole"
            self._lower.save(page, layout, places)

    def drop(self, layout: BlockLayout, pages: np.ndarray) -> None:
        """Forget the records of pages."""
        heads = np.arange(layout.num_heads)
        records = (pages[:, None] * layout.num_heads + heads).ravel()
        self.drop_records(layout, records)

    def drop_records(self, layout: BlockLayout, records: np.ndarray) -> None:
        """Forget records, whether they are resident or not."""
        residency = self._of(layout).residency
        num_resident = int((residency.look_up(records) >= 0).sum())
        residency.drop(records)
        self.version += 1
        self._count(-num_resident * layout.record_bytes)

    def _of(self, layout: BlockLayout) -> _Residents:
        residents = self._residents.get(layout)
        if residents is None:
            slots = self.platform.make_slots(layout.record_bytes, self.budget_bytes)
            left = max(0, self.budget_bytes - self.staging_bytes - self.selector_bytes)
            most = left // slots.slot_bytes
            if not self.platform.is_lazy:
                most = left // slots.slab_bytes * slots.slots_per_slab
            residents = self._residents[layout] = _Residents(RecordResidency(most), slots)
        return residents

    def _count(self, num_bytes: int) -> None:
        """Count the bytes of slots that records take, or leave."""
        if self.platform.is_lazy:
            self._occupy(num_bytes)

    def _occupy(self, num_bytes: int) -> None:
        self._slot_bytes += num_bytes
        self._ledger.add(Tier.DEVICE, num_bytes)

    def close(self) -> None:
        """Give back the memory of slots and buffers."""
        self._residents.clear()
        self._buffers.clear()
        self._idle.clear()
        self.platform.close()
