"""Placements of DTensor: a dimension in turns of another level's shards."""

from __future__ import annotations

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["GATHERS_STRIDED", "StridedShard"]

GATHERS_STRIDED = hasattr(_redistribute, "_StridedShardNotDecodableError")
"""Whether `full_tensor()` gathers any strided shards. In torch 2.11 it raises for some of them."""
