"""Memory that plans run in: one arena, one block of host memory, one extent of a file, and views.

Each is allocated once, when a plan is bound, and nothing is allocated for a value afterwards. A
plan's offsets in the arena are its own; a `CopyLayout` has those of its copies below the device.
Values of no planned bytes (step counts, Python numbers, random states) lie in small tensors of
their own.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

import torch

from penstock.executor.device.base import Device
from penstock.executor.memory.residency import CopyLayout, ResidencyIndex, ResidencyInterval
from penstock.graph import Kind, StepGraph, TensorView
from penstock.graph.encoding import dtype_from_name
from penstock.graph.executable import is_on_host
from penstock.memory import ExtentFile, FileStore, Tier
from penstock.memory.pages import DIRECT_IO_BYTES, PAGE_BYTES
from penstock.planner import Plan


@dataclasses.dataclass(eq=False)
class TierBlock:
    """Bytes of one tier, addressed by offset."""

    tier: Tier
    tensor: torch.Tensor
    """All of it, as a tensor of bytes. Of a file it is a mapping, for reads and writes of the user
    between steps; transfers bypass it."""
    num_bytes: int

    def bytes_at(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return the bytes `[offset, offset + num_bytes)`, not a copy."""
        return self.tensor[offset : offset + num_bytes]

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
        self.write = functools.partial(self.file.write, self.extent)
        self.read = functools.partial(self.file.read, self.extent)
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        super().__init__(Tier.FILE, tensor, num_bytes)

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
        layouts: Sequence[CopyLayout],
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
        """Release host memory and file, but for blocks of `after`, which has taken over; tensors
        that view the memory stay valid.
        """
        for block in self._undo_blocks:
            block.close()
        for tier, block in self.below.items():
            if after is None or after.below.get(tier) is not block:
                block.close()


