"""Placements of DTensor: a dimension in turns of another level's shards."""

from __future__ import annotations

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["GATHERS_STRIDED", "StridedShard"]

GATHERS_STRIDED = hasattr(_redistribute, "_StridedShardNotDecodableError")
"""True where `full_tensor()` gathers any strided shards; that of torch 2.11 raises for some."""
