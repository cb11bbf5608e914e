"""Launches of Triton kernels: matrix products with typed weights, their gradients, and traversals.

A traversal runs groups of rows by how long they are, and the longest ones in pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.runtime._async_compile import FutureKernel

from penstock.codegen import COMPILER_OPTIONS, ceil_div, ceil_power, product_precision
from penstock.rgnn.backends._invocation import read_rows
from penstock.rgnn.backends.triton import _kernels, _tables
from penstock.rgnn.backends.triton._body import (
    GroupSizes,
    Inexpressible,
    Parameter,
    Reduced,
    RowIndex,
    ValueRows,
)
from penstock.rgnn.backends.triton._source import PARTS, KernelSource, TraversalSource
from penstock.rgnn.backends.triton._tables import Bucket, CutGroups
from penstock.rgnn.graph import Graph
from penstock.rgnn.interpreter import wide_dtype
from penstock.rgnn.ir import Node, Program, Shape, broadcast, find_maps, find_source
from penstock.rgnn.lowering import Kernel
from penstock.rgnn.spaces import RowMap

_BLOCK_NUMBERS = 2048
"""Numbers in a block: with four warps, sixteen in each thread."""
_ENDS: tuple[Literal["partial", "total"], ...] = ("partial", "total")


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __call__(self) -> None:
        """Launch the kernel, unless there is nothing to do."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    def compile(self) -> None:
        """Compile its kernel, or have it compiled where `compile_together` waits for it."""
        if 0 in self.grid:
            return
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **COMPILER_OPTIONS}


def compile_together(walk: Callable[[Callable[[KernelLaunch], None]], object]) -> None:
    """Compile the kernels of a call at the same time, where each launch would wait for its own.

    Triton releases Python's lock in its passes and in LLVM, and the assembler is a process. What
    does not compile here is compiled again by its launch, which raises what is wrong with it: until
    3.12 Python itself now and then fails to parse in several threads at a time, this one included.
    """
    is_known = hasattr(os, "sched_getaffinity")
    num_threads = len(os.sched_getaffinity(0)) if is_known else os.cpu_count()
    kernels: dict[int, Any] = {}  # by identity: a kernel's hash parses its source

    def compile_unless_parsing_fails(launch: KernelLaunch) -> None:
        kernels[id(launch.kernel)] = launch.kernel
        with contextlib.suppress(SystemError):
            launch.compile()

    with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        walk(compile_unless_parsing_fails)
    # Triton 3.8 keeps a failure as it keeps a kernel, and would raise it again without compiling.
    for cache, *_ in (
        found for kernel in kernels.values() for found in kernel.device_caches.values()
    ):
        for key, made in tuple(cache.items()):
            if isinstance(made, FutureKernel):
                cache.pop(key, None)


@dataclasses.dataclass(frozen=True)
class LaunchContext:
    """A run of a direction: all that the launches of its kernels share.

    Attributes:
        program: The program.
        graph: The graph.
        dtype: The dtype of all values.
        run: Takes the launches.
        memory: Rows of values by position.
    """

    program: Program
    graph: Graph
    dtype: torch.dtype
    run: Callable[[KernelLaunch], None]
    memory: dict[int, torch.Tensor]


def add_pieces(
    context: LaunchContext,
    partial: torch.Tensor,
    out: torch.Tensor,
    targets: torch.Tensor | None,
    first_pieces: torch.Tensor,
) -> None:
    """Add pieces up, in their order, into rows of `out`: all of them, or those of `targets`."""
    arguments = (partial, out, out if targets is None else targets, first_pieces)
    constants = {"HAS_TARGETS": targets is not None, "SUM": sum_type(out.dtype)}
    join_pieces(context, _kernels.add_pieces, arguments, math.prod(out.shape[1:]), constants)


def join_pieces(
    context: LaunchContext,
    kernel: Any,
    arguments: tuple[torch.Tensor, ...],
    length: int,
    constants: Mapping[str, Any],
) -> None:
    """Launch a kernel that joins pieces of rows of a length; the last argument is their begins."""
    block = min(128, ceil_power(length))
    blocks = {"LENGTH": length, "BLOCK_PIECES": 16, "BLOCK_LENGTH": block}
    grid = (len(arguments[-1]) - 1, ceil_div(length, block))
    context.run(KernelLaunch(kernel, grid, arguments, {**blocks, **constants}))


def sum_type(dtype: torch.dtype) -> Any:
    """Return the dtype that numbers of `dtype` are added up in, as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32


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
    grid = (tiles.count * ceil_div(width, blocks["BLOCK_WIDTH"]), num_heads)
    arguments = (
        *(operand, operand if operand_index is None else operand_index, weight),
        *(out, out if out_index is None else out_index),
        *(tiles.targets, tiles.begins, tiles.ends),
    )
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
    program, source = context.program, find_source(context.program, position)
    rows = read_rows(program, context.graph, context.memory, source, context.dtype)
    return rows, find_maps(program, position)


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
    return min(most, ceil_power(length, 16))


def _choose_precision(dtype: torch.dtype) -> str:
    """Choose how float32 is multiplied: as `torch.backends.cuda.matmul` says."""
    return product_precision() if dtype == torch.float32 else "ieee"


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
        num_features = min(ceil_power(written.row_features), left, 1024)
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
    context: LaunchContext, function: KernelSource, known: Mapping[Parameter, torch.Tensor]
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
