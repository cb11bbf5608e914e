"""Placements of DTensor: a dimension in turns of another level's shards."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
