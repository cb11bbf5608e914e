"""The memory that a plan runs in: one arena, one block of host memory, one extent of a file.

Each is taken once, when a plan is bound, and nothing is allocated for a value afterwards. The
plan says where on the device a value is; where its copies lie in host memory and in the file is
decided here, by the packer, from the intervals that the plan gives them.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterator

import torch

from penstock.graph import StepGraph
from penstock.memory import ExtentFile, FileStore, Tier
from penstock.planner import Buffer, Copy, Plan, pack

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 2**20
_PACK_SECONDS = 1.0
_HOST_UNIT_BYTES = 512  # direct I/O takes such addresses without a copy


class Block:
    """Bytes of one tier, addressed by offset.

    Attributes:
        tier: Which tier.
        tensor: All of it, as a tensor of bytes. Of a file it is a mapping, for whoever looks at
            parameters between steps; transfers go past it.
        num_bytes: How many.
    """

    def __init__(self, tier: Tier, tensor: torch.Tensor, num_bytes: int) -> None:
        self.tier = tier
        self.tensor = tensor
        self.num_bytes = num_bytes

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The bytes `[offset, offset + num_bytes)`, not a copy."""
        return self.tensor[offset : offset + num_bytes]

    def close(self) -> None:
        """Let go of what holds the block; tensors that view it stay valid."""


class FileBlock(Block):
    """One extent of a nameless file, preallocated, so that no transfer finds the disk full.

    Tensors may view its mapping while no transfer of the same bytes is under way: the kernel keeps
    direct I/O and the mapping coherent (open(2), "O_DIRECT", as long as both do not overlap in
    time), which a step's order ensures.
    """

    def __init__(self, store: FileStore, num_bytes: int) -> None:
        self.file = ExtentFile(store)
        try:
            self.extent = self.file.allocate(max(num_bytes, PAGE_BYTES))
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

    def close(self) -> None:
        self.file.close()


def anonymous(num_bytes: int) -> torch.Tensor:
    """Return fresh memory that begins at a page, as a tensor of bytes."""
    memory = mmap.mmap(-1, max(num_bytes, PAGE_BYTES))
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def offsets_of_copies(graph: StepGraph, plan: Plan, tier: Tier) -> tuple[dict[int, int], int]:
    """Give the copies of a tier places in one block.

    Args:
        graph: The step.
        plan: The plan.
        tier: Host or file.

    Returns:
        For each copy (index in `plan.copies`) its first byte, and the bytes of the block. Copies of
        one value that meet where the step begins have one place.
    """
    unit = PAGE_BYTES if tier is Tier.FILE else _HOST_UNIT_BYTES
    chains = list(_chains(graph, plan, tier))
    buffers = [_buffer(plan, chain, unit) for chain in chains]
    packing = pack(buffers, None, _PACK_SECONDS, 0)
    offsets = {
        index: offset
        for chain, offset in zip(chains, packing.offsets, strict=True)
        for index in chain
    }
    return offsets, packing.height


def _chains(graph: StepGraph, plan: Plan, tier: Tier) -> Iterator[list[int]]:
    """Groups of copies that are one place: one that ends the step, and one that begins the next."""
    num_positions = len(plan.order)
    written = {
        (transfer.value, transfer.start)
        for transfer in plan.transfers
        if transfer.link.destination is tier
    }
    begins: dict[int, int] = {}  # storage: copy that is there when the step begins
    ends: defaultdict[int, list[int]] = defaultdict(list)
    alone = []
    for index, copy in enumerate(plan.copies):
        if copy.tier is not tier:
            continue
        storage = graph.storages[graph.storage_of_value[copy.value]]
        carried = storage.persistent and copy.start == 0 and copy.value == storage.initial
        if carried and (copy.value, 0) not in written:
            begins[graph.storage_of_value[copy.value]] = index
        elif storage.persistent and copy.value == storage.final and copy.end == num_positions:
            ends[graph.storage_of_value[copy.value]].append(index)
        else:
            alone.append(index)
    for index in alone:
        yield [index]
    for number, index in begins.items():
        yield [index, *ends.pop(number, [])]
    for rest in ends.values():
        yield from ([index] for index in rest)


def _buffer(plan: Plan, chain: list[int], unit: int) -> Buffer:
    num_positions = len(plan.order)
    copies: list[Copy] = [plan.copies[index] for index in chain]
    size = -(-copies[0].num_bytes // unit) * unit
    taken = []
    for copy in copies:
        taken.append((copy.start, min(copy.end, num_positions)))
        if copy.end > num_positions:
            taken.append((0, copy.end - num_positions))
    taken.sort()
    gaps, reached = [], taken[0][1]
    for start, end in taken[1:]:
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, end)
    return Buffer(taken[0][0], reached, size, alignment=unit, gaps=tuple(gaps))
