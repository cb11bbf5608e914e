"""All memory of a bound plan, and tensors that look at it.

Values of no bytes (step counts, Python numbers, random states) lie in small tensors of their own.
"""

from __future__ import annotations

import torch

from penstock.executor._memory import Block, FileBlock, anonymous, offsets_of_copies
from penstock.executor._places import Places, Stay
from penstock.graph import StepGraph, TensorView
from penstock.graph._encoding import dtype_named
from penstock.memory import FileStore, Tier
from penstock.planner import Plan


class Room:
    """The blocks of a plan's tiers, and views of what lies there.

    Args:
        graph: The step.
        plan: A plan for it.
        places: Its places.
        device: Where operators run.
        store: The file tier; None if the plan has no copies there.

    Raises:
        StoreError: The file cannot be had, or has not enough room.
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: Plan,
        places: Places,
        device: torch.device,
        store: FileStore | None,
    ) -> None:
        self._graph = graph
        self._places = places
        self._views: dict[tuple[object, ...], torch.Tensor] = {}
        self._loose: dict[int, torch.Tensor] = {}
        self.device = device
        self.arena = Block(Tier.DEVICE, anonymous(plan.arena_bytes), plan.arena_bytes)
        self._offsets: dict[Tier, dict[int, int]] = {}
        self._below: dict[Tier, Block] = {}
        for tier in (Tier.HOST, Tier.FILE):
            offsets, num_bytes = offsets_of_copies(graph, plan, tier)
            self._offsets[tier] = offsets
            if not num_bytes:
                continue
            if tier is Tier.HOST:
                self._below[tier] = Block(tier, anonymous(num_bytes), num_bytes)
            else:
                assert store is not None
                self._below[tier] = FileBlock(store, num_bytes)

    def block(self, tier: Tier) -> Block:
        """The block of a tier that the plan uses."""
        return self.arena if tier is Tier.DEVICE else self._below[tier]

    def blocks(self) -> list[Block]:
        """All blocks, the arena first."""
        return [self.arena, *self._below.values()]

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of a tier's block; 0 if the plan does not use it."""
        if tier is Tier.DEVICE:
            return self.arena.num_bytes
        return self._below[tier].num_bytes if tier in self._below else 0

    def offset(self, tier: Tier, place: int) -> int:
        """The first byte of a place (see `Stay`) in its tier's block."""
        return place if tier is Tier.DEVICE else self._offsets[tier][place]

    def bytes_of(self, stay: Stay, num_bytes: int) -> torch.Tensor:
        """The bytes of a place."""
        return self.block(stay.tier).bytes_at(self.offset(stay.tier, stay.place), num_bytes)

    def view_of(self, stay: Stay, view: TensorView) -> torch.Tensor:
        """What a view of a value shows, in one of its places."""
        return self._view(self.block(stay.tier), self.offset(stay.tier, stay.place), view)

    def operand(self, view: TensorView, position: int) -> torch.Tensor:
        """What the operator at a position finds where it looks at a value."""
        if not self._graph.num_bytes(view.value):
            return self.loose(view)
        return self._view(self.arena, self._places.operand(view.value, position), view)

    def result(self, view: TensorView, position: int) -> torch.Tensor:
        """Where the operator at a position puts a result."""
        if not self._graph.num_bytes(view.value):
            return self.loose(view)
        return self._view(self.arena, self._places.result(view.value, position), view)

    def loose(self, view: TensorView) -> torch.Tensor:
        """A view of a value of no bytes, in memory of its own."""
        storage = self._graph.storage_of_value[view.value]
        extents = zip(view.shape, view.stride, strict=True)
        last = view.offset + sum((extent - 1) * stride for extent, stride in extents)
        dtype = dtype_named(view.dtype)
        needed = max(8, (last + 1) * dtype.itemsize)
        base = self._loose.get(storage)
        if base is None:
            base = self._loose[storage] = torch.zeros(needed, dtype=torch.uint8)
        elif base.untyped_storage().nbytes() < needed:
            base.untyped_storage().resize_(needed)  # views of it stay valid: they share it
        made = torch.empty(0, dtype=dtype)
        return made.set_(base.untyped_storage(), view.offset, view.shape, view.stride)  # pyright: ignore

    def close(self) -> None:
        """Let go of the file; tensors that look at the memory stay valid."""
        for block in self._below.values():
            block.close()

    def _view(self, block: Block, offset: int, view: TensorView) -> torch.Tensor:
        key = (block.tier, offset, *view[1:])
        found = self._views.get(key)
        if found is None:
            dtype = dtype_named(view.dtype)
            first, rest = divmod(offset, dtype.itemsize)
            assert not rest, f"a value of {view.dtype} at byte {offset}"
            found = torch.empty(0, dtype=dtype, device=block.tensor.device)
            storage = block.tensor.untyped_storage()
            found.set_(storage, first + view.offset, view.shape, view.stride)  # pyright: ignore
            self._views[key] = found
        return found
