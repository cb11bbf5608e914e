"""Kernels of a schedule as launches: which Triton kernel, on which tensors, in which blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from penstock.rgnn._backends._triton import _kernels, _tables
from penstock.rgnn._backends._triton._body import (
    GroupSizes,
    Inexpressible,
    Parameter,
    Partial,
    RowIndex,
    Total,
    Value,
)
from penstock.rgnn._backends._triton._index import power_of_two
from penstock.rgnn._backends._triton._source import Function, Traversal
from penstock.rgnn._backends._triton._tables import Bucket, Giants, Maps
from penstock.rgnn._backends._triton._traversals import PARTS
from penstock.rgnn._graph import Graph
from penstock.rgnn._ir import Node, Program, Shape, broadcast
from penstock.rgnn._schedule import Kernel

Memory = dict[int, torch.Tensor]
"""Rows of values by position."""

_BLOCK_NUMBERS = 2048
"""Numbers in a block of a traversal: with four warps, sixteen in each thread."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __call__(self) -> None:
        """Launch it, unless there is nothing to do."""
        if 0 in self.grid:
            return
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        self.kernel[self.grid](*self.arguments, **self.constants, **options)


Run = Callable[[Launch], None]


def source_of(program: Program, position: int) -> tuple[int, Maps]:
    """What a chain of gathers reads, and along which maps, the first one from the reader's rows."""
    maps: Maps = ()
    while program.nodes[position].op == "gather":
        maps = (*maps, program.nodes[position].map)
        position = program.nodes[position].operands[0]
    return position, maps


def typed_product(
    program: Program, node: Node, graph: Graph, memory: Memory, run: Run
) -> torch.Tensor:
    """Rows times the matrix of their type."""
    nodes = program.nodes
    vector, read = source_of(program, node.operands[0])
    matrix, types = source_of(program, node.operands[1])
    operand, weight = memory[vector], memory[matrix]
    *heads, _, _ = nodes[matrix].shape
    num_heads = math.prod(heads)
    inner, width = nodes[vector].shape[-1], node.shape[-1]
    batch = math.prod(node.shape[len(heads) : -1])
    has_heads = bool(heads) and nodes[vector].shape[0] > 1
    order = _tables.type_order(graph, types[0])
    operand_index = _tables.row_index(graph, read, order)
    out_index = _tables.row_index(graph, (), order)
    out = operand.new_empty(graph.counts.rows(node.space), *node.shape)
    blocks = _product_blocks(operand.dtype, inner, width)
    tiles = _tables.tiles(graph, types, batch=batch, block_rows=blocks["BLOCK_ROWS"])
    constants = {
        "HAS_OPERAND_INDEX": operand_index is not None,
        "HAS_OUT_INDEX": out_index is not None,
        "OPERAND_ROW": math.prod(nodes[vector].shape),
        "OPERAND_HEAD": batch * inner if has_heads else 0,
        "BATCH": batch,
        "HEADS": num_heads,
        "INNER": inner,
        "WIDTH": width,
        "TRANSPOSED": node["transposed"],
        "PRECISION": _precision(operand.dtype),
        "SUM": _sum_type(operand.dtype),
    }
    operand_rows = (operand, operand if operand_index is None else operand_index)
    out_rows = (out, out if out_index is None else out_index)
    table = (tiles.targets, tiles.begins, tiles.ends)
    grid = (tiles.count, _blocks(width, blocks["BLOCK_WIDTH"]), num_heads)
    arguments = (*operand_rows, weight, *out_rows, *table)
    run(Launch(_kernels.segment_gemm, grid, arguments, {**constants, **blocks}, num_stages=3))
    return out


