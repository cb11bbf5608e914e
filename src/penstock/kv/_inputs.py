"""Inputs of layers, kept below, from which keys and values of blocks can be computed again.

A page of keys and values may have one page of inputs, which lives as long as it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._blocks import BlockWrites, FullBlocks
from penstock.kv._device import DeviceTier
from penstock.kv._kernel import copy_pieces
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTiers, TransferBuffer
from penstock.kv._pages import PageTable
from penstock.kv._recompute import fetch_or_recompute
from penstock.memory import Ledger, Link, Tier

Recompute = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys `(k, H, T, key_dim)` and values `(k, H, T, value_dim)` of a layer, by its number, and of
inputs `(k, T, width)` of k blocks."""


def check_inputs(kept: InputPages | None, keys: torch.Tensor, inputs: torch.Tensor) -> None:
    """Raise `ValueError` if inputs are not those of keys, or the pool keeps none."""
    if kept is None or inputs.dim() != 3 or inputs.shape[:2] != keys.shape[:3:2]:
        raise ValueError(
            f"inputs must be (B, n, width) with the (B, n) of keys, {tuple(keys.shape[:3:2])}, "
            f"of a pool with recompute=; got {tuple(inputs.shape)}"
        )


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


@dataclass(frozen=True)
class ComputedPages:
    """Pages of a group whose keys and values are computed, and not read.

    Attributes:
        layer: Their layer.
        inputs: Their pages of inputs, int64.
        places: Numbers of their records in the group, int64 `(num_pages, H)`.
        num_records: Records of the group, behind which the buffer holds the inputs.
        num_reads: The first reads of the buffer, which are those of the inputs.
    """

    layer: int
    inputs: np.ndarray
    places: np.ndarray
    num_records: int
    num_reads: int


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
        self._recompute = recompute
        self._seconds_per_token: dict[int, float] = {}  # of computing, by layer; the latest
        self.num_computed = 0  # pages

    @property
    def tail_bytes(self) -> int:
        """Bytes of the inputs of unfinished blocks."""
        return sum(each.num_bytes for each in self._unfinished.values())

    def layout(self, layer: int) -> BlockLayout:
        """Return the layout of a layer's inputs: one head, and no values."""
        return self._unfinished[layer].layout

    def per_buffer(self, layer: int, layout: BlockLayout, buffer_bytes: int) -> int:
        """Return how many records a buffer has room for, with the inputs of their pages."""
        state = self._unfinished.get(layer)
        if state is None:
            return buffer_bytes // layout.record_bytes
        page_bytes = layout.page_bytes + state.layout.page_bytes
        return max(1, buffer_bytes // page_bytes) * layout.num_heads

    def start(
        self, layout: BlockLayout, records: np.ndarray, buffer: TransferBuffer
    ) -> ComputedPages | None:
        """Choose pages of a group to compute, and start to read their inputs.

        Args:
            layout: Layout of the records.
            records: Distinct records of one layer that are in the file.
            buffer: Their buffer.

        Returns:
            The pages; None where all records are read.
        """
        pages = records // layout.num_heads
        whole, counts = np.unique(pages, return_counts=True)
        whole = whole[(counts == layout.num_heads) & (self._pages.inputs[whole] >= 0)]
        layer = int(self._pages.layer[pages[0]])
        if not len(whole):
            return None
        page_bytes, end = self.layout(layer).page_bytes, len(records) * layout.record_bytes
        most = min(len(whole), max(0, (buffer.area.num_bytes - end) // page_bytes))
        num_pages = min(self._split(layer, layout, len(whole)), most)
        if not num_pages:
            return None
        inputs = self._pages.inputs[whole[:num_pages]]
        places = np.flatnonzero(np.isin(pages, whole[:num_pages]))
        places = places[np.argsort(records[places])].reshape(num_pages, layout.num_heads)
        slots = np.arange(num_pages) * page_bytes + end
        below = self._pages.host[inputs] != 0
        addresses = buffer.area.address + slots
        copy_pieces(addresses[below], self._pages.host[inputs[below]], page_bytes)
        in_file = inputs[~below]
        stored = self._lower.locate(in_file, np.zeros_like(in_file), self.layout(layer))
        self._lower.read(stored, buffer, slots[~below])
        return ComputedPages(layer, inputs, places, len(records), len(buffer.pending))

    def finish(self, computed: ComputedPages, layout: BlockLayout, buffer: TransferBuffer) -> None:
        """Compute the records of pages into their places in the buffer, once the inputs are there.

        Raises:
            StoreReadError: The inputs could not be read.
        """
        buffer.wait(computed.num_reads)
        below, num_pages = self.layout(computed.layer), len(computed.inputs)
        start = computed.num_records * layout.record_bytes
        inputs = buffer.area.view(start, num_pages * below.page_bytes, below.dtype)
        began = time.perf_counter()
        tokens = below.split(inputs.view(num_pages, below.record_items))[0]
        made = self._recompute(computed.layer, tokens)
        records = buffer.area.view(0, start, layout.dtype).view(-1, layout.record_items)
        places = torch.from_numpy(computed.places.ravel())
        for part, to in zip(made, layout.split(records), strict=True):
            to[places] = part.flatten(0, 1)
        seconds = time.perf_counter() - began
        self._seconds_per_token[computed.layer] = seconds / (num_pages * below.block_tokens)
        self.num_computed += num_pages

    def _split(self, layer: int, layout: BlockLayout, num_pages: int) -> int:
        """Return how many of the missing pages to compute: one where nothing was measured yet."""
        bandwidth = self._ledger.bandwidth(Link.FILE_TO_DEVICE)
        if bandwidth is None or layer not in self._seconds_per_token:
            return 1
        split = fetch_or_recompute(
            num_pages * layout.block_tokens,
            bytes_per_token=layout.page_bytes // layout.block_tokens,
            input_bytes_per_token=self.layout(layer).page_bytes // layout.block_tokens,
            bandwidth=bandwidth,
            flops_per_token=1,
            flop_rate=1 / self._seconds_per_token[layer],
            block_tokens=layout.block_tokens,
        )
        return split.num_recomputed // layout.block_tokens

    def add_layer(self, layer: int, keys: BlockLayout, inputs: torch.Tensor) -> None:
        """Begin to keep the inputs of a layer, such as `(B, n, width)`."""
        B, _, width = inputs.shape
        layout = BlockLayout(1, keys.block_tokens, width, 0, keys.dtype, keys.alignment_bytes)
        tail = torch.zeros((B, keys.block_tokens, width), dtype=keys.dtype, device="cpu")
        self._unfinished[layer] = state = _Unfinished(layout, tail)
        self._ledger.add(Tier.DEVICE, state.num_bytes)

    def append(self, layer: int, table: np.ndarray, inputs: torch.Tensor, token: int) -> None:
        """Keep the inputs of tokens whose keys were added.

        Args:
            layer: Their layer.
            table: Its pages, `(B, num_blocks)`.
            inputs: `(B, n, width)`.
            token: Number of the first of them.
        """
        state = self._unfinished[layer]
        first_block, full = state.extend(inputs, token)
        some = table[:, first_block : first_block + full.shape[1]].T.ravel()
        if not len(some) or (some < 0).any():  # blocks that left a window are not read any more
            return
        below = self._pages.take(len(some), -1 - layer)
        self._pages.references[below] = 0  # they live by their pages of keys
        full = full.flatten(1, 2).unsqueeze(1)
        blocks = FullBlocks(state.layout, full, full[..., :0])
        self._writes.store_below(-1 - layer, state.layout, below, 0, blocks)
        self._pages.inputs[some] = below

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

    def close(self) -> None:
        """Forget all unfinished inputs."""
        self._unfinished.clear()

    def free(self, pages: np.ndarray) -> None:
        """Give back the inputs of pages of keys and values."""
        self._device.settle()
        for page in pages[self._pages.inputs[pages] >= 0].tolist():
            below, self._pages.inputs[page] = int(self._pages.inputs[page]), -1
            self._lower.free(below, self.layout(int(self._pages.layer[page])))
            self._pages.give_back(below)
