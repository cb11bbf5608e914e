"""Pieces of real tensors: a rank's part of a whole one, and its name in DTensor's words."""

from __future__ import annotations

import itertools
from math import prod

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from penstock.compat.placements import StridedShard
from penstock.errors import PlanError
from penstock.graph.step_graph import TensorView
from penstock.partitioner._mesh import Placement
from penstock.partitioner._pieces import (
    Digit,
    StoragePiece,
    dense_strides,
    split_into_digits,
    view_digits,
)


def cut_tensor(
    tensor: torch.Tensor,
    view: TensorView,
    part: TensorView,
    cuts: tuple[int, ...],
    placement: Placement,
    sizes: tuple[int, ...],
    coordinates: tuple[int, ...],
) -> torch.Tensor:
    """Return a rank's part of a tensor, in memory of its own.

    Args:
        tensor: The whole tensor, in any layout.
        view: It in the step of all devices.
        part: The rank's part in the rank's step.
        cuts: Of its storage.
        placement: Of the storage.
        sizes: Ranks of each level.
        coordinates: The rank's.
    """
    if len(cuts) == 1 or all(axis < 0 for axis in placement):
        whole = torch.empty_strided(
            part.shape, part.stride, dtype=tensor.dtype, device=tensor.device
        )
        return whole.copy_(tensor)
    memory = torch.empty(view.end, dtype=tensor.dtype, device=tensor.device)
    memory.as_strided(view.shape, view.stride, view.offset).copy_(tensor)
    extents = tuple(high // low for low, high in itertools.pairwise(cuts))
    memory = torch.nn.functional.pad(memory, (0, max(0, prod(extents) - len(memory))))
    whole = StoragePiece(0, part.dtype, (-1,) * len(sizes), (), extents, dense_strides(extents))
    digits = split_into_digits(extents, (placement,), sizes)
    assert digits is not None, "one placement is always of its own kind"
    found = view_digits(whole, digits)
    pieces = memory.as_strided(found.shape, found.stride)
    for dim, digit in enumerate(digits):
        if digit.level >= 0 and placement[digit.level] == digit.axis:
            pieces = pieces.narrow(dim, coordinates[digit.level], 1)
    flat = pieces.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.as_strided(part.shape, part.stride, part.offset)


def torch_placements(
    name: str,
    view: TensorView,
    cuts: tuple[int, ...],
    placement: Placement,
    sizes: tuple[int, ...],
) -> tuple[TorchPlacement, ...]:
    """Return the placement of a tensor in DTensor's words.

    An axis within a dimension is a strided shard: the dimension is first cut into as many parts as
    there are indices outside of the axis.

    Raises:
        PlanError: An axis is of no dimension of the tensor (rule `"placement"`).
    """
    extents = tuple(high // low for low, high in itertools.pairwise(cuts))
    digits = split_into_digits(extents, (placement,), sizes)
    assert digits is not None, "one placement is always of its own kind"
    found: list[TorchPlacement] = []
    for level, axis in enumerate(placement):
        if axis < 0:
            found.append(Replicate())
            continue
        dims = [
            dim
            for dim, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True))
            if size > 1 and stride <= cuts[axis] < stride * size
        ]
        if not dims:
            raise PlanError(
                f"{name} is split along an axis of stride {cuts[axis]}, which is none of its "
                "dimensions'",
                rule="placement",
            )
        dim = dims[0]
        end = view.stride[dim] * view.shape[dim]
        outside = _count_outside(digits, cuts, placement, axis, level, end)
        found.append(Shard(dim) if outside == 1 else StridedShard(dim, split_factor=outside))
    return tuple(found)


def _count_outside(
    digits: tuple[Digit, ...],
    cuts: tuple[int, ...],
    placement: Placement,
    axis: int,
    level: int,
    end: int,
) -> int:
    """Return the indices of a dimension that lie outside of a digit, of those that are left."""
    outside = 1
    for digit in digits:
        if (digit.axis, digit.level) == (axis, level):
            break
        is_cut = 0 <= digit.level < level and placement[digit.level] == digit.axis
        if cuts[digit.axis] < end and not is_cut:
            outside *= digit.size
    return outside
