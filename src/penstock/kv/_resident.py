"""Layers that are resident from a block on: addresses of their records, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from penstock.kv._blocks import LayerBlocks
from penstock.kv._device import DeviceTier
from penstock.kv._pages import PageTable
from penstock.kv._reads import BlockReads

_FEW_NUMBERS = 64  # that NumPy takes longer to look at than Python


class ResidentLayers:
    """Layers whose records are all resident, as of their last steps."""

    def __init__(self, pages: PageTable, device: DeviceTier, reads: BlockReads) -> None:
        self._pages, self._device, self._reads = pages, device, reads
        self._layers: dict[int, ResidentLayer] = {}

    def find_all(self, state: LayerBlocks, layer: int, first_block: int) -> ResidentLayer | None:
        """Return records from a block on, and the tail, for a step, which counts as reading them.

        Returns:
            None where a block was dropped, or a record is not resident.
        """
        found = self._look_up(state, layer, first_block)
        if found.addresses is None:
            return None
        self._reads.count_hits(state.layout, len(found.records), lambda: found.records)
        return found

    def find_chosen(
        self, state: LayerBlocks, layer: int, first_block: int, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return addresses and counts of chosen blocks and the tail, as `find_all` for a step.

        Args:
            state: The layer's blocks.
            layer: Its number.
            first_block: Number of the first block that may be read.
            chosen: Numbers of blocks, int64 `(B, H, k)`, distinct for each sequence and head.

        Returns:
            Both `(B, H, k + 1)`; None also where some are fills, or are in several sequences.
        """
        found = self._look_up(state, layer, first_block)
        blocks, layout = self._device.platform.to_host(chosen), state.layout
        if not _are_blocks(state, first_block, blocks) or self._are_shared(state, blocks):
            return None
        if found.addresses is None:
            return self._find_some(state, blocks)
        self._reads.count_hits(layout, blocks.size, lambda: _find_records(state, blocks).ravel())
        return found.operands(chosen)

    def _are_shared(self, state: LayerBlocks, blocks: np.ndarray) -> bool:
        """Return whether a page of some blocks is of several sequences."""
        if len(blocks) == 1:
            return False
        return bool((self._pages.references[_find_pages(state, blocks)] > 1).any())

    def _find_some(
        self, state: LayerBlocks, blocks: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Do as `find_chosen` for a layer of which some records are resident."""
        layout, platform = state.layout, self._device.platform
        records = _find_records(state, blocks)
        if records.min() < 0:
            return None
        found = self._device.find(layout, records.ravel())
        if not found.all():
            return None
        self._reads.count_hits(layout, records.size, records.ravel)
        B, H, k = records.shape
        addresses = np.empty((B, H, k + 1), dtype=np.int64)
        addresses[:, :, :k] = found.reshape(records.shape)
        addresses[:, :, k] = find_tails(state)
        counts = np.full(addresses.shape, layout.block_tokens, dtype=np.int32)
        counts[:, :, k] = state.num_tail
        return platform.from_host(addresses), platform.from_host(counts)

    def _look_up(self, state: LayerBlocks, layer: int, first_block: int) -> ResidentLayer:
        found = self._layers.get(layer)
        if found is None or not found.is_of(state, self._device.version, first_block):
            found = self._layers[layer] = ResidentLayer.find(state, self._device, first_block)
        return found


@dataclass(frozen=True, eq=False)
class ResidentLayer:
    """Addresses of a layer's records and of its tail, valid while nothing changes its places.

    Attributes:
        records: Distinct records, int64.
        addresses: Of each record and, last, of the tail, int64 `(B, H, blocks + 1)`; None where a
            record is not resident.
        counts: Tokens of each, int32; those of the tail as of the last `is_of`.
    """

    records: np.ndarray
    addresses: torch.Tensor | None
    counts: torch.Tensor
    _first_block: int
    _version: int
    _table: np.ndarray
    _tail: torch.Tensor

    @classmethod
    def find(cls, state: LayerBlocks, device: DeviceTier, first_block: int) -> ResidentLayer:
        """Find the records of a layer, but for those of the blocks before `first_block`."""
        H, T = state.layout.num_heads, state.layout.block_tokens
        table = state.table[:, first_block:]
        records = table[:, None, :] * H + np.arange(H)[:, None]
        counts = np.full((*records.shape[:2], table.shape[1] + 1), T, dtype=np.int32)
        counts[..., -1] = state.num_tail
        found = None
        addresses = np.zeros(records.shape, dtype=np.int64)
        # Of one sequence all records are distinct.
        may_be = len(table) > 1 or device.residency(state.layout).num_resident >= records.size
        if may_be and records.size and table.min() >= 0:
            addresses = device.find(state.layout, records.ravel()).reshape(records.shape)
        if addresses.all():
            tails = find_tails(state)[:, :, None]
            found = device.platform.from_host(np.concatenate([addresses, tails], axis=2))
        return cls(
            records if found is None else np.unique(records),
            found,
            device.platform.from_host(counts),
            first_block,
            device.version,
            state.table,
            state.tail,
        )

    def operands(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return addresses and counts of some blocks and, last, of the tail.

        Args:
            blocks: Numbers, int64 `(B, H, k)`, on the device.
        """
        assert self.addresses is not None
        columns = blocks - self._first_block if self._first_block else blocks
        columns = functional.pad(columns, (0, 1), value=self.addresses.shape[2] - 1)
        addresses = self.addresses.gather(2, columns)
        return addresses, self.counts[..., -addresses.shape[2] :]  # of full blocks, and the tail

    def is_of(self, state: LayerBlocks, version: int, first_block: int) -> bool:
        """Return whether this holds for a layer now; if so, count its tail."""
        is_same = (
            self._version == version
            and self._first_block == first_block
            and self._tail is state.tail
            and self._table is state.table
        )
        if is_same:
            self.counts[..., -1].fill_(state.num_tail)
        return is_same


def _are_blocks(state: LayerBlocks, first_block: int, blocks: np.ndarray) -> bool:
    """Return whether numbers `(B, H, k)` are of blocks from one on, none of them a fill."""
    if blocks.shape[:2] != (state.batch_size, state.layout.num_heads) or not blocks.shape[2]:
        return False
    first, last = find_range(blocks)
    return first >= first_block and last <= state.num_blocks


def _find_pages(state: LayerBlocks, blocks: np.ndarray) -> np.ndarray:
    """Return the pages of a layer's blocks `(B, H, k)`, -1 for those that were dropped."""
    return state.table[np.arange(len(blocks))[:, None, None], blocks]


def _find_records(state: LayerBlocks, blocks: np.ndarray) -> np.ndarray:
    """Return the records of a layer's blocks `(B, H, k)`, below 0 for those that were dropped."""
    heads = state.layout.num_heads
    return _find_pages(state, blocks) * heads + np.arange(heads)[:, None]


def find_range(numbers: np.ndarray) -> tuple[int, int]:
    """Return the half-open range that numbers lie in, `(0, 0)` for none."""
    if not numbers.size:
        return 0, 0
    if numbers.size > _FEW_NUMBERS:
        return int(numbers.min()), int(numbers.max()) + 1
    few = numbers.ravel().tolist()
    return min(few), max(few) + 1


def find_tails(state: LayerBlocks) -> np.ndarray:
    """Return the addresses of a layer's tails, int64 `(B, H)`."""
    shape = state.batch_size, state.layout.num_heads
    places = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
    return state.tail.data_ptr() + places * state.layout.record_bytes
