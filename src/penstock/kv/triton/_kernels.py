"""Triton kernels of attention over records by address; importing this imports Triton.

A record has keys and then values of one KV head. Its tokens are cut into tiles, and all tiles of a
head into tasks. For each row q of the queries that share the head (query heads of the group times
tokens, tokens innermost) and the tokens t of a task that are valid and visible:

    s_t = softcap(scale q . k_t) + bias_t     m = max s_t     l = sum exp(s_t - m)
    out = sum exp(s_t - m) v_t / l            lse = m + log l

    attend_tasks    out and lse of a task; each record is read once for all rows of a program
    merge_tasks     lse = log sum exp(lse_i),  out = sum exp(lse_i - lse) out_i  over tasks i
    copy_records    copies of records between addresses, a program for each

Maximum and sums run along (Milakov, Gimelshein, arXiv:1805.02867). Each sum has one writer and a
fixed order, without atomics, so results are the same bits in every run.

Records are read where they lie: an address may be of device memory, or of host memory that is
registered.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh: near 0 as x + x^3 P(x^2), so that it keeps its relative precision."""
    size = tl.abs(x)
    square = x * x
    p = square * 0.00229582 - 0.00834696
    p = p * square + 0.02176995
    p = p * square - 0.0539594
    p = p * square + 0.13333304
    p = p * square - 0.33333333
    near = size + size * (square * p)
    e = tl.exp(-2.0 * size)
    value = tl.where(size < 0.625, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -value, value)


