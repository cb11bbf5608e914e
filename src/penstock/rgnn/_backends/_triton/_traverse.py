"""Launches of traversals: groups of rows by how long they are, and the longest ones in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from penstock.rgnn._backends._triton import _kernels, _tables
from penstock.rgnn._backends._triton._body import (
    GroupSizes,
    Parameter,
    Partial,
    RowIndex,
    Total,
    Value,
)
from penstock.rgnn._backends._triton._index import power_of_two
from penstock.rgnn._backends._triton._launch import (
    Call,
    Launch,
    add_pieces,
    cdiv,
    sum_type,
)
from penstock.rgnn._backends._triton._source import Function, Traversal
from penstock.rgnn._backends._triton._tables import Bucket, Giants
from penstock.rgnn._backends._triton._traversals import PARTS
from penstock.rgnn._interpreter import wide_dtype
from penstock.rgnn._schedule import Kernel

_BLOCK_NUMBERS = 2048
"""Numbers in a block: with four warps, sixteen in each thread."""
_Reductions = Mapping[Parameter, torch.Tensor]


def traverse(on: Call, written: Traversal, module: ModuleType, kernel: Kernel) -> None:
    """Run a traversal; the values that it stores are put into memory.

    Args:
        on: What it works on.
        written: Its source.
        module: Its source as functions.
        kernel: Its place in the schedule.
    """
    nodes = on.program.nodes
    for value in written.stored:
        num_rows = on.graph.counts.rows(nodes[value].space)
        on.memory[value] = torch.empty(
            num_rows, *nodes[value].shape, dtype=on.dtype, device=on.graph.device
        )
    constants = {"COMPUTE": sum_type(on.dtype)}
    if kernel.grouped_by is None:
        num_rows = on.graph.counts.rows(kernel.space)
        left = max(1, _BLOCK_NUMBERS // written.whole.num_features)
        num_features = min(power_of_two(written.row_features), left, 1024)
        block_rows = min(128, left // num_features)
        constants |= {"ROWS": block_rows, "FEATURES": num_features}
        grid = (
            cdiv(num_rows, block_rows),
            cdiv(written.row_features, num_features),
        )
        arguments = (*_pointers(on, written.whole, {}), num_rows)
        on.run(Launch(getattr(module, written.whole.name), grid, arguments, constants))
        return
    buckets, giants = _tables.buckets(on.graph, kernel.grouped_by)
    for bucket in buckets:
        pointers = _pointers(on, written.whole, {})
        on.run(_over_groups(written.whole, module, pointers, bucket, constants))
    if giants is not None:
        _in_stages(on, written, module, giants, constants)


def _in_stages(
    on: Call,
    written: Traversal,
    module: ModuleType,
    giants: Giants,
    constants: Mapping[str, Any],
) -> None:
    """Run a traversal of groups that are cut: stage by stage over all pieces."""
    wide, device = wide_dtype(on.dtype), on.graph.device
    known: dict[Parameter, torch.Tensor] = {}
    for number, stage in enumerate(written.stages):
        for value in stage.reduced:
            shape = on.program.nodes[value].shape
            for part in PARTS[on.program.nodes[value].op]:
                for kind, count in ((Partial, len(giants.places)), (Total, len(giants.groups))):
                    made = torch.empty(count, *shape, dtype=wide, device=device)
                    known[kind(value, part)] = made
        pointers = (*_pointers(on, stage.function, known), giants.places)
        on.run(_over_groups(stage.function, module, pointers, giants.pieces, constants))
        for value in stage.reduced:
            if on.program.nodes[value].op == "softmax":
                _merge_softmax_pieces(on, value, known, giants)
                continue
            partial = known[Partial(value, "")]
            if value in written.stored:
                add_pieces(on, partial, on.memory[value], giants.groups, giants.first_pieces)
            if number + 1 < len(written.stages) or written.epilogue is not None:
                add_pieces(on, partial, known[Total(value, "")], None, giants.first_pieces)
    if written.epilogue is not None:
        _finish(on, written.epilogue, module, known, giants, constants)


def _finish(
    on: Call,
    epilogue: Function,
    module: ModuleType,
    known: _Reductions,
    giants: Giants,
    constants: Mapping[str, Any],
) -> None:
    """Run what follows the stages, of groups whose pieces have been added."""
    num_groups = max(1, _BLOCK_NUMBERS // epilogue.num_features)
    count = len(giants.groups)
    arguments = (*_pointers(on, epilogue, known), giants.groups, count)
    kernel = getattr(module, epilogue.name)
    grid = (cdiv(count, num_groups),)
    on.run(Launch(kernel, grid, arguments, {"GROUPS": num_groups, **constants}))


def _over_groups(
    function: Function,
    module: ModuleType,
    pointers: tuple[torch.Tensor, ...],
    bucket: Bucket,
    constants: Mapping[str, Any],
) -> Launch:
    """A traversal of groups, or of pieces of groups, that are about as long."""
    # Groups of a bucket without partners are long, and there are few of them.
    # Sums of few features leave most lanes of many warps idle, and spill: on gfx942 at 8 warps.
    is_large = bucket.lanes.num_groups == 1 and function.fewest_summed >= 64
    is_large = is_large or function.num_features > _BLOCK_NUMBERS
    num_warps = 8 if is_large else 4
    left = max(1, _BLOCK_NUMBERS * num_warps // 4 // function.num_features)
    num_rows = min(bucket.lanes.num_rows, left)
    if num_rows < 256:  # on gfx942, sums of scalars spill where rows leave many lanes idle
        num_rows = min(num_rows, 64 if num_warps == 8 else 16)
    num_groups = min(bucket.lanes.num_groups, left // num_rows)
    count = len(bucket.groups)
    arguments = (*pointers, bucket.groups, bucket.begins, bucket.ends, count)
    blocks = {"GROUPS": num_groups, "ROWS": num_rows}
    grid = (cdiv(count, num_groups),)
    kernel = getattr(module, function.name)
    return Launch(kernel, grid, arguments, {**blocks, **constants}, num_warps)


def _pointers(on: Call, function: Function, known: _Reductions) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for parameter in function.parameters:
        if isinstance(parameter, Value):
            found.append(on.memory[parameter.position])
        elif isinstance(parameter, RowIndex):
            index = _tables.row_index(on.graph, parameter.maps, parameter.order)
            assert index is not None, parameter
            found.append(index)
        elif isinstance(parameter, GroupSizes):
            found.append(on.graph.group_sizes(parameter.map))
        else:
            found.append(known[parameter])
    return tuple(found)


def _merge_softmax_pieces(on: Call, value: int, known: _Reductions, giants: Giants) -> None:
    pieces = [known[Partial(value, part)] for part in PARTS["softmax"]]
    totals = [known[Total(value, part)] for part in PARTS["softmax"]]
    length = math.prod(totals[0].shape[1:])
    block = min(128, power_of_two(length))
    constants = {"LENGTH": length, "BLOCK_PIECES": 16, "BLOCK_LENGTH": block}
    grid = (len(giants.groups), cdiv(length, block))
    arguments = (*pieces, *totals, giants.first_pieces)
    on.run(Launch(_kernels.merge_softmax_pieces, grid, arguments, constants))