def weight_gradient(
    program: Program, node: Node, graph: Graph, memory: Memory, run: Run
) -> torch.Tensor:
    """For each type the sum of outer products of its rows, in pieces that are added up.

    Raises:
        Inexpressible: The operands' batch axes are stretched in a way that no kernel has.
    """
    outer = program.nodes[node.operands[0]]
    ends = [source_of(program, operand) for operand in outer.operands]
    shapes = [program.nodes[operand].shape for operand in outer.operands]
    heads = outer["heads"]
    batch_axes = broadcast(shapes[0][:-1], shapes[1][:-1])
    num_heads, batch = math.prod(batch_axes[:heads]), math.prod(batch_axes[heads:])
    order = _tables.type_order(graph, node.map)
    constants: dict[str, Any] = {}
    arguments: list[torch.Tensor] = []
    for side, shape, (source, maps) in zip(("LEFT", "RIGHT"), shapes, ends, strict=True):
        index = _tables.row_index(graph, maps, order)
        rows = memory[source]
        arguments += [rows, rows if index is None else index]
        constants[f"HAS_{side}_INDEX"] = index is not None
        constants[f"{side}_ROW"] = math.prod(shape)
        constants |= _strides(side, shape, heads, batch)
    rows = arguments[0]
    dtype = rows.dtype
    pieces = _tables.pieces(graph, node.map, batch=batch)
    height, width = node.shape[-2:]
    partial = rows.new_empty(pieces.count, *node.shape, dtype=_wide(dtype))
    out = rows.new_empty(graph.counts.rows(node.space), *node.shape)
    blocks = {
        "BLOCK_ROWS": 32,
        "BLOCK_HEIGHT": _block(height, 64),
        "BLOCK_WIDTH": _block(width, 64),
    }
    constants |= {"BATCH": batch, "HEADS": num_heads, "HEIGHT": height, "WIDTH": width}
    constants |= {"PRECISION": _precision(dtype), "SUM": _sum_type(dtype), **blocks}
    num_blocks = _blocks(height, blocks["BLOCK_HEIGHT"]) * _blocks(width, blocks["BLOCK_WIDTH"])
    grid = (pieces.count, num_blocks, num_heads)
    arguments += [partial, pieces.begins, pieces.ends]
    run(Launch(_kernels.weight_gradient, grid, tuple(arguments), constants, num_stages=3))
    _add_pieces(partial, out, None, pieces.first_runs, run)
    return out