@triton.jit
def point_to(address, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Make an address a pointer; ALIGNED says that it is a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# Numbers that grow with the context must not compile a kernel anew.
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_records",
        *("visible_batch", "visible_head", "visible_token"),
        *("bias_batch", "bias_head", "bias_token"),
    ]
)
def attend_tasks(
    query,
    addresses,
    counts,
    visible,
    bias,
    out,
    lse,
    tile_lse,
    scale,
    softcap,
    num_heads,
    num_rows,
    num_tokens,
    num_records,
    visible_batch,
    visible_head,
    visible_token,
    bias_batch,
    bias_head,
    bias_token,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_VISIBLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TILE_LSE: tl.constexpr,
    RECORD_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TASK_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Compute a task of one KV head for a block of its rows.

    Query and records have elements of ELEMENT. `out` is `(tasks, B * H * rows,
    VALUE_DIM)`, `lse` the same without the last dimension, `tile_lse` `(B * H * rows, tiles)`.
    Strides are of elements, that of a token is 1; `bias_head` is that of a query head.
    """
    TILES: tl.constexpr = (RECORD_TOKENS + BLOCK_TOKENS - 1) // BLOCK_TOKENS  # of a record
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    head = (tl.program_id(0) // num_blocks).to(tl.int64)  # number among all of the batch
    task = tl.program_id(1)
    row = (tl.program_id(0) % num_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    place = head * num_rows + row  # of a row among all
    lane = tl.arange(0, BLOCK_TOKENS)
    of_key, of_value = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)

    is_query = is_row[:, None] & (of_key < KEY_DIM)[None, :]
    rows = query + place[:, None] * KEY_DIM + of_key[None, :]
    q = tl.load(rows, mask=is_query, other=0)
    token, group = row % num_tokens, row // num_tokens
    batch, kv_head = head // num_heads, head % num_heads
    if HAS_VISIBLE:
        seen_rows = visible + batch * visible_batch + kv_head * visible_head
        seen_rows = seen_rows + token.to(tl.int64)[:, None] * visible_token
    if HAS_BIAS:
        query_head = kv_head * (num_rows // num_tokens) + group
        bias_rows = bias + batch * bias_batch + query_head[:, None] * bias_head
        bias_rows = bias_rows + token.to(tl.int64)[:, None] * bias_token

    largest = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    num_tiles = num_records * TILES
    for step in range(TASK_TILES):
        tile = task * TASK_TILES + step
        record = tile // TILES
        first = (tile % TILES) * BLOCK_TOKENS  # token of the record
        at = head * num_records + record
        count = tl.load(counts + at, mask=tile < num_tiles, other=0)
        count = tl.minimum(count, RECORD_TOKENS) - first
        keys = point_to(tl.load(addresses + at, mask=tile < num_tiles, other=0), ELEMENT, ALIGNED)
        is_valid = lane < count
        offset = (first + lane).to(tl.int64)[:, None]
        is_key = is_valid[:, None] & (of_key < KEY_DIM)[None, :]
        k = tl.load(keys + offset * KEY_DIM + of_key[None, :], mask=is_key, other=0)
        values = keys + RECORD_TOKENS * KEY_DIM
        is_value = is_valid[:, None] & (of_value < VALUE_DIM)[None, :]
        v = tl.load(values + offset * VALUE_DIM + of_value[None, :], mask=is_value, other=0)

        s = scale * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_SOFTCAP:
            s = softcap * tanh(s / softcap)
        is_seen = is_row[:, None] & is_valid[None, :]
        column = (record.to(tl.int64) * RECORD_TOKENS + first + lane)[None, :]
        if HAS_BIAS:
            s += tl.load(bias_rows + column, mask=is_seen, other=0).to(tl.float32)
        if HAS_VISIBLE:
            is_seen = is_seen & (tl.load(seen_rows + column, mask=is_seen, other=0) != 0)
        s = tl.where(is_seen, s, -float("inf"))

        now = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # exp(-inf - -inf) would be NaN
        weights = tl.exp(s - base[:, None])
        of_tile = tl.sum(weights, 1)
        shrink = tl.exp(largest - base)
        total = total * shrink + of_tile
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(ELEMENT), v, sums, input_precision=PRECISION)
        largest = now
        if HAS_TILE_LSE:
            found = tl.where(of_tile == 0, -float("inf"), base + tl.log(of_tile))
            tl.store(tile_lse + place * num_tiles + tile, found, mask=is_row & (tile < num_tiles))

    is_none = total == 0  # not where it is NaN
    place += task.to(tl.int64) * (tl.num_programs(0) // num_blocks) * num_rows
    base = tl.where(largest == -float("inf"), 0.0, largest)
    tl.store(lse + place, tl.where(is_none, -float("inf"), base + tl.log(total)), mask=is_row)
    result = sums / tl.where(is_none, 1.0, total)[:, None]
    is_out = is_row[:, None] & (of_value < VALUE_DIM)[None, :]
    tl.store(out + place[:, None] * VALUE_DIM + of_value[None, :], result, mask=is_out)


@triton.jit(do_not_specialize=["num_tasks"])
def merge_tasks(
    parts,
    part_lse,
    out,
    lse,
    num_rows,
    num_tasks,
    VALUE_DIM: tl.constexpr,
    ALL_TASKS: tl.constexpr,
    BLOCK_TASKS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Merge the tasks' results of one row; ALL_TASKS, a power of two, are at least `num_tasks`."""
    row = tl.program_id(0).to(tl.int64)
    task = tl.arange(0, ALL_TASKS)
    each = tl.load(
        part_lse + task.to(tl.int64) * num_rows + row, mask=task < num_tasks, other=-float("inf")
    )
    largest = tl.max(each, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.sum(tl.exp(each - base), 0)
    is_none = total == 0
    whole = tl.where(is_none, -float("inf"), base + tl.log(total))
    column = tl.arange(0, BLOCK_VALUE)
    sums = tl.zeros([BLOCK_VALUE], tl.float32)
    for first in range(0, ALL_TASKS, BLOCK_TASKS):
        some = first + tl.arange(0, BLOCK_TASKS)
        place = some.to(tl.int64) * num_rows + row
        is_task = some < num_tasks
        weight = tl.exp(tl.load(part_lse + place, mask=is_task, other=-float("inf")) - base)
        is_part = is_task[:, None] & (column < VALUE_DIM)[None, :]
        at = parts + place[:, None] * VALUE_DIM + column[None, :]
        sums += tl.sum(weight[:, None] * tl.load(at, mask=is_part, other=0), 0)
    tl.store(lse + row, whole)
    result = sums / tl.where(is_none, 1.0, total)
    tl.store(out + row * VALUE_DIM + column, result, mask=column < VALUE_DIM)


@triton.jit
def copy_records(
    destinations,
    sources,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Copy NUM_WORDS words from `sources[i]` to `destinations[i]`, addresses, in program i."""
    record = tl.program_id(0)
    to = point_to(tl.load(destinations + record), WORD, ALIGNED)
    source = point_to(tl.load(sources + record), WORD, ALIGNED)
    lane = tl.arange(0, TILE_WORDS)
    for first in range(0, NUM_WORDS, TILE_WORDS):
        word = first + lane
        is_word = word < NUM_WORDS
        tl.store(to + word, tl.load(source + word, mask=is_word), mask=is_word)
