"""Tiles and tasks of the kernels, chosen from shapes alone, and their launches."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl
from torch import Tensor

from penstock.codegen import (
    Run,
    TritonLaunch,
    ceil_div,
    ceil_power,
    launch,
    product_precision,
    use_device,
)
from penstock.kv.triton import _kernels

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_LEAST_BLOCK = 16  # of a matrix that tensor cores multiply
_TILE_BYTES = 32 * 1024  # of keys and values that are on their way at once
_MOST_TOKENS = 64
_MOST_SUMS = 128 * 128  # elements of a block's sums
_TASK_TOKENS = 256  # the fewest of a task, so that its result is small beside its records
_ROW_TOKENS = 8  # the same, for each row
_NUM_STAGES = {2: 5, 4: 3}
"""By bytes of an element. Records' addresses are loaded two stages ahead of the records, so of five
stages two are of tiles on their way, and of three one; float32 has no registers for more."""
_NUM_TASKS = 512  # of a sequence, about: enough for all processors of a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskTiles:
    """Sizes of blocks, all powers of two but the last.

    Attributes:
        rows: Rows of a program.
        tokens: Tokens of a record that are read at once.
        key: Elements of a key, or more.
        value: Elements of a value, or more.
        of_record: Tiles of tokens in a record.
        of_task: Tiles of tokens of a program.
        num_warps: Warps of a program.
        num_stages: TaskTiles on their way.
        num_tasks: Programs that the tokens of a head are divided over.
    """

    rows: int
    tokens: int
    key: int
    value: int
    of_record: int
    of_task: int
    num_warps: int
    num_stages: int
    num_tasks: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RecordCall:
    """Operands of `attend_records`, checked.

    Attributes:
        query: `(B, Hq, n, dk)`, contiguous, of the records' dtype.
        addresses: `(B, H, k)`, contiguous.
        counts: `(B, H, k)`, contiguous.
        block_tokens: Tokens of a record.
        value_dim: Elements of a value.
        scale: Factor of products.
        softcap: c of c tanh(score / c), or 0.
        visible: bool `(B, H, n, k * block_tokens)`, any strides but that of tokens, 1; or None.
        bias: `(B, Hq, n, k * block_tokens)`, likewise.
        is_aligned: Whether all addresses are multiples of 16.
    """

    query: Tensor
    addresses: Tensor
    counts: Tensor
    block_tokens: int
    value_dim: int
    scale: float
    softcap: float
    visible: Tensor | None
    bias: Tensor | None
    is_aligned: bool

    @property
    def num_rows(self) -> int:
        """Rows of a KV head."""
        return self.query.shape[1] // self.addresses.shape[1] * self.query.shape[2]

    @property
    def is_masked(self) -> bool:
        """True where scores are more than scaled products of all tokens."""
        return bool(self.softcap) or self.visible is not None or self.bias is not None


def most_rows(dtype: torch.dtype, key_dim: int, value_dim: int) -> int:
    """Return the most rows of a program: with more, records are read several times."""
    widest = ceil_power(max(key_dim, value_dim), _LEAST_BLOCK)
    return min(128, _MOST_SUMS // widest) if dtype.itemsize == 2 else _LEAST_BLOCK


def choose_tiles(call: RecordCall) -> TaskTiles:
    """Choose sizes such that no kernel spills registers on sm_90 or gfx942.

    Nothing depends on the device or the batch, so a sequence has the same bits on its own.
    A program has all rows of a KV head, so that records are read once, up to 128 rows of 128
    elements, or 64 of 256; float32 is multiplied in registers, and has 16 rows.
    """
    element_bytes = call.query.element_size()
    key, value = (ceil_power(d, _LEAST_BLOCK) for d in (call.query.shape[3], call.value_dim))
    most = most_rows(call.query.dtype, key, value)
    rows = max(_LEAST_BLOCK, min(ceil_power(call.num_rows), most))
    most = min(_MOST_TOKENS, _TILE_BYTES // (2 * max(key, value) * element_bytes))
    if call.is_masked or rows > _LEAST_BLOCK:
        most = _LEAST_BLOCK
    tokens = max(_LEAST_BLOCK, min(ceil_power(call.block_tokens), most))
    of_record = ceil_div(call.block_tokens, tokens)
    _, num_heads, num_records = call.addresses.shape
    num_tiles = num_records * of_record
    least = max(_TASK_TOKENS, _ROW_TOKENS * rows) // tokens
    of_task = max(least, ceil_power(ceil_div(num_tiles * num_heads, _NUM_TASKS)))
    return TaskTiles(
        rows=rows,
        tokens=tokens,
        key=key,
        value=value,
        of_record=of_record,
        of_task=of_task,
        num_warps=8 if rows > 32 else 4,
        num_stages=2 if torch.version.hip else _NUM_STAGES[element_bytes],
        num_tasks=max(1, ceil_div(num_tiles, of_task)),
    )


def attend(
    call: RecordCall, *, with_block_lse: bool, tiles: TaskTiles | None = None, run: Run = launch
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, log-sum-exp and that of each record; the last is empty if it is not wanted."""
    query, tiles = call.query, tiles or choose_tiles(call)
    (batch, heads, num_tokens, _), num_records = query.shape, call.addresses.shape[2]
    shape = (batch, heads, num_tokens)
    make = {"dtype": torch.float32, "device": query.device}
    out, lse = torch.empty(*shape, call.value_dim, **make), torch.empty(shape, **make)
    num_tiles = num_records * tiles.of_record if with_block_lse else 0
    tile_lse = torch.empty(*shape, num_tiles, **make)
    if lse.numel() > 0:
        parts, part_lse = out, lse
        if tiles.num_tasks > 1:
            parts = torch.empty(tiles.num_tasks, *out.shape, **make)
            part_lse = torch.empty(tiles.num_tasks, *lse.shape, **make)
        with use_device(query.device):
            run(_launch_tasks(call, tiles, (parts, part_lse, tile_lse), with_block_lse))
            if tiles.num_tasks > 1:
                run(_launch_merge(tiles, (parts, part_lse), (out, lse)))
    if tiles.of_record > 1 and with_block_lse:
        tile_lse = tile_lse.unflatten(-1, (num_records, tiles.of_record)).logsumexp(-1)
    return out, lse, tile_lse


