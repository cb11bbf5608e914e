"""Layers whose records are all resident: their addresses, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.kv._blocks import LayerBlocks


@dataclass(frozen=True, eq=False)
class ResidentLayer:
    """Addresses of a layer's records and of its tail, valid while nothing changes its places.

    Attributes:
        records: Distinct records, int64.
        addresses: Of each record and, last, of the tail, int64 `(B, H, num_blocks + 1)`; None where
            a record is not resident.
        counts: Tokens of each, int32; those of the tail as of the last `is_of`.
    """

    records: np.ndarray
    addresses: torch.Tensor | None
    counts: torch.Tensor
    _version: int
    _table: np.ndarray
    _tail: torch.Tensor

    @classmethod
    def make(
        cls, state: LayerBlocks, version: int, records: np.ndarray, addresses: np.ndarray
    ) -> ResidentLayer:
        """Make one from the layer's records and their addresses `(B, H, num_blocks)`."""
        B, H, num_blocks = records.shape
        places = np.arange(B * H, dtype=np.int64).reshape(B, H, 1) * state.layout.record_bytes
        counts = torch.full((B, H, num_blocks + 1), state.layout.block_tokens, dtype=torch.int32)
        counts[..., -1] = state.num_tail
        found = None
        if addresses.all():
            tail = state.tail.data_ptr() + places
            found = torch.from_numpy(np.concatenate([addresses, tail], axis=2))
        return cls(np.unique(records), found, counts, version, state.table.copy(), state.tail)

    def is_of(self, state: LayerBlocks, version: int) -> bool:
        """Return whether this holds for a layer now; if so, count its tail."""
        is_same = (
            self._version == version
            and self._tail is state.tail
            and np.array_equal(self._table, state.table)
        )
        if is_same:
            self.counts.numpy()[..., -1] = state.num_tail
        return is_same
