"""Blocks of a layer, the storing of full ones, and the reading of their records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._device import DeviceTier
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTable, PageTiers, TransferBuffer
from penstock.memory import Ledger, Link
from penstock.memory.raw_memory import copy_bytes


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
        shape = (-1, layout.block_tokens)
        keys, values = keys.unflatten(2, shape), values.unflatten(2, shape)
        batch_size, num_blocks = keys.shape[0], keys.shape[2]
        # In the order in which attention reads them: block after block, in each all sequences.
        pages = self._pages.take(batch_size * num_blocks, layer)
        places = [divmod(i, batch_size) for i in range(len(pages))]
        blocks = [(keys[b, :, j], values[b, :, j]) for j, b in places]
        num_resident = min(len(pages), self._device.room(layout) // layout.num_heads)
        try:
            self._store_resident(layout, pages[:num_resident], blocks)
            self._store_below(layer, layout, pages[num_resident:], blocks[num_resident:])
        except BaseException:
            self.free(layout, pages)
            raise
        return pages.reshape(num_blocks, batch_size).T

    def free(self, layout: BlockLayout, pages: np.ndarray) -> None:
        """Give back what pages occupy on all tiers, and their numbers."""
        self._device.settle()
        self._device.drop(layout, pages)
        self._pages.references[pages] = 0
        for page in pages.tolist():
            self._lower.free(page, layout)
            self._pages.give_back(page)

    def _store_resident(
        self,
        layout: BlockLayout,
        pages: np.ndarray,
        blocks: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        records = pages[:, None] * layout.num_heads + np.arange(layout.num_heads)
        admitted, addresses = self._device.admit(layout, records.ravel())
        assert len(admitted) == records.size, "there is room"
        places = dict(zip(admitted.tolist(), addresses.tolist(), strict=True))
        record = torch.empty(layout.record_items, dtype=layout.dtype)
        for some_records, (some_keys, some_values) in zip(records.tolist(), blocks, strict=False):
            for head, number in enumerate(some_records):
                _fill(layout, record, some_keys[head], some_values[head])
                copy_bytes(places[number], record.data_ptr(), layout.record_bytes)

    def _store_below(
        self,
        layer: int,
        layout: BlockLayout,
        pages: np.ndarray,
        blocks: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        at = 0
        while at < len(pages):
            view = self._lower.host_view(int(pages[at]), layout)
            if view is None:
                break
            _fill(layout, view, *blocks[at])
            at += 1
        if at == len(pages):
            return
        self._lower.check_file()
        per_buffer = self._device.buffer_bytes // layout.page_bytes
        for first in range(at, len(pages), per_buffer):
            some = slice(first, first + per_buffer)
            buffer = self._device.take_buffer()
            num_bytes = len(pages[some]) * layout.page_bytes
            view = buffer.area.view(0, num_bytes, layout.dtype)
            view = view.view(-1, layout.num_heads, layout.record_items)
            for page_view, block in zip(view, blocks[some], strict=True):
                _fill(layout, page_view, *block)
            self._lower.write(layer, pages[some], layout, buffer)


@dataclass(frozen=True)
class _Wanted:
    """Records in the order of reading, equal ones beside each other."""

    order: np.ndarray  # numbers among what the caller asked for
    pages: np.ndarray
    heads: np.ndarray
    addresses: np.ndarray  # 0 where they must be read
    missing: np.ndarray  # bool
    is_first: np.ndarray  # bool: missing, and not equal to the one before


class BlockReads:
    """Reading of records, wherever they are."""

    def __init__(
        self, pages: PageTable, device: DeviceTier, lower: PageTiers, ledger: Ledger
    ) -> None:
        self._pages = pages
        self._device = device
        self._lower = lower
        self._ledger = ledger
        self.num_hits = self.num_misses = 0

    def stream(
        self, layout: BlockLayout, pages: np.ndarray, heads: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield records in groups, each with an address that is valid until the next group.

        Resident records, and those of host memory, are where they lie. The others are read ahead
        into buffers, and a group ends where one is full. `pages` and `heads`, int64, say the page
        and the head of each record, in the order in which they are wanted.

        Yields:
            Numbers of records (indices into `pages`) and their addresses, both int64.
        """
        if not len(pages):
            return
        order = _order_of(pages * layout.num_heads + heads)
        pages, heads = pages[order], heads[order]
        records = pages * layout.num_heads + heads
        is_new = np.concatenate([[True], records[1:] != records[:-1]])
        addresses = self._device.find(layout, records)
        in_host = (addresses == 0) & (self._pages.host[pages] != 0)
        self._count(layout, is_new, addresses != 0, in_host)
        residency = self._device.residency(layout)
        residency.touch(records[is_new])
        hits = records[is_new & (addresses != 0)]
        residency.pin(hits)  # none of them loses its slot before it was read
        try:
            addresses[in_host] = (self._pages.host[pages] + heads * layout.record_bytes)[in_host]
            self._admit(layout, records[is_new & in_host], addresses[is_new & in_host])
            missing = addresses == 0
            if not missing.any():
                yield order, addresses
                return
            self._device.wait()  # what is still being written is not read before
            wanted = _Wanted(order, pages, heads, addresses, missing, is_new & missing)
            yield from self._stream_missing(layout, wanted)
        finally:
            residency.release(hits)

    def _admit(self, layout: BlockLayout, records: np.ndarray, addresses: np.ndarray) -> None:
        """Copy those missing records to slots that are worth one."""
        order = np.argsort(records)
        admitted, places = self._device.admit(layout, records)
        sources = addresses[order][np.searchsorted(records[order], admitted)]
        for place, source in zip(places.tolist(), sources.tolist(), strict=True):
            copy_bytes(place, source, layout.record_bytes)

    def _stream_missing(
        self, layout: BlockLayout, wanted: _Wanted
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield groups, each with a buffer of missing records; the next one is under way."""
        number = np.cumsum(wanted.is_first) - 1  # of the missing record that an item is or follows
        per_buffer = self._device.buffer_bytes // layout.record_bytes
        group = np.maximum(number, 0) // per_buffer
        ends = np.searchsorted(group, np.arange(group[-1] + 1), side="right").tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        buffers: list[TransferBuffer] = []
        try:
            for i, (start, end) in enumerate(bounds):
                while len(buffers) < min(i + self._device.num_buffers, len(bounds)):
                    buffers.append(self._read_group(layout, wanted, *bounds[len(buffers)]))
                begin_ns = time.perf_counter_ns()
                buffers[i].wait()
                self._ledger.record_stall("read", begin_ns, time.perf_counter_ns())
                addresses, some = wanted.addresses[start:end], slice(start, end)
                place = number[some][wanted.missing[some]] - i * per_buffer
                base = buffers[i].area.address
                addresses[wanted.missing[some]] = base + place * layout.record_bytes
                first = wanted.is_first[some]
                records = wanted.pages[some] * layout.num_heads + wanted.heads[some]
                self._admit(layout, records[first], addresses[first])
                yield wanted.order[some], addresses
        finally:
            self._device.settle()  # what was read ahead and is not wanted any more

    def _read_group(
        self, layout: BlockLayout, wanted: _Wanted, start: int, end: int
    ) -> TransferBuffer:
        first = wanted.is_first[start:end]
        buffer = self._device.take_buffer()
        self._lower.read(
            wanted.pages[start:end][first], wanted.heads[start:end][first], layout, buffer
        )
        return buffer

    def _count(
        self, layout: BlockLayout, is_new: np.ndarray, resident: np.ndarray, in_host: np.ndarray
    ) -> None:
        num_records, num_hits = int(is_new.sum()), int((is_new & resident).sum())
        self.num_hits += num_hits
        self.num_misses += num_records - num_hits
        num_host = int((is_new & in_host).sum())
        if num_host:
            # The kernel reads them where they lie: they move, but never enter the device tier.
            num_bytes = num_host * layout.record_bytes
            self._ledger.record_transfer(Link.HOST_TO_DEVICE, num_bytes, time.perf_counter_ns())


def _order_of(records: np.ndarray) -> np.ndarray:
    """Return an order that keeps the first of equal records in place, the others beside it."""
    _, first, inverse = np.unique(records, return_index=True, return_inverse=True)
    return np.argsort(first[inverse], kind="stable")


def _fill(
    layout: BlockLayout, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Copy keys `(..., T, dk)` and values into records `(..., record_items)`."""
    to_keys, to_values = layout.split(records)
    to_keys.copy_(keys)
    to_values.copy_(values)