def _launch_tasks(
    call: RecordCall, tiles: TaskTiles, results: tuple[Tensor, Tensor, Tensor], with_tile_lse: bool
) -> TritonLaunch:
    query, visible, bias = call.query, call.visible, call.bias
    batch, kv_heads, num_records = call.addresses.shape
    return TritonLaunch(
        kernel=_kernels.attend_tasks,
        grid=(batch * kv_heads * ceil_div(call.num_rows, tiles.rows), tiles.num_tasks),
        arguments=(
            *(query, call.addresses, call.counts),
            *(query if visible is None else visible, query if bias is None else bias),
            *results,
            *(float(call.scale), float(call.softcap)),
            *(kv_heads, call.num_rows, query.shape[2], num_records),
            *((0, 0, 0) if visible is None else visible.stride()[:3]),
            *((0, 0, 0) if bias is None else bias.stride()[:3]),
        ),
        constants={
            "ELEMENT": _TYPES[query.dtype],
            "ALIGNED": call.is_aligned,
            "PRECISION": product_precision(),
            "HAS_SOFTCAP": call.softcap != 0,
            "HAS_VISIBLE": visible is not None,
            "HAS_BIAS": bias is not None,
            "HAS_TILE_LSE": with_tile_lse,
            "RECORD_TOKENS": call.block_tokens,
            "KEY_DIM": query.shape[3],
            "VALUE_DIM": call.value_dim,
            "TASK_TILES": tiles.of_task,
            "BLOCK_ROWS": tiles.rows,
            "BLOCK_TOKENS": tiles.tokens,
            "BLOCK_KEY": tiles.key,
            "BLOCK_VALUE": tiles.value,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _launch_merge(
    tiles: TaskTiles, parts: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]
) -> TritonLaunch:
    out, lse = results
    return TritonLaunch(
        kernel=_kernels.merge_tasks,
        grid=(lse.numel(),),
        arguments=(*parts, out, lse, lse.numel(), tiles.num_tasks),
        constants={
            "VALUE_DIM": out.shape[3],
            "ALL_TASKS": ceil_power(tiles.num_tasks),
            "BLOCK_TASKS": min(16, ceil_power(tiles.num_tasks)),
            "BLOCK_VALUE": tiles.value,
        },
    )
