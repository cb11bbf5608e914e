"""Memory in equal slots: mapped slab by slab as slots are used, reached by address or as a tensor.

Kernels read records by address, copies are made by tensors, and files need aligned addresses; one
mapping serves all three.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import numpy as np
import torch

from penstock.memory.pages import HUGE_PAGE_BYTES, advise_huge_pages, map_anonymous, round_up
from penstock.memory.raw_memory import address_of

SLAB_BYTES = 64 * 2**20


class Area:
    """A page-aligned mapping, which lives as long as a tensor of it does.

    One that fills half a huge page begins where one can, and asks for them: attention reads it
    faster, and direct I/O needs fewer requests. Pages become resident as they are written, so
    memory that is filled from its beginning occupies at most one more huge page than was written.

    Attributes:
        address: Where it begins.
        num_bytes: Its length.
    """

    def __init__(self, num_bytes: int) -> None:
        is_huge = num_bytes >= HUGE_PAGE_BYTES // 2
        mapped_bytes = round_up(num_bytes, HUGE_PAGE_BYTES) if is_huge else num_bytes
        mapping = map_anonymous(mapped_bytes + is_huge * HUGE_PAGE_BYTES, private=True)
        start = address_of(mapping)
        skipped = -start % HUGE_PAGE_BYTES if is_huge else 0
        self.address = start + skipped
        self.num_bytes = num_bytes
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)[skipped:]
        advise_huge_pages(self.address, mapped_bytes)

    def cut(self, num_parts: int) -> list[Self]:
        """Return equal parts of this memory, each of which keeps all of it alive."""
        parts = []
        for number in range(num_parts):
            part = copy.copy(self)
            part.num_bytes = self.num_bytes // num_parts
            part.address = self.address + number * part.num_bytes
            part._bytes = self._bytes[number * part.num_bytes :]
            parts.append(part)
        return parts

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `num_bytes` bytes from `offset` on as a flat tensor."""
        return self._bytes[offset : offset + num_bytes].view(dtype)


class SlotMemory:
    """Slots of equal length, numbered from 0, in slabs that are mapped when they are first used.

    Args:
        slot_bytes: Length of a slot.
        make_area: Function that maps so many bytes, as `Area` does.
        slab_bytes: The most bytes of a slab, where a slot is not longer.

    Attributes:
        slots_per_slab: Slots of a slab.
        slab_bytes: Bytes of a slab.
    """

    def __init__(
        self,
        slot_bytes: int,
        make_area: Callable[[int], Area] = Area,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_slab = max(1, slab_bytes // slot_bytes)
        self.slab_bytes = self.slots_per_slab * slot_bytes
        self._make_area = make_area
        self._areas: list[Area] = []
        self._bases = np.zeros(0, dtype=np.int64)
        self._num_slots = 0
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Slots that were taken."""
        return self._num_slots - len(self._free)

    @property
    def num_mapped(self) -> int:
        """Slots of all slabs."""
        return len(self._areas) * self.slots_per_slab

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all slabs."""
        return len(self._areas) * self.slab_bytes

    @property
    def is_full(self) -> bool:
        """True where another slot would be of another slab."""
        return self.num_used == self.num_mapped

    def take(self) -> int:
        """Return the number of a slot that is not in use."""
        if self._free:
            return self._free.pop()
        self.reach(self._num_slots + 1)
        self._num_slots += 1
        return self._num_slots - 1

    def give_back(self, slot: int) -> None:
        """Let a slot be taken again."""
        self._free.append(slot)

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """Return the addresses of slots, both int64."""
        slab, place = np.divmod(slots, self.slots_per_slab)
        return self._bases[slab] + place * self.slot_bytes

    def view(self, slot: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a slot as a flat tensor."""
        slab, place = divmod(slot, self.slots_per_slab)
        return self._areas[slab].view(place * self.slot_bytes, self.slot_bytes, dtype)

    def reach(self, num_slots: int) -> None:
        """Map the slots below `num_slots`, which the caller numbers itself."""
        while self.num_mapped < num_slots:
            self._areas.append(self._make_area(self.slab_bytes))
            self._bases = np.array([area.address for area in self._areas], dtype=np.int64)

    def cut(self, num_slots: int) -> None:
        """Give back the slabs of slots from `num_slots` on, which the caller numbers itself."""
        del self._areas[-(-num_slots // self.slots_per_slab) :]
        self._bases = self._bases[: len(self._areas)]