def traversal(
    written: Traversal,
    module: ModuleType,
    program: Program,
    kernel: Kernel,
    graph: Graph,
    memory: Memory,
    run: Run,
    dtype: torch.dtype,
) -> None:
    """Run a traversal; the values that it stores are put into `memory`.

    Args:
        written: Its source.
        module: Its source as functions.
        program: The program.
        kernel: Its place in the schedule.
        graph: The graph.
        memory: What it reads.
        run: Takes the launches.
        dtype: Of all values.
    """
    nodes = program.nodes
    for value in written.stored:
        num_rows = graph.counts.rows(nodes[value].space)
        memory[value] = torch.empty(num_rows, *nodes[value].shape, dtype=dtype, device=graph.device)
    constants = {"COMPUTE": _sum_type(dtype)}
    if kernel.grouped_by is None:
        num_rows = graph.counts.rows(kernel.space)
        left = max(1, _BLOCK_NUMBERS // written.whole.num_features)
        num_features = min(power_of_two(written.row_features), left, 1024)
        block_rows = min(128, left // num_features)
        constants |= {"ROWS": block_rows, "FEATURES": num_features}
        grid = (_blocks(num_rows, block_rows), _blocks(written.row_features, num_features))
        arguments = (*_pointers(written.whole, graph, memory, {}), num_rows)
        run(Launch(getattr(module, written.whole.name), grid, arguments, constants))
        return
    buckets, giants = _tables.buckets(graph, kernel.grouped_by)
    for bucket in buckets:
        pointers = _pointers(written.whole, graph, memory, {})
        run(_over_groups(written.whole, module, pointers, bucket, constants))
    if giants is not None:
        _in_stages(written, module, program, graph, memory, giants, constants, run)


def _in_stages(
    written: Traversal,
    module: ModuleType,
    program: Program,
    graph: Graph,
    memory: Memory,
    giants: Giants,
    constants: Mapping[str, Any],
    run: Run,
) -> None:
    """Run a traversal of groups that are cut: stage by stage over all pieces."""
    wide = torch.float64 if constants["COMPUTE"] == tl.float64 else torch.float32
    known: dict[Parameter, torch.Tensor] = {}
    for number, stage in enumerate(written.stages):
        for value in stage.reduced:
            for part in PARTS[program.nodes[value].op]:
                for kind, count in ((Partial, len(giants.places)), (Total, len(giants.groups))):
                    shape = (count, *program.nodes[value].shape)
                    known[kind(value, part)] = torch.empty(shape, dtype=wide, device=graph.device)
        pointers = (*_pointers(stage.function, graph, memory, known), giants.places)
        run(_over_groups(stage.function, module, pointers, giants.pieces, constants))
        for value in stage.reduced:
            if program.nodes[value].op == "softmax":
                _merge_softmax_pieces(value, known, giants, run)
                continue
            partial = known[Partial(value, "")]
            if value in written.stored:
                _add_pieces(partial, memory[value], giants.groups, giants.first_pieces, run)
            if number + 1 < len(written.stages):
                _add_pieces(partial, known[Total(value, "")], None, giants.first_pieces, run)


def _over_groups(
    function: Function,
    module: ModuleType,
    pointers: tuple[torch.Tensor, ...],
    bucket: Bucket,
    constants: Mapping[str, Any],
) -> Launch:
    """A traversal of groups, or of pieces of groups, that are about as long."""
    # Groups of a bucket without partners are long, and there are few of them.
    num_warps = 8 if bucket.lanes.num_groups == 1 else 4
    left = max(1, _BLOCK_NUMBERS * num_warps // 4 // function.num_features)
    num_rows = min(bucket.lanes.num_rows, left)
    num_groups = min(bucket.lanes.num_groups, left // num_rows)
    count = len(bucket.groups)
    arguments = (*pointers, bucket.groups, bucket.begins, bucket.ends, count)
    blocks = {"GROUPS": num_groups, "ROWS": num_rows}
    grid = (_blocks(count, num_groups),)
    kernel = getattr(module, function.name)
    return Launch(kernel, grid, arguments, {**blocks, **constants}, num_warps)


def _pointers(
    function: Function, graph: Graph, memory: Memory, known: Mapping[Parameter, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for parameter in function.parameters:
        if isinstance(parameter, Value):
            found.append(memory[parameter.position])
        elif isinstance(parameter, RowIndex):
            index = _tables.row_index(graph, parameter.maps, parameter.order)
            assert index is not None, parameter
            found.append(index)
        elif isinstance(parameter, GroupSizes):
            found.append(graph.group_sizes(parameter.map))
        else:
            found.append(known[parameter])
    return tuple(found)


def _merge_softmax_pieces(
    value: int, known: Mapping[Parameter, torch.Tensor], giants: Giants, run: Run
) -> None:
    pieces = [known[Partial(value, part)] for part in PARTS["softmax"]]
    totals = [known[Total(value, part)] for part in PARTS["softmax"]]
    length = math.prod(totals[0].shape[1:])
    block = min(128, power_of_two(length))
    constants = {"LENGTH": length, "BLOCK_PIECES": 16, "BLOCK_LENGTH": block}
    grid = (len(giants.groups), _blocks(length, block))
    arguments = (*pieces, *totals, giants.first_pieces)
    run(Launch(_kernels.merge_softmax_pieces, grid, arguments, constants))


def _add_pieces(
    partial: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor | None,
    first_pieces: torch.Tensor,
    run: Run,
) -> None:
    """Add pieces up, in their order, into rows of `out`: all of them, or those of `targets`."""
    length = math.prod(out.shape[1:])
    constants = {
        "HAS_TARGETS": targets is not None,
        "LENGTH": length,
        "SUM": _sum_type(out.dtype),
        "BLOCK_PIECES": 16,
        "BLOCK_LENGTH": min(128, power_of_two(length)),
    }
    grid = (len(first_pieces) - 1, _blocks(length, constants["BLOCK_LENGTH"]))
    arguments = (partial, out, out if targets is None else targets, first_pieces)
    run(Launch(_kernels.add_pieces, grid, arguments, constants))


def _strides(side: str, shape: Shape, heads: int, batch: int) -> dict[str, int]:
    """How far apart the heads and the batch of a row are; 0 where one is read by all."""
    of_head, rest, width = shape[:heads], shape[heads:-1], shape[-1]
    if math.prod(rest) not in (1, batch):
        raise Inexpressible(f"batch axes {list(rest)} are stretched to {batch}")
    has_heads, has_batch = math.prod(of_head) > 1, math.prod(rest) > 1
    return {
        f"{side}_HEAD": math.prod(rest) * width if has_heads else 0,
        f"{side}_BATCH": width if has_batch else 0,
    }


def _product_blocks(dtype: torch.dtype, inner: int, width: int) -> dict[str, int]:
    """Tiles of a segment GEMM: small enough for relations with few rows."""
    most = 64 if dtype != torch.float64 else 32
    return {
        "BLOCK_ROWS": most,
        "BLOCK_INNER": _block(inner, 32),
        "BLOCK_WIDTH": _block(width, most),
    }


def _block(length: int, most: int) -> int:
    """At least 16, which is what a matrix instruction takes."""
    return min(most, max(16, power_of_two(length)))


def _blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sum_type(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as `torch.backends.cuda.matmul` says for torch's own products."""
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and is_tf32 else "ieee"