class PlanMemory:
    """A planned step with its memory.

    Attributes:
        graph: The planned graph.
        plan: A plan for it.
        index: The residency index of the plan.
        blocks: The memory, shared with plans that take turns with this one.
        arena: The block of the device.
        device: The device in torch's words.
    """

    def __init__(
        self, graph: StepGraph, plan: Plan, layout: CopyLayout, blocks: SharedBlocks
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.index = ResidencyIndex(graph, plan)
        self.blocks = blocks
        self.arena = blocks.arena
        self.device = blocks.device.device
        self._layout = layout
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self._storages: dict[tuple[Tier, int, int], torch.Tensor] = {}
        self._unplanned: dict[tuple[int, torch.device], torch.Tensor] = {}  # by storage

    def block_of(self, tier: Tier) -> TierBlock:
        """Return the block of a tier that the plan uses."""
        return self.arena if tier is Tier.DEVICE else self.blocks.below[tier]

    def num_bytes_of(self, tier: Tier) -> int:
        """Return the bytes of a tier's block that this plan uses."""
        return self._layout.num_bytes[tier]

    def offset_of(self, tier: Tier, place: int) -> int:
        """Return the first byte of a place (see `ResidencyInterval`) in its tier's block."""
        return place if tier is Tier.DEVICE else self._layout.offsets[tier][place]

    def bytes_of(self, interval: ResidencyInterval, num_bytes: int) -> torch.Tensor:
        """Return the first bytes of an interval's place."""
        offset = self.offset_of(interval.tier, interval.place)
        return self.block_of(interval.tier).bytes_at(offset, num_bytes)

    def storage_of(self, view: TensorView) -> int:
        """Return the index of a view's storage in the graph."""
        return self.graph.storage_of_value[view.value]

    def find_inputs(self) -> dict[str, list[torch.Tensor]]:
        """Return the places that operators read inputs from, by the inputs' names in the graph."""
        found: dict[str, list[torch.Tensor]] = {}
        for name, view in self.graph.tensors.items():
            storage = self.graph.storages[self.storage_of(view)]
            if storage.persistent or storage.kind is Kind.SCALAR:
                continue
            if storage.num_bytes:
                found[name] = [
                    self.view_in(interval, view)
                    for interval in self.index.intervals[view.value]
                    if interval.tier is Tier.DEVICE and interval.start == 0
                    if interval.transfer is None
                ]
            elif self.graph.consumers[view.value]:  # none of an input whose parts have storages
                found[name] = [self.view_unplanned(view)]
        return found

    def evict_pages(self, tensor: torch.Tensor) -> None:
        """Take the pages of a tensor out of memory, if it lies in the file."""
        for block in self.blocks:
            if isinstance(block, FileBlock):
                begin = tensor.data_ptr() - block.tensor.data_ptr()
                if 0 <= begin < block.num_bytes:
                    block.evict_pages(begin, tensor.numel() * tensor.element_size())

    def view_in(self, interval: ResidencyInterval, view: TensorView) -> torch.Tensor:
        """Return a view of a value in one of its places; its storage is the value's own."""
        offset = self.offset_of(interval.tier, interval.place)
        return _make_view(self._storage_at(interval.tier, offset, view.value), 0, view)

    def view_operand(
        self, view: TensorView, position: int, *, isolated: bool = False
    ) -> torch.Tensor:
        """Return a view of an operand of the operator at a position; if `isolated`, its storage is
        the value's own, not the arena's.
        """
        if not self.graph.num_bytes(view.value):
            return self.view_unplanned(view)
        offset = self.index.find_operand(view.value, position)
        if isolated:
            return _make_view(self._storage_at(Tier.DEVICE, offset, view.value), 0, view)
        key = (offset, *view[1:])
        if key not in self._views:
            self._views[key] = _make_view(self.arena.tensor, offset, view)
        return self._views[key]

    def view_result(self, view: TensorView, position: int) -> torch.Tensor:
        """Return a view of the place of a result of the operator at a position."""
        if not self.graph.num_bytes(view.value):
            return self.view_unplanned(view)
        # In a storage of its own: an operator that needs a larger place than planned must fail.
        offset = self.index.find_destination(view.value, Tier.DEVICE, position)
        return _make_view(self._storage_at(Tier.DEVICE, offset, view.value), 0, view)

    def view_unplanned(self, view: TensorView) -> torch.Tensor:
        """Return a view of a value of no planned bytes: in host memory, or without elements."""
        device = torch.device("cpu") if is_on_host(self.graph, view) else self.device
        key = (self.storage_of(view), device)
        needed = max(8, view.end * dtype_from_name(view.dtype).itemsize)
        memory = self._unplanned.get(key)
        if memory is None:
            memory = self._unplanned[key] = torch.zeros(needed, dtype=torch.uint8, device=device)
        elif memory.untyped_storage().nbytes() < needed:
            memory.untyped_storage().resize_(needed)  # its views share it and stay valid
        return _make_view(memory, 0, view)

    def _storage_at(self, tier: Tier, offset: int, value: int) -> torch.Tensor:
        """Return the bytes of a value at an offset, as a storage of their own.

        `torch.save` writes a tensor's whole storage, which must not be the block's.
        """
        key = (tier, offset, self.graph.num_bytes(value))
        if key not in self._storages:
            self._storages[key] = torch.from_dlpack(self.block_of(tier).bytes_at(*key[1:]))
        return self._storages[key]


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor to a place of its shape, which may be expanded."""
    place = narrow_expanded(target)
    place.copy_(source.detach().as_strided(place.shape, source.stride()))


def narrow_expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that has each byte once, also of an expanded one."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _make_view(memory: torch.Tensor, offset: int, view: TensorView) -> torch.Tensor:
    """Return a view of a value that begins at a byte of some memory."""
    dtype = dtype_from_name(view.dtype)
    first, rest = divmod(offset, dtype.itemsize)
    assert not rest, f"a value of {view.dtype} at byte {offset}"
    made = torch.empty(0, dtype=dtype, device=memory.device)
    storage = memory.untyped_storage()
    return made.set_(storage, first + view.offset, view.shape, view.stride)  # pyright: ignore
