"""All memory of a bound plan, and tensors that look at it.

Values of no bytes (step counts, Python numbers, random states) lie in small tensors of their own.
"""

from __future__ import annotations

import torch

from penstock.executor._memory import Block, Blocks, FileBlock, Layout
from penstock.executor._places import Places, Stay
from penstock.graph import StepGraph, TensorView
from penstock.graph.encoding import dtype_from_name
from penstock.memory import Tier


class Room:
    """The blocks of a plan's tiers, and views of what lies there.

    Args:
        graph: The step.
        places: The places of a plan for it.
        device: Where operators run.
        layout: Where copies lie.
        blocks: The memory, shared with other plans that take turns with this one.
    """

    def __init__(
        self,
        graph: StepGraph,
        places: Places,
        device: torch.device,
        layout: Layout,
        blocks: Blocks,
    ) -> None:
        self._graph = graph
        self._places = places
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self._alone: dict[tuple[Tier, int, int], torch.Tensor] = {}
        self._loose: dict[int, torch.Tensor] = {}
        self.device = device
        self.shared = blocks
        self.arena = blocks.arena
        self._offsets = layout.offsets
        self._num_bytes = layout.num_bytes

    def block(self, tier: Tier) -> Block:
        """The block of a tier that the plan uses."""
        return self.arena if tier is Tier.DEVICE else self.shared.below[tier]

    def blocks(self) -> list[Block]:
        """All blocks, the arena first."""
        return list(self.shared)

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of a tier's block that this plan uses."""
        return self._num_bytes[tier]

    def offset(self, tier: Tier, place: int) -> int:
        """The first byte of a place (see `Stay`) in its tier's block."""
        return place if tier is Tier.DEVICE else self._offsets[tier][place]

    def bytes_of(self, stay: Stay, num_bytes: int) -> torch.Tensor:
        """The bytes of a place."""
        return self.block(stay.tier).bytes_at(self.offset(stay.tier, stay.place), num_bytes)

    def put_away(self, tensor: torch.Tensor) -> None:
        """Let memory forget what of a tensor the file has; of one that lies there."""
        for block in self.shared:
            if isinstance(block, FileBlock):
                begin = tensor.data_ptr() - block.tensor.data_ptr()
                if 0 <= begin < block.num_bytes:
                    block.put_away(begin, tensor.numel() * tensor.element_size())

    def view_of(self, stay: Stay, view: TensorView) -> torch.Tensor:
        """What a view of a value shows, in one of its places; its storage is the value's."""
        offset = self.offset(stay.tier, stay.place)
        return _viewed(self._alone_at(stay.tier, offset, view.value), 0, view)

    def operand(self, view: TensorView, position: int) -> torch.Tensor:
        """What the operator at a position finds where it looks at a value."""
        if not self._graph.num_bytes(view.value):
            return self.loose(view)
        return self._view(self.arena, self._places.operand(view.value, position), view)

    def operand_alone(self, view: TensorView, position: int) -> torch.Tensor:
        """The same as a view of a storage of its own, without all the rest of the arena."""
        if not self._graph.num_bytes(view.value):
            return self.loose(view)
        offset = self._places.operand(view.value, position)
        return _viewed(self._alone_at(Tier.DEVICE, offset, view.value), 0, view)

    def result(self, view: TensorView, position: int) -> torch.Tensor:
        """Where the operator at a position puts a result."""
        if not self._graph.num_bytes(view.value):
            return self.loose(view)
        # In a storage of its own: an operator that wants a larger place than planned must fail.
        offset = self._places.result(view.value, position)
        key = ("result", offset, *view[1:])
        if key not in self._views:
            self._views[key] = _viewed(self._alone_at(Tier.DEVICE, offset, view.value), 0, view)
        return self._views[key]

    def _alone_at(self, tier: Tier, offset: int, value: int) -> torch.Tensor:
        """The bytes of a value at an offset, as a storage of their own."""
        num_bytes = self._graph.num_bytes(value)
        key = (tier, offset, num_bytes)
        if key not in self._alone:
            self._alone[key] = self.block(tier).alone(offset, num_bytes)
        return self._alone[key]

    def loose(self, view: TensorView) -> torch.Tensor:
        """A view of a value of no bytes, in memory of its own."""
        storage = self._graph.storage_of_value[view.value]
        extents = zip(view.shape, view.stride, strict=True)
        last = view.offset + sum((extent - 1) * stride for extent, stride in extents)
        dtype = dtype_from_name(view.dtype)
        needed = max(8, (last + 1) * dtype.itemsize)
        base = self._loose.get(storage)
        if base is None:
            base = self._loose[storage] = torch.zeros(needed, dtype=torch.uint8)
        elif base.untyped_storage().nbytes() < needed:
            base.untyped_storage().resize_(needed)  # views of it stay valid: they share it
        made = torch.empty(0, dtype=dtype)
        return made.set_(base.untyped_storage(), view.offset, view.shape, view.stride)  # pyright: ignore

    def _view(self, block: Block, offset: int, view: TensorView) -> torch.Tensor:
        key = (block.tier, offset, *view[1:])
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = _viewed(block.tensor, offset, view)
        return found


def once(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that has each byte once, also of one that `expand` has made."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _viewed(memory: torch.Tensor, offset: int, view: TensorView) -> torch.Tensor:
    """A view of what begins at a byte of some memory."""
    dtype = dtype_from_name(view.dtype)
    first, rest = divmod(offset, dtype.itemsize)
    assert not rest, f"a value of {view.dtype} at byte {offset}"
    found = torch.empty(0, dtype=dtype, device=memory.device)
    storage = memory.untyped_storage()
    return found.set_(storage, first + view.offset, view.shape, view.stride)  # pyright: ignore
