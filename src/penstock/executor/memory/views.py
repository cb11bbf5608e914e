"""Plan memory: a plan's blocks on all tiers, and tensors that view values in them.

Values of no planned bytes (step counts, Python numbers, random states) lie in small tensors of
their own.
"""

from __future__ import annotations

import torch

from penstock.executor.memory.blocks import FileBlock, SharedBlocks, TierBlock
from penstock.executor.memory.residency import Layout, ResidencyIndex, ResidencyInterval
from penstock.graph import Kind, StepGraph, TensorView
from penstock.graph.encoding import dtype_from_name
from penstock.memory import Tier
from penstock.planner import Plan


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

    def __init__(self, graph: StepGraph, plan: Plan, layout: Layout, blocks: SharedBlocks) -> None:
        self.graph = graph
        self.plan = plan
        self.index = ResidencyIndex(graph, plan)
        self.blocks = blocks
        self.arena = blocks.arena
        self.device = blocks.device.device
        self._layout = layout
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self._storages: dict[tuple[Tier, int, int], torch.Tensor] = {}
        self._unplanned: dict[int, torch.Tensor] = {}  # by storage

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
        key = (Tier.DEVICE, offset, *view[1:])
        if key not in self._views:
            self._views[key] = _make_view(self.arena.tensor, offset, view)
        return self._views[key]

    def view_result(self, view: TensorView, position: int) -> torch.Tensor:
        """Return a view of the place of a result of the operator at a position."""
        if not self.graph.num_bytes(view.value):
            return self.view_unplanned(view)
        # In a storage of its own: an operator that needs a larger place than planned must fail.
        offset = self.index.find_destination(view.value, Tier.DEVICE, position)
        key = ("result", offset, *view[1:])
        if key not in self._views:
            storage = self._storage_at(Tier.DEVICE, offset, view.value)
            self._views[key] = _make_view(storage, 0, view)
        return self._views[key]

    def view_unplanned(self, view: TensorView) -> torch.Tensor:
        """Return a view of a value of no planned bytes."""
        storage = self.storage_of(view)
        needed = max(8, view.end * dtype_from_name(view.dtype).itemsize)
        memory = self._unplanned.get(storage)
        if memory is None:
            memory = self._unplanned[storage] = torch.zeros(needed, dtype=torch.uint8)
        elif memory.untyped_storage().nbytes() < needed:
            memory.untyped_storage().resize_(needed)  # its views share it and stay valid
        return _make_view(memory, 0, view)

    def _storage_at(self, tier: Tier, offset: int, value: int) -> torch.Tensor:
        """Return the bytes of a value at an offset, as a storage of their own."""
        num_bytes = self.graph.num_bytes(value)
        key = (tier, offset, num_bytes)
        if key not in self._storages:
            self._storages[key] = self.block_of(tier).storage_at(offset, num_bytes)
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
