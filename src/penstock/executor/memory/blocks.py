"""Memory that plans run in: one arena, one block of host memory, one extent of a file.

Each is allocated once, when a plan is bound, and nothing is allocated for a value afterwards. A
plan's offsets in the arena are its own; a `Layout` has those of its copies below the device.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

import torch

from penstock.executor.device.base import Device
from penstock.executor.memory.residency import Layout
from penstock.memory import ExtentFile, FileStore, Tier
from penstock.memory.pages import DIRECT_IO_BYTES, PAGE_BYTES


class TierBlock:
    """Bytes of one tier, addressed by offset.

    Attributes:
        tier: The tier.
        tensor: All of it, as a tensor of bytes. Of a file it is a mapping, for reads and writes of
            the user between steps; transfers bypass it.
        num_bytes: Its length.
    """

    def __init__(self, tier: Tier, tensor: torch.Tensor, num_bytes: int) -> None:
        self.tier = tier
        self.tensor = tensor
        self.num_bytes = num_bytes

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes `[offset, offset + num_bytes)`, not a copy."""
        return self.tensor[offset : offset + num_bytes]

    def storage_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the same bytes as a storage of their own.

        `torch.save` writes a tensor's whole storage, so the user's tensors must not share that of
        the block.
        """
        return torch.from_dlpack(self.bytes_at(offset, num_bytes))

    def close(self) -> None:
        """Release the block's resources; tensors that view it stay valid."""


class HostBlock(TierBlock):
    """Host memory that the device copies to and from."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        memory = device.allocate_host(num_bytes)
        super().__init__(Tier.HOST, memory, num_bytes)
        self._unpin = weakref.finalize(self, device.unpin, memory)

    def close(self) -> None:
        """Unpin the memory."""
        self._unpin()


class FileBlock(TierBlock):
    """One extent of a nameless file, preallocated, so that no transfer finds the disk full.

    Tensors may view its mapping while no transfer of the same bytes is under way: the kernel keeps
    direct I/O and the mapping coherent (open(2), "O_DIRECT", as long as both do not overlap in
    time), which a step's order ensures.
    """

    def __init__(self, store: FileStore, num_bytes: int) -> None:
        self.file = ExtentFile(store)
        try:
            self.extent = self.file.allocate(max(num_bytes, DIRECT_IO_BYTES))
            descriptor = os.open(self.file.descriptor_path, os.O_RDWR)
            try:
                self._mapping = mmap.mmap(
                    descriptor, self.extent.num_bytes, offset=self.extent.offset
                )
            finally:
                os.close(descriptor)
        except BaseException:
            self.file.close()
            raise
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        super().__init__(Tier.FILE, tensor, num_bytes)

    def write(self, offset: int, address: int, num_bytes: int) -> None:
        """Write memory to the file."""
        self.file.write(self.extent, address, num_bytes, offset)

    def read(self, offset: int, address: int, num_bytes: int) -> None:
        """Read from the file into memory."""
        self.file.read(self.extent, address, num_bytes, offset)

    def evict_pages(self, offset: int, num_bytes: int) -> None:
        """Write pages of the mapping to the file, and take them out of memory."""
        begin = offset // PAGE_BYTES * PAGE_BYTES
        length = min(offset + num_bytes, self.extent.num_bytes) - begin
        self._mapping.flush(begin, length)
        self._mapping.madvise(mmap.MADV_DONTNEED, begin, length)

    def close(self) -> None:
        """Close the file, which frees the extent."""
        self.file.close()


class SharedBlocks:
    """Memory of one plan, or of several that take turns: per tier as much as the largest needs.

    Args:
        layouts: The plans' layouts.
        store: The file tier, if there is one.
        device: The device that operators run on.
        before: Memory of plans that are replaced; its blocks are kept if they are large enough.

    Attributes:
        layouts, device: As given.
        materialized: Names of storages that were on the meta device and exist nowhere else.

    Raises:
        StoreError: The file cannot be made, or has not enough room.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        store: FileStore | None,
        device: Device,
        before: SharedBlocks | None = None,
    ) -> None:
        self.layouts, self.device = layouts, device
        self.materialized: set[str] = set() if before is None else before.materialized
        self._store = store
        self._undo_blocks: list[TierBlock] = []
        kept = {} if before is None else {block.tier: block for block in before}
        blocks: dict[Tier, TierBlock] = {}
        for tier in (Tier.DEVICE, Tier.HOST, Tier.FILE):
            num_bytes = max(layout.num_bytes[tier] for layout in layouts)
            if tier in kept and num_bytes <= kept[tier].num_bytes:
                blocks[tier] = kept[tier]
            elif num_bytes or tier is Tier.DEVICE:
                blocks[tier] = self._allocate(tier, num_bytes)
        self.arena = blocks.pop(Tier.DEVICE)
        self.below = blocks

    def _allocate(self, tier: Tier, num_bytes: int) -> TierBlock:
        if tier is Tier.DEVICE:
            return TierBlock(tier, self.device.allocate_arena(num_bytes), num_bytes)
        if tier is Tier.HOST:
            return HostBlock(self.device, num_bytes)
        assert self._store is not None
        return FileBlock(self._store, num_bytes)

    def __iter__(self) -> Iterator[TierBlock]:
        """Iterate over all blocks, the arena first."""
        yield self.arena
        yield from self.below.values()

    def contains(self, address: int) -> bool:
        """Return whether an address lies in one of the blocks."""
        return any(
            block.tensor.data_ptr() <= address < block.tensor.data_ptr() + block.tensor.numel()
            for block in self
        )

    def allocate_undo(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory for a copy that only a failed step needs: below the device, and in a
        file if there is a store.
        """
        in_host = self._store is None or self.device.is_behind
        self._undo_blocks.append(self._allocate(Tier.HOST if in_host else Tier.FILE, num_bytes))
        return self._undo_blocks[-1].tensor[:num_bytes]

    def close(self, after: SharedBlocks | None = None) -> None:
        """Release host memory and file; tensors that view the memory stay valid.

        Args:
            after: Memory of plans that have taken over; blocks of both stay.
        """
        for block in self._undo_blocks:
            block.close()
        for tier, block in self.below.items():
            if after is None or after.below.get(tier) is not block:
                block.close()
