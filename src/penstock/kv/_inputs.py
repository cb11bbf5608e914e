"""Inputs of layers, kept below, from which keys and values of blocks can be computed again.

A page of keys and values may have one page of inputs, which lives as long as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._blocks import BlockWrites
from penstock.kv._device import DeviceTier
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTable, PageTiers
from penstock.memory import Ledger, Tier

Recompute = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys `(k, H, T, key_dim)` and values `(k, H, T, value_dim)` of a layer, by its number, and of
inputs `(k, T, width)` of k blocks."""


@dataclass(eq=False)
class _Unfinished:
    """Inputs of the unfinished blocks of one layer.

    Attributes:
        layout: Of the layer's pages of inputs.
        tail: `(B, T, width)`.
        num_held: Tokens of the unfinished block that are there; -1 where its first are not.
    """

    layout: BlockLayout
    tail: torch.Tensor
    num_held: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the tail."""
        return self.tail.numel() * self.tail.element_size()

    def extend(self, inputs: torch.Tensor, token: int) -> tuple[int, torch.Tensor]:
        """Add the inputs `(B, n, width)` of the tokens from `token` on.

        Returns:
            The first block that is full now, and inputs of full blocks, `(B, k, T, width)`.
        """
        T = self.layout.block_tokens
        if self.num_held != token % T:  # a part of this block is lost, so the whole is
            num_lost = -token % T
            inputs, token = inputs[:, num_lost:], token + min(num_lost, inputs.shape[1])
            self.num_held = 0 if token % T == 0 else -1
            if self.num_held < 0:
                return 0, self.tail.new_empty((len(self.tail), 0, *self.tail.shape[1:]))
        whole = torch.cat([self.tail[:, : self.num_held], inputs.to(self.tail.dtype)], 1)
        first_block = (token - self.num_held) // T
        num_full = whole.shape[1] // T * T
        self.num_held = whole.shape[1] - num_full
        self.tail[:, : self.num_held] = whole[:, num_full:]
        return first_block, whole[:, :num_full].unflatten(1, (-1, T))

    def crop(self, num_tokens: int, num_before: int) -> None:
        """Forget the tokens from `num_tokens` on, of `num_before`."""
        held, T = num_tokens % self.layout.block_tokens, self.layout.block_tokens
        is_same_block = num_tokens // T == num_before // T
        self.num_held = held if held == 0 or (is_same_block and self.num_held >= held) else -1


class InputPages:
    """Inputs of all layers of a pool.

    Args:
        pages: Places of pages, of keys and of inputs.
        device: The device tier, whose buffers inputs pass.
        lower: The tiers below.
        ledger: Account of bytes.
        recompute: Function that computes keys and values again.
    """

    def __init__(
        self,
        pages: PageTable,
        device: DeviceTier,
        lower: PageTiers,
        ledger: Ledger,
        recompute: Recompute,
    ) -> None:
        self._pages = pages
        self._device = device
        self._lower = lower
        self._ledger = ledger
        self._writes = BlockWrites(pages, device, lower)
        self._unfinished: dict[int, _Unfinished] = {}
        self.recompute = recompute

    @property
    def tail_bytes(self) -> int:
        """Bytes of the inputs of unfinished blocks."""
        return sum(each.num_bytes for each in self._unfinished.values())

    def layout(self, layer: int) -> BlockLayout:
        """Return the layout of a layer's inputs: one head, and no values."""
        return self._unfinished[layer].layout

    def append(
        self, layer: int, keys: BlockLayout, table: np.ndarray, inputs: torch.Tensor, token: int
    ) -> None:
        """Keep the inputs of tokens whose keys were added.

        Args:
            layer: Their layer.
            keys: Layout of its keys and values.
            table: Its pages, `(B, num_blocks)`.
            inputs: `(B, n, width)`.
            token: Number of the first of them.
        """
        state = self._unfinished.get(layer) or self._make(layer, keys, inputs, token)
        first_block, full = state.extend(inputs, token)
        # Of pages that are there; sequences share none of those that are full only now.
        num_full = full.shape[1]
        some = table[:, first_block : first_block + num_full]
        places = [(b, j) for j in range(num_full) for b in range(len(full)) if some[b, j] >= 0]
        if not places:
            return
        below = self._pages.take(len(places), -1 - layer)
        self._pages.references[below] = 0  # they live by their pages of keys
        blocks = [(full[b, j][None], full[b, j, :, :0][None]) for b, j in places]
        self._writes.store_below(-1 - layer, state.layout, below, blocks)
        self._pages.inputs[[some[place] for place in places]] = below

    def crop(self, layer: int, num_tokens: int, num_before: int) -> None:
        """Forget the unfinished inputs of a layer from `num_tokens` on, of `num_before`."""
        if layer in self._unfinished:
            self._unfinished[layer].crop(num_tokens, num_before)

    def reorder(self, layer: int, chosen: np.ndarray) -> None:
        """Make the unfinished inputs of sequence i those of sequence `chosen[i]`."""
        state = self._unfinished.get(layer)
        if state is not None:
            old_bytes = state.num_bytes
            state.tail = state.tail[torch.from_numpy(chosen)]
            self._ledger.add(Tier.DEVICE, state.num_bytes - old_bytes)

    def reset(self, layer: int) -> None:
        """Forget the unfinished inputs of a layer."""
        state = self._unfinished.pop(layer, None)
        if state is not None:
            self._ledger.add(Tier.DEVICE, -state.num_bytes)

    def free(self, pages: np.ndarray) -> None:
        """Give back the inputs of pages of keys and values."""
        self._device.settle()
        for page in pages[self._pages.inputs[pages] >= 0].tolist():
            below, self._pages.inputs[page] = int(self._pages.inputs[page]), -1
            self._lower.free(below, self.layout(int(self._pages.layer[page])))
            self._pages.give_back(below)

    def _make(self, layer: int, keys: BlockLayout, inputs: torch.Tensor, token: int) -> _Unfinished:
        width = inputs.shape[2]
        layout = BlockLayout(1, keys.block_tokens, width, 0, keys.dtype, keys.alignment_bytes)
        tail = torch.zeros((len(inputs), keys.block_tokens, width), dtype=keys.dtype)
        state = _Unfinished(layout, tail, 0 if token % keys.block_tokens == 0 else -1)
        if self._lower.has_file:
            self._device.make_staging(layout)
        self._unfinished[layer] = state
        self._ledger.add(Tier.DEVICE, state.num_bytes)
        return state
