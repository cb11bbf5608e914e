"""The memory that a plan runs in: one arena, one block of host memory, one extent of a file.

Each is taken once, when a plan is bound, and nothing is allocated for a value afterwards. The
plan says where on the device a value is; where its copies lie in host memory and in the file is
decided here, by the packer, from the intervals that the plan gives them.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from penstock.executor._device import PAGE_BYTES, Device
from penstock.graph import StepGraph
from penstock.memory import ExtentFile, FileStore, Tier
from penstock.planner import Buffer, Copy, Plan, pack

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

    def alone(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The same bytes as a storage of their own.

        Who saves a tensor saves its storage, so what the caller sees must not show all the rest.
        """
        return torch.from_dlpack(self.bytes_at(offset, num_bytes))

    def close(self) -> None:
        """Let go of what holds the block; tensors that view it stay valid."""


class HostBlock(Block):
    """Host memory that the device's copies may go to and come from."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        memory = device.host(num_bytes)
        super().__init__(Tier.HOST, memory, num_bytes)
        self._let_go = weakref.finalize(self, device.let_go, memory)

    def close(self) -> None:
        self._let_go()


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

    def put_away(self, offset: int, num_bytes: int) -> None:
        """Write pages of the mapping to the file, and take them out of memory."""
        begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = min(offset + num_bytes, self.extent.num_bytes) - begin
        self._mapping.flush(begin, length)
        self._mapping.madvise(mmap.MADV_DONTNEED, begin, length)

    def read(self, offset: int, address: int, num_bytes: int) -> None:
        """Read from the file into memory."""
        self.file.read(self.extent, address, num_bytes, offset)

    def close(self) -> None:
        self.file.close()


class Layout(NamedTuple):
    """Where the copies of a plan lie below the device.

    Attributes:
        offsets: For each tier and each copy there (index in `plan.copies`) its first byte in the
            tier's block. Copies of one value that meet where the step begins have one place.
        num_bytes: For each tier the bytes of the block; 0 if the plan does not use it.
        homes: For each tier the places that last from step to step, by the storages' names.
    """

    offsets: dict[Tier, dict[int, int]]
    num_bytes: dict[Tier, int]
    homes: dict[Tier, dict[str, int]]


def layout_of(graph: StepGraph, plan: Plan, others: Sequence[Layout] = ()) -> Layout:
    """Give the copies of a plan places in the blocks of host memory and the file.

    Args:
        graph: The step.
        plan: The plan.
        others: Layouts of plans with which this one takes turns in the same blocks: what lasts from
            step to step and has a place there already keeps it, so nothing has to move.
    """
    made = Layout({}, {Tier.DEVICE: plan.arena_bytes}, {})
    for tier in (Tier.HOST, Tier.FILE):
        unit = PAGE_BYTES if tier is Tier.FILE else _HOST_UNIT_BYTES
        known = {name: offset for other in others for name, offset in other.homes[tier].items()}
        chains = list(_chains(graph, plan, tier))
        names = [_name_of_home(graph, plan, chain) for chain in chains]
        buffers = _where_they_were([_buffer(plan, chain, unit) for chain in chains], names, known)
        packing = pack(buffers, None, _PACK_SECONDS, 0)
        places = list(zip(chains, names, packing.offsets, strict=True))
        made.offsets[tier] = {index: at for chain, _, at in places for index in chain}
        made.num_bytes[tier] = packing.height
        made.homes[tier] = known | {name: at for _, name, at in places if name is not None}
    return made


def _name_of_home(graph: StepGraph, plan: Plan, chain: list[int]) -> str | None:
    """The name of the storage whose place lasts from step to step; None if this one does not."""
    copy = plan.copies[chain[0]]
    storage = graph.storages[graph.storage_of_value[copy.value]]
    begins = copy.start == 0 and copy.value == storage.initial
    goes_on = copy.end > len(plan.order) and copy.value == storage.final
    return storage.name if storage.persistent and (begins or goes_on) else None


def _where_they_were(
    buffers: list[Buffer], names: list[str | None], known: Mapping[str, int]
) -> list[Buffer]:
    """Give homes the places that they have in other plans, where these do not overlap."""
    taken: list[tuple[int, int]] = []
    found = []
    for buffer, name in zip(buffers, names, strict=True):
        begin = known.get(name) if name is not None else None
        end = (begin or 0) + buffer.size
        if begin is None or any(begin < high and low < end for low, high in taken):
            found.append(buffer)
            continue
        taken.append((begin, end))
        found.append(dataclasses.replace(buffer, offset=begin))
    return found


class Blocks:
    """The memory of one plan, or of several that take turns: as much as the largest wants.

    Args:
        layouts: Of the plans.
        store: The file tier; None if there is none.
        device: Where operators run.
        before: The memory of plans from which these take over; what of it is large enough stays.

    Attributes:
        layouts, device: As given.
        born: Storages that have never been anywhere else, by name.

    Raises:
        StoreError: The file cannot be had, or has not enough room.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        store: FileStore | None,
        device: Device,
        before: Blocks | None = None,
    ) -> None:
        self.layouts, self.device = layouts, device
        self.born: set[str] = set() if before is None else before.born
        self._store = store
        self._aside: list[weakref.finalize] = []
        held = {} if before is None else {block.tier: block for block in before}
        found: dict[Tier, Block] = {}
        for tier in (Tier.DEVICE, Tier.HOST, Tier.FILE):
            num_bytes = max(layout.num_bytes[tier] for layout in layouts)
            if tier in held and num_bytes <= held[tier].num_bytes:
                found[tier] = held[tier]
            elif num_bytes or tier is Tier.DEVICE:
                found[tier] = self._taken(tier, num_bytes)
        self.arena = found.pop(Tier.DEVICE)
        self.below = found

    def _taken(self, tier: Tier, num_bytes: int) -> Block:
        if tier is Tier.DEVICE:
            return Block(tier, self.device.arena(num_bytes), num_bytes)
        if tier is Tier.HOST:
            return HostBlock(self.device, num_bytes)
        assert self._store is not None
        return FileBlock(self._store, num_bytes)

    def __iter__(self) -> Iterator[Block]:
        """All blocks, the arena first."""
        yield self.arena
        yield from self.below.values()

    def hold(self, address: int) -> bool:
        """Whether an address lies in one of the blocks."""
        return any(
            block.tensor.data_ptr() <= address < block.tensor.data_ptr() + block.tensor.numel()
            for block in self
        )

    def aside(self, num_bytes: int) -> torch.Tensor:
        """Take memory for a copy that is needed only if a step fails: below the device, and in a
        file where there is a store.
        """
        if self._store is None or self.device.is_behind:
            memory = self.device.host(num_bytes)
            self._aside.append(weakref.finalize(self, self.device.let_go, memory))
            return memory
        block = FileBlock(self._store, num_bytes)
        self._aside.append(weakref.finalize(self, block.close))
        return block.tensor[:num_bytes]

    def close(self, after: Blocks | None = None) -> None:
        """Let go of the file; tensors that look at the memory stay valid.

        Args:
            after: The memory of plans that have taken over; what both have stays.
        """
        for let_go in self._aside:
            let_go()
        for tier, block in self.below.items():
            if after is None or after.below.get(tier) is not block:
                block.close()


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
