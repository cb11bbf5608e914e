"""Lists of blocks: the blocks of a layout by query block and by key block.

A query sees the keys of a range, and a key is seen by the queries before an end. From these and a
mask of blocks follows which blocks are listed, and which of them hide some of their tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_BLOCKS = 1 << 22  # blocks that are looked at together: memory is linear in the tokens
UNBOUNDED = torch.iinfo(torch.int32).max


class Ranges(NamedTuple):
    """Tokens that see each other, by query and by key.

    Query i and key j see each other where

        first_key[i] <= j < end_key[i]  and  i < end_query[j]

    Attributes:
        first_key: int32 `(query_blocks * block,)`.
        end_key: int32 `(query_blocks * block,)`.
        end_query: int32 `(key_blocks * block,)`.
    """

    first_key: Tensor
    end_key: Tensor
    end_query: Tensor


class BlockLists(NamedTuple):
    """Blocks by query block, and the same by key block.

    Attributes:
        row_offsets: int32 `(heads, query_blocks + 1)`.
        key_blocks: int32 `(listed,)`.
        is_partial: uint8 `(listed,)`.
        column_offsets: int32 `(heads, key_blocks + 1)`.
        query_blocks: int32 `(listed,)`.
        is_partial_of_column: uint8 `(listed,)`.
    """

    row_offsets: Tensor
    key_blocks: Tensor
    is_partial: Tensor
    column_offsets: Tensor
    query_blocks: Tensor
    is_partial_of_column: Tensor


def list_blocks(ranges: Ranges, block: int, mask: Tensor | None) -> BlockLists:
    """Return the blocks that a mask has and in which tokens may see each other.

    Args:
        ranges: Tokens that see each other.
        block: Tokens of a block.
        mask: bool `(heads, query_blocks, key_blocks)`; None for one head and all blocks.
    """
    num_rows, num_columns = len(ranges.first_key) // block, len(ranges.end_query) // block
    num_heads = 1 if mask is None else len(mask)
    step = max(1, _CHUNK_BLOCKS // max(1, num_heads * num_columns))
    chunks = [torch.empty(4, 0, dtype=torch.int64, device=ranges.first_key.device)]
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        listed, is_partial = _look_at_rows(ranges, block, rows)
        of_heads = listed[None] if mask is None else mask[:, rows] & listed
        head, row, column = of_heads.nonzero().unbind(1)
        partial = is_partial[row, column].long()
        chunks.append(torch.stack([head, row + first, column, partial]))
    head, row, column, partial = torch.cat(chunks, 1)
    by_row = torch.sort(head * num_rows + row, stable=True).indices
    by_column = torch.sort((head * num_columns + column)[by_row], stable=True).indices
    by_column = by_row[by_column]  # query blocks ascend within a key block
    return BlockLists(
        _offsets(head * num_rows + row, num_heads, num_rows),
        column[by_row].int(),
        partial[by_row].to(torch.uint8),
        _offsets(head * num_columns + column, num_heads, num_columns),
        row[by_column].int(),
        partial[by_column].to(torch.uint8),
    )


def _look_at_rows(ranges: Ranges, block: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Return which blocks of some query blocks have pairs, and which have not all, bool each.

    A range of keys is marked at both of its ends; running sums are positive within a range.
    """
    num_rows, num_keys = rows.stop - rows.start, len(ranges.end_query)
    tokens = slice(rows.start * block, rows.stop * block)
    first_key, end_key = ranges.first_key[tokens].long(), ranges.end_key[tokens].long()
    device = first_key.device
    from_block = first_key.clamp(0, num_keys) // block
    to_block = (end_key.clamp(0, num_keys) + block - 1) // block
    row = torch.arange(num_rows, device=device).repeat_interleave(block)
    has_keys = (end_key > first_key) & (to_block > from_block)
    width = num_keys // block + 1
    marks = torch.zeros(num_rows * width, dtype=torch.int32, device=device)
    marks.index_add_(0, row * width + from_block, has_keys.int())
    marks.index_add_(0, row * width + to_block, -has_keys.int())
    is_listed = marks.view(num_rows, width).cumsum(1)[:, :-1] > 0

    start = torch.arange(0, num_keys, block, device=device)
    first_query = torch.arange(tokens.start, tokens.stop, block, device=device)[:, None]
    end_query = ranges.end_query.view(-1, block)
    is_listed &= end_query.amax(1) > first_query
    sees_all = first_key.view(-1, block).amax(1)[:, None] <= start
    sees_all &= end_key.view(-1, block).amin(1)[:, None] >= start + block
    sees_all &= end_query.amin(1) >= first_query + block
    return is_listed, ~sees_all


def _offsets(number: Tensor, num_heads: int, num_rows: int) -> Tensor:
    """Return where the blocks of each row begin and end, int32 `(heads, rows + 1)`."""
    counts = torch.bincount(number, minlength=num_heads * num_rows)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    if num_rows == 0:
        return ends.expand(num_heads, 1).contiguous()
    return ends.unfold(0, num_rows + 1, num_rows).contiguous()
