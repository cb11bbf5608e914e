"""Blocks of a layer, and the storing of full ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._device import DeviceTier
from penstock.kv._layout import BlockLayout, FullBlocks
from penstock.kv._lower import PageTiers
from penstock.kv._pages import PageTable
from penstock.units import parse_count


@dataclass(eq=False)
class LayerBlocks:
    """Blocks of one layer.

    Attributes:
        layout: Shapes of its records.
        table: Page of each full block, int64 `(B, num_blocks)`; -1 for blocks that were dropped.
            Each change makes a new one.
        num_dropped: First blocks that all of them are known to be dropped.
        tail: Records of the unfinished blocks, `(B, H, record_items)`.
        num_tail: Tokens in the tail, below `block_tokens`.
    """

    layout: BlockLayout
    table: np.ndarray
    tail: torch.Tensor
    num_tail: int = 0
    num_dropped: int = 0
    _fitting: tuple[object, ...] = ()
    _tail_parts: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def tail_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tail's keys and values, `(B, H, block_tokens, dim)`."""
        if self._tail_parts is None or self._tail_parts[0] is not self.tail:
            self._tail_parts = self.tail, self.layout.split(self.tail)
        return self._tail_parts[1]

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

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether the last tokens that `check_append` let pass were of these shapes."""
        return keys.shape[0] == self.batch_size and self._fitting == _shapes_of(keys, values)

    def check_append(
        self, layer: int, layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Raise `ValueError` if tokens of another layout than before come to a layer."""
        batch_size = keys.shape[0]
        if self.layout != layout or self.batch_size != batch_size:
            raise ValueError(
                f"layer {layer} holds {self.batch_size} sequences of {self.layout}; got "
                f"{batch_size} of {layout}; reset() it, or make a new one"
            )
        self._fitting = _shapes_of(keys, values)

    def fill_tail(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Copy tokens `(B, H, n, dim)` to the tail, as many as it has room for.

        Returns:
            Their number.
        """
        num_tokens = min(keys.shape[2], self.layout.block_tokens - self.num_tail)
        for part, tail in zip((keys, values), self.tail_parts, strict=True):
            some = part if num_tokens == part.shape[2] else part[:, :, :num_tokens]
            tail.narrow(2, self.num_tail, num_tokens).copy_(some)
        self.num_tail += num_tokens
        return num_tokens

    def add(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Copy tokens `(B, H, n, dim)` to the tail; yield those of blocks that are full.

        Yields:
            Keys and values of whole blocks, which the caller adds to the table.
        """
        T, at = self.layout.block_tokens, 0
        while at < keys.shape[2]:
            num_whole = (keys.shape[2] - at) // T * T if self.num_tail == 0 else 0
            if num_whole:
                end = at + num_whole
                yield keys[:, :, at:end], values[:, :, at:end]
            else:
                end = at + self.fill_tail(keys[:, :, at:], values[:, :, at:])
                if self.num_tail == T:
                    self.num_tail = 0
                    yield self.tail_parts
            at = end

    def drop(self, num_blocks: int) -> None:
        """Take the pages of the first blocks, which are given back, out of the table."""
        self.table = self.table.copy()
        self.table[:, :num_blocks] = -1
        self.num_dropped = max(self.num_dropped, num_blocks)

    def cut(self, num_blocks: int, num_tail: int) -> None:
        """Keep the pages of the first blocks and the first tokens of the tail."""
        if num_blocks < self.num_blocks:
            self.table = self.table[:, :num_blocks].copy()
            self.num_dropped = min(self.num_dropped, num_blocks)
        self.num_tail = num_tail

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

    def keeps(self, first_token: int, last_token: int) -> bool:
        """Return whether no block with tokens of `[first_token, last_token)` was dropped."""
        T = self.layout.block_tokens
        return not bool((self.table[:, first_token // T : -(-last_token // T)] < 0).any())

    def check_reorder(self, layer: int, chosen: np.ndarray) -> None:
        """Raise `IndexError` if a number of a sequence is none."""
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < self.batch_size):
            raise IndexError(
                f"index must name sequences of [0, {self.batch_size}) of layer {layer}; got "
                f"{chosen.tolist()}"
            )

    def find_kept(self, dtype: torch.dtype, blocks: np.ndarray) -> np.ndarray:
        """Return numbers of blocks, `(B, H, k)`, with -1 for those that were dropped.

        Raises:
            ValueError: They are no blocks of the layer, or not int64.
        """
        own = self.batch_size, self.layout.num_heads
        low, high = blocks.min(initial=-1), blocks.max(initial=-1)
        is_shaped = dtype == torch.int64 and blocks.ndim == 3 and blocks.shape[:2] == own
        if not is_shaped or low < -1 or high >= self.num_blocks:
            raise ValueError(
                f"blocks must be int64 ({own[0]}, {own[1]}, k), from -1 to {self.num_blocks - 1}; "
                f"got {dtype} {blocks.shape}, from {low} to {high}"
            )
        if self.num_blocks == 0:
            return blocks
        is_kept = self.table[np.arange(own[0])[:, None, None], blocks] >= 0
        return np.where(is_kept, blocks, -1)


def _shapes_of(keys: torch.Tensor, values: torch.Tensor) -> tuple[object, ...]:
    of_keys, of_values = ((each.shape, each.dtype, each.device) for each in (keys, values))
    return *of_keys, *of_values


def check_index(index: torch.Tensor) -> None:
    """Raise an error if an index of sequences is not int64 `(any number,)`."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index must be int64; got {index.dtype}")
    if index.dim() != 1:
        raise ValueError(f"index must have one dimension; got {tuple(index.shape)}")


def index_repeats(sizes: Iterable[int], repeats: int) -> dict[int, torch.Tensor]:
    """Return the index that repeats every sequence, by the number of sequences."""
    repeats = parse_count(repeats, name="repeats", least=1)
    return {
        size: torch.arange(size, device="cpu").repeat_interleave(repeats) for size in set(sizes)
    }


class BlockWrites:
    """Storing of full blocks: in free slots of the device tier, the others below."""

    def __init__(self, pages: PageTable, device: DeviceTier, lower: PageTiers) -> None:
        self._platform = device.platform
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
            # Where an interrupt has torn something, all tiers are made anew by the next `reset`.
            with contextlib.suppress(Exception):
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
        self._platform.store(blocks, 0, places.reshape(len(pages), layout.num_heads), below=False)

    def store_below(
        self, layer: int, layout: BlockLayout, pages: np.ndarray, at: int, blocks: FullBlocks
    ) -> None:
        """Store pages from number `at` on in host memory, and from where it is full in the file."""
        heads = np.arange(layout.num_heads) * layout.record_bytes
        host = self._lower.take_host(pages[at:], layout)
        self._platform.store(blocks, at, host[:, None] + heads, below=True)
        at += len(host)
        if at == len(pages):
            return
        self._lower.check_file()
        per_buffer = self._device.buffer_bytes // layout.page_bytes
        for first in range(at, len(pages), per_buffer):
            some = pages[first : first + per_buffer]
            buffer = self._device.take_buffer()
            try:
                places = buffer.area.address + np.arange(len(some)) * layout.page_bytes
                event = self._platform.store(blocks, first, places[:, None] + heads, below=True)
                self._lower.write(layer, some, layout, buffer, event)
            finally:
                self._device.give_back(buffer)
