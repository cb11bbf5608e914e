"""Bytes that the kernels ask of memory, as formulas of shapes and counts.

Of each of B * H heads, with R rows in `blocks` of rows, records of c tokens with keys of K and
values of V elements of E bytes, and cut into tiles and tasks:

    attend_tasks    blocks * (tasks of_task * 12 [address and count] + c (K + V) E of all records)
                    tasks R K of the query, R c of visible and of the bias
                    tasks R (V + 1) * 4 stored, and R * 4 for each tile where that is wanted
    merge_tasks     R tasks (V + 2) * 4 loaded, R (V + 1) * 4 stored

They are requests, before any cache.
"""

from __future__ import annotations

from penstock.codegen import ByteCount, ceil_div
from penstock.kv.triton._launch import RecordCall, TaskTiles

_SUM = 4  # bytes of a float32
_ENTRY = 8 + 4  # bytes of an address and a count


def requested_bytes(call: RecordCall, tiles: TaskTiles, *, with_block_lse: bool) -> ByteCount:
    """Return the bytes of a call, from its counts, which are read."""
    batch, kv_heads, num_records = call.addresses.shape
    heads, rows = batch * kv_heads, call.num_rows
    num_tiles, blocks = num_records * tiles.of_record, ceil_div(rows, tiles.rows)
    tokens = int(call.counts.clamp(0, call.block_tokens).sum())
    token_bytes = (call.query.shape[3] + call.value_dim) * call.query.element_size()
    loaded = blocks * (heads * num_tiles * _ENTRY + tokens * token_bytes)
    loaded += tiles.num_tasks * heads * rows * call.query.shape[3] * call.query.element_size()
    loaded += rows * tokens * (0 if call.visible is None else 1)
    loaded += rows * tokens * (0 if call.bias is None else call.bias.element_size())
    result = heads * rows * (call.value_dim + 1) * _SUM
    stored = tiles.num_tasks * result + with_block_lse * heads * rows * num_tiles * _SUM
    if tiles.num_tasks > 1:
        loaded += tiles.num_tasks * (result + heads * rows * _SUM)
        stored += result
    return ByteCount(
        loaded_bytes=loaded, stored_bytes=stored, num_launches=1 + (tiles.num_tasks > 1)
    )
