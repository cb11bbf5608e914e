"""Layers that are resident from a block on: addresses of their records, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._blocks import LayerBlocks
from penstock.kv._device import DeviceTier


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
        table = state.table[:, first_block:].copy()
        records = table[:, None, :] * H + np.arange(H)[:, None]
        counts = np.full((*records.shape[:2], table.shape[1] + 1), T, dtype=np.int32)
        counts[..., -1] = state.num_tail
        found = None
        addresses = np.zeros(records.shape, dtype=np.int64)
        if records.size and table.min() >= 0:
            addresses = device.find(state.layout, records.ravel()).reshape(records.shape)
        if addresses.all():
            places = np.arange(records.shape[0] * H, dtype=np.int64).reshape(-1, H, 1)
            tail = state.tail.data_ptr() + places * state.layout.record_bytes
            found = device.platform.from_host(np.concatenate([addresses, tail], axis=2))
        return cls(
            records if found is None else np.unique(records),
            found,
            device.platform.from_host(counts),
            first_block,
            device.version,
            table,
            state.tail,
        )

    def is_of(self, state: LayerBlocks, version: int, first_block: int) -> bool:
        """Return whether this holds for a layer now; if so, count its tail."""
        is_same = (
            self._version == version
            and self._first_block == first_block
            and self._tail is state.tail
            and np.array_equal(self._table, state.table[:, first_block:])
        )
        if is_same:
            self.counts[..., -1].fill_(state.num_tail)
        return is_same
