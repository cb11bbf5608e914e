"""Launches of traversals: groups of rows by how long they are, and the longest ones in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

import torch

from penstock.rgnn.backends.triton import _kernels, _tables
from penstock.rgnn.backends.triton._body import (
    GroupSizes,
    Parameter,
    Reduced,
    RowIndex,
    ValueRows,
)
from penstock.rgnn.backends.triton._index import power_of_two
from penstock.rgnn.backends.triton._launch import (
    KernelLaunch,
    LaunchContext,
    add_pieces,
    ceil_div,
    join_pieces,
    sum_type,
)
from penstock.rgnn.backends.triton._source import KernelSource, TraversalSource
from penstock.rgnn.backends.triton._tables import Bucket, CutGroups
from penstock.rgnn.backends.triton._traversal_writers import PARTS
from penstock.rgnn.interpreter import wide_dtype
from penstock.rgnn.lowering import Kernel

_BLOCK_NUMBERS = 2048
"""Numbers in a block: with four warps, sixteen in each thread."""
_ENDS: tuple[Literal["partial", "total"], ...] = ("partial", "total")
_Reductions = Mapping[Parameter, torch.Tensor]


def run_traversal(
    context: LaunchContext, written: TraversalSource, module: ModuleType, kernel: Kernel
) -> None:
    """Run a traversal; the values that it stores are put into memory."""
    nodes = context.program.nodes
    for value in written.stored:
        num_rows = context.graph.counts.rows(nodes[value].space)
        context.memory[value] = torch.empty(
            num_rows, *nodes[value].shape, dtype=context.dtype, device=context.graph.device
        )
    constants = {"COMPUTE": sum_type(context.dtype)}
    if kernel.grouped_by is None:
        num_rows = context.graph.counts.rows(kernel.space)
        left = max(1, _BLOCK_NUMBERS // written.whole.num_features)
        num_features = min(power_of_two(written.row_features), left, 1024)
        block_rows = min(128, left // num_features)
        constants |= {"ROWS": block_rows, "FEATURES": num_features}
        grid = (ceil_div(num_rows, block_rows), ceil_div(written.row_features, num_features))
        arguments = (*_find_pointers(context, written.whole, {}), num_rows)
        context.run(KernelLaunch(getattr(module, written.whole.name), grid, arguments, constants))
        return
    buckets, cut = _tables.sort_groups(context.graph, kernel.grouped_by)
    for bucket in buckets:
        pointers = _find_pointers(context, written.whole, {})
        context.run(_launch_groups(written.whole, module, pointers, bucket, constants))
    if cut is not None:
        _run_stages(context, written, module, cut, constants)


def _run_stages(
    context: LaunchContext,
    written: TraversalSource,
    module: ModuleType,
    cut: CutGroups,
    constants: Mapping[str, Any],
) -> None:
    """Run a traversal of groups that are cut: stage by stage over all pieces."""
    wide, device = wide_dtype(context.dtype), context.graph.device
    known: dict[Parameter, torch.Tensor] = {}
    for number, stage in enumerate(written.stages):
        for value in stage.reduced:
            shape = context.program.nodes[value].shape
            for part in PARTS[context.program.nodes[value].op]:
                for of, count in zip(_ENDS, (cut.runs.count, len(cut.groups)), strict=True):
                    rows = torch.empty(count, *shape, dtype=wide, device=device)
                    known[Reduced(value, part, of)] = rows
        pointers = (*_find_pointers(context, stage, known), cut.runs.targets)
        context.run(_launch_groups(stage, module, pointers, cut.pieces, constants))
        for value in stage.reduced:
            if context.program.nodes[value].op == "softmax":
                both = (Reduced(value, part, of) for of in _ENDS for part in PARTS["softmax"])
                tensors = (*(known[each] for each in both), cut.runs.first_runs)
                length = math.prod(context.program.nodes[value].shape)
                join_pieces(context, _kernels.merge_softmax_pieces, tensors, length, {})
                continue
            partial = known[Reduced(value, "", "partial")]
            if value in written.stored:
                add_pieces(context, partial, context.memory[value], cut.groups, cut.runs.first_runs)
            if number + 1 < len(written.stages) or written.epilogue is not None:
                total = known[Reduced(value, "", "total")]
                add_pieces(context, partial, total, None, cut.runs.first_runs)
    if written.epilogue is not None:
        num_groups, count = max(1, _BLOCK_NUMBERS // written.epilogue.num_features), len(cut.groups)
        arguments = (*_find_pointers(context, written.epilogue, known), cut.groups, count)
        kernel, grid = getattr(module, written.epilogue.name), (ceil_div(count, num_groups),)
        context.run(KernelLaunch(kernel, grid, arguments, {"GROUPS": num_groups, **constants}))


def _launch_groups(
    function: KernelSource,
    module: ModuleType,
    pointers: tuple[torch.Tensor, ...],
    bucket: Bucket,
    constants: Mapping[str, Any],
) -> KernelLaunch:
    """Return the launch of a traversal of groups, or of pieces, that are about as long."""
    # Groups of a bucket without partners are long, and there are few of them.
    # Sums of few features leave most lanes of many warps idle, and spill: on gfx942 at 8 warps.
    is_large = bucket.num_groups == 1 and function.fewest_summed >= 64
    is_large = is_large or function.num_features > _BLOCK_NUMBERS
    num_warps = 8 if is_large else 4
    left = max(1, _BLOCK_NUMBERS * num_warps // 4 // function.num_features)
    num_rows = min(bucket.num_rows, left)
    if num_rows < 256:  # on gfx942, sums of scalars spill where rows leave many lanes idle
        num_rows = min(num_rows, 64 if num_warps == 8 else 16)
    num_groups = min(bucket.num_groups, left // num_rows)
    count = len(bucket.groups)
    arguments = (*pointers, bucket.groups, bucket.begins, bucket.ends, count)
    blocks = {"GROUPS": num_groups, "ROWS": num_rows}
    grid = (ceil_div(count, num_groups),)
    kernel = getattr(module, function.name)
    return KernelLaunch(kernel, grid, arguments, {**blocks, **constants}, num_warps)


def _find_pointers(
    context: LaunchContext, function: KernelSource, known: _Reductions
) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for parameter in function.parameters:
        if isinstance(parameter, ValueRows):
            found.append(context.memory[parameter.position])
        elif isinstance(parameter, RowIndex):
            index = _tables.compose_index(context.graph, parameter.maps, parameter.order)
            assert index is not None, parameter
            found.append(index)
        elif isinstance(parameter, GroupSizes):
            found.append(context.graph.group_sizes(parameter.map))
        else:
            found.append(known[parameter])
    return tuple(found)
