"""Blocks of a layer, and the storing of full ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._device import DeviceTier
from penstock.kv._kernel import copy_pieces
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTable, PageTiers

_COPY_BYTES = 4 * 2**20  # of blocks that are brought into the order of records at once


@dataclass(eq=False)
class LayerBlocks:
    """Blocks of one layer.

    Attributes:
        layout: Shapes of its records.
        table: Page of each full block, int64 `(B, num_blocks)`; -1 for blocks that were dropped.
        tail: Records of the unfinished blocks, `(B, H, record_items)`.
        num_tail: Tokens in the tail, below `block_tokens`.
    """

    layout: BlockLayout
    table: np.ndarray
    tail: torch.Tensor
    num_tail: int = 0

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.tail.shape[0]

    @property
    def num_blocks(self) -> int:
        """Full blocks of a sequence."""
        return self.table.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence."""
        return self.num_blocks * self.layout.block_tokens + self.num_tail

    def check_append(self, layer: int, layout: BlockLayout, batch_size: int) -> None:
        """Raise `ValueError` if tokens of other shapes than before come to a layer."""
        if self.layout != layout or self.batch_size != batch_size:
            raise ValueError(
                f"layer {layer} holds {self.batch_size} sequences of {self.layout}; got "
                f"{batch_size} of {layout}; reset() it, or make a new one"
            )

    def fill_tail(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Copy tokens `(B, H, n, dim)` to the tail, as many as it has room for.

        Returns:
            Their number.
        """
        num_tokens = min(keys.shape[2], self.layout.block_tokens - self.num_tail)
        place = slice(self.num_tail, self.num_tail + num_tokens)
        for part, tail in zip((keys, values), self.layout.split(self.tail), strict=True):
            tail[:, :, place] = part[:, :, :num_tokens]
        self.num_tail = place.stop
        return num_tokens

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail."""
        return self.tail.numel() * self.layout.dtype.itemsize

    def check_crop(self, layer: int, num_tokens: int) -> None:
        """Raise `ValueError` if the tail of so many tokens would be of a block that was dropped."""
        block, num_tail = divmod(num_tokens, self.layout.block_tokens)
        if block < self.num_blocks and num_tail and (self.table[:, block] < 0).any():
            raise ValueError(
                f"layer {layer} keeps a window only, which block {block} has left; call "
                "activate_past_recording() before the tokens that are to be taken back"
            )

    def check_reorder(self, chosen: np.ndarray) -> None:
        """Raise `IndexError` if a number of a sequence is none."""
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.batch_size):
            raise IndexError(
                f"index must name sequences of [0, {self.batch_size}); got {chosen.tolist()}"
            )


class BlockWrites:
    """Storing of full blocks: in free slots of the device tier, the others below."""

    def __init__(self, pages: PageTable, device: DeviceTier, lower: PageTiers) -> None:
        self._pages = pages
        self._device = device
        self._lower = lower

    def store(
        self, layer: int, layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor
    ) -> np.ndarray:
        """Store full blocks.

        Args:
            layer: Their layer.
            layout: Its layout.
            keys: `(B, H, num_blocks * block_tokens, key_dim)`.
            values: The same with `value_dim`.

        Returns:
            Their pages, int64 `(B, num_blocks)`.
        """
        blocks = FullBlocks(layout, keys, values)
        # In the order in which attention reads them: block after block, in each all sequences.
        pages = self._pages.take(blocks.num_pages, layer)
        num_resident = min(len(pages), self._device.room(layout) // layout.num_heads)
        try:
            self._store_resident(layout, pages[:num_resident], blocks)
            self.store_below(layer, layout, pages, num_resident, blocks)
        except BaseException:
            self.free(layout, pages)
            raise
        return pages.reshape(-1, keys.shape[0]).T

    def free(self, layout: BlockLayout, pages: np.ndarray) -> None:
        """Give back what pages occupy on all tiers, and their numbers."""
        self._device.settle()
        self._device.drop(layout, pages)
        self._pages.references[pages] = 0
        for page in pages.tolist():
            self._lower.free(page, layout)
            self._pages.give_back(page)

    def _store_resident(self, layout: BlockLayout, pages: np.ndarray, blocks: FullBlocks) -> None:
        records = (pages[:, None] * layout.num_heads + np.arange(layout.num_heads)).ravel()
        admitted, addresses = self._device.admit(layout, records)
        assert len(admitted) == records.size, "there is room"
        places = addresses[np.argsort(admitted)][np.argsort(np.argsort(records))]
        places = places.reshape(len(pages), layout.num_heads)
        per_copy = max(1, _COPY_BYTES // layout.page_bytes)
        for first in range(0, len(pages), per_copy):
            some = places[first : first + per_copy]
            copy = torch.empty((*some.shape, layout.record_items), dtype=layout.dtype)
            blocks.fill(copy, first)
            sources = copy.data_ptr() + np.arange(some.size) * layout.record_bytes
            copy_pieces(some.ravel(), sources, layout.record_bytes)

    def store_below(
        self, layer: int, layout: BlockLayout, pages: np.ndarray, at: int, blocks: FullBlocks
    ) -> None:
        """Store pages from number `at` on in host memory, and from where it is full in the file."""
        while at < len(pages):
            view = self._lower.host_view(int(pages[at]), layout)
            if view is None:
                break
            blocks.fill(view.unsqueeze(0), at)
            at += 1
        if at == len(pages):
            return
        self._lower.check_file()
        per_buffer = self._device.buffer_bytes // layout.page_bytes
        for first in range(at, len(pages), per_buffer):
            some = pages[first : first + per_buffer]
            buffer = self._device.take_buffer()
            try:
                view = buffer.area.view(0, len(some) * layout.page_bytes, layout.dtype)
                view = view.view(-1, layout.num_heads, layout.record_items)
                blocks.fill(view, first)
                self._lower.write(layer, some, layout, buffer)
            finally:
                self._device.give_back(buffer)


class FullBlocks:
    """Keys and values that become pages: block after block, in each all sequences."""

    def __init__(self, layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = (-1, layout.block_tokens)
        self._layout = layout
        self._parts = keys.unflatten(2, shape), values.unflatten(2, shape)
        self._batch_size = keys.shape[0]
        self.num_pages = keys.shape[0] * self._parts[0].shape[2]

    def fill(self, pages: torch.Tensor, first: int) -> None:
        """Write the pages from number `first` on to `(num_pages, H, record_items)`."""
        for b in range(self._batch_size):
            start = (b - first) % self._batch_size  # the first of them that is of this sequence
            to = self._layout.split(pages)
            block, num_blocks = (
                (first + start) // self._batch_size,
                len(to[0][start :: self._batch_size]),
            )
            for part, copy in zip(self._parts, to, strict=True):
                some = part[b, :, block : block + num_blocks].transpose(0, 1)
                copy[start :: self._batch_size] = some
