"""Matrix products with typed weights, and the gradients of those weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from penstock.rgnn.backends.triton import _kernels, _tables
from penstock.rgnn.backends.triton._body import Inexpressible
from penstock.rgnn.backends.triton._index import power_of_two
from penstock.rgnn.backends.triton._launch import (
    KernelLaunch,
    LaunchContext,
    add_pieces,
    ceil_div,
    sum_type,
)
from penstock.rgnn.interpreter import wide_dtype
from penstock.rgnn.ir import Node, Shape, broadcast, find_maps, find_source
from penstock.rgnn.spaces import RowMap


def run_typed_product(context: LaunchContext, node: Node) -> torch.Tensor:
    """Run y_i = x_i W_{type of i}: a segment GEMM over all types in one launch."""
    nodes = context.program.nodes
    vector, matrix = (nodes[operand].shape for operand in node.operands)
    (operand, read), (weight, types) = (_find_rows(context, operand) for operand in node.operands)
    *heads, _, _ = matrix
    num_heads = math.prod(heads)
    inner, width = vector[-1], node.shape[-1]
    batch = math.prod(node.shape[len(heads) : -1])
    has_heads = bool(heads) and vector[0] > 1
    order = _tables.find_type_order(context.graph, types[0])
    operand_index = _tables.compose_index(context.graph, read, order)
    out_index = _tables.compose_index(context.graph, (), order)
    out = operand.new_empty(context.graph.counts.rows(node.space), *node.shape)
    blocks = _choose_blocks(operand.dtype, inner, width)
    tiles = _tables.cut_tiles(context.graph, types, batch=batch, block_rows=blocks["BLOCK_ROWS"])
    constants = {
        "HAS_OPERAND_INDEX": operand_index is not None,
        "HAS_OUT_INDEX": out_index is not None,
        "OPERAND_ROW": math.prod(vector),
        "OPERAND_HEAD": batch * inner if has_heads else 0,
        "BATCH": batch,
        "HEADS": num_heads,
        "INNER": inner,
        "WIDTH": width,
        "TRANSPOSED": node["transposed"],
        "PRECISION": _choose_precision(operand.dtype),
        "SUM": sum_type(operand.dtype),
    }
    operand_rows = (operand, operand if operand_index is None else operand_index)
    out_rows = (out, out if out_index is None else out_index)
    table = (tiles.targets, tiles.begins, tiles.ends)
    grid = (tiles.count * ceil_div(width, blocks["BLOCK_WIDTH"]), num_heads)
    arguments = (*operand_rows, weight, *out_rows, *table)
    context.run(
        KernelLaunch(_kernels.segment_gemm, grid, arguments, {**constants, **blocks}, num_stages=3)
    )
    return out


def run_weight_gradient(context: LaunchContext, node: Node) -> torch.Tensor:
    """Run G_r = sum of x_i^T g_i over the rows i of type r, in pieces that are added up.

    Raises:
        Inexpressible: The operands' batch axes are stretched in a way that no kernel has.
    """
    outer = context.program.nodes[node.operands[0]]
    ends = [_find_rows(context, operand) for operand in outer.operands]
    shapes = [context.program.nodes[operand].shape for operand in outer.operands]
    heads = outer["heads"]
    batch_axes = broadcast(shapes[0][:-1], shapes[1][:-1])
    num_heads, batch = math.prod(batch_axes[:heads]), math.prod(batch_axes[heads:])
    order = _tables.find_type_order(context.graph, node.map)
    constants: dict[str, Any] = {}
    arguments: list[torch.Tensor] = []
    for side, shape, (rows, maps) in zip(("LEFT", "RIGHT"), shapes, ends, strict=True):
        index = _tables.compose_index(context.graph, maps, order)
        arguments += [rows, rows if index is None else index]
        constants[f"HAS_{side}_INDEX"] = index is not None
        constants[f"{side}_ROW"] = math.prod(shape)
        constants |= _find_strides(side, shape, heads, batch)
    rows = arguments[0]
    dtype = rows.dtype
    pieces = _tables.cut_pieces(context.graph, node.map, batch=batch)
    height, width = node.shape[-2:]
    partial = rows.new_empty(pieces.count, *node.shape, dtype=wide_dtype(dtype))
    out = rows.new_empty(context.graph.counts.rows(node.space), *node.shape)
    blocks = {
        "BLOCK_ROWS": 32,
        "BLOCK_HEIGHT": _choose_block(height, 64),
        "BLOCK_WIDTH": _choose_block(width, 64),
    }
    constants |= {"BATCH": batch, "HEADS": num_heads, "HEIGHT": height, "WIDTH": width}
    constants |= {"PRECISION": _choose_precision(dtype), "SUM": sum_type(dtype), **blocks}
    num_blocks = ceil_div(height, blocks["BLOCK_HEIGHT"]) * ceil_div(width, blocks["BLOCK_WIDTH"])
    grid = (pieces.count * num_blocks, num_heads)
    arguments += [partial, pieces.begins, pieces.ends]
    context.run(
        KernelLaunch(_kernels.weight_gradient, grid, tuple(arguments), constants, num_stages=3)
    )
    add_pieces(context, partial, out, None, pieces.first_runs)
    return out


def _find_rows(context: LaunchContext, position: int) -> tuple[torch.Tensor, tuple[RowMap, ...]]:
    """Return the rows that an operand is read from, and along which maps."""
    rows = context.rows(find_source(context.program, position))
    return rows, find_maps(context.program, position)


def _find_strides(side: str, shape: Shape, heads: int, batch: int) -> dict[str, int]:
    """Return the strides of the heads and the batch of a row; 0 where all read the same."""
    of_head, rest, width = shape[:heads], shape[heads:-1], shape[-1]
    if math.prod(rest) not in (1, batch):
        raise Inexpressible(f"batch axes {list(rest)} are stretched to {batch}")
    has_heads, has_batch = math.prod(of_head) > 1, math.prod(rest) > 1
    return {
        f"{side}_HEAD": math.prod(rest) * width if has_heads else 0,
        f"{side}_BATCH": width if has_batch else 0,
    }


def _choose_blocks(dtype: torch.dtype, inner: int, width: int) -> dict[str, int]:
    """Choose tiles of a segment GEMM: small enough for relations with few rows."""
    most = 64 if dtype != torch.float64 else 32
    return {
        "BLOCK_ROWS": most,
        "BLOCK_INNER": _choose_block(inner, 32),
        "BLOCK_WIDTH": _choose_block(width, most),
    }


def _choose_block(length: int, most: int) -> int:
    """Choose a block length: at least 16, which is what a matrix instruction takes."""
    return min(most, max(16, power_of_two(length)))


def _choose_precision(dtype: torch.dtype) -> str:
    """Choose how float32 is multiplied: as `torch.backends.cuda.matmul` says."""
    is_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == torch.float32 and is_tf32 else "ieee"
