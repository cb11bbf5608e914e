"""Triton kernels of block-sparse attention; importing this imports Triton.

With s_ij = scale q_i . k_j + bias_j over the keys that query i sees:

    attend_queries          lse_i = log sum_j exp(s_ij)      out_i = sum_j exp(s_ij - lse_i) v_j
    differentiate_queries   P = exp(s - lse)    delta_i = dO_i . O_i    dS = P (dO V' - delta)
                            dQ = scale dS K
    differentiate_keys      dV = P' dO    dK = scale dS' Q    dbias_j = sum_i dS_ij

A program of the first two has a tile of queries, and goes over the tiles of the key blocks that are
listed for its query block; one of the third has a tile of keys, and goes over the query blocks of
the transposed list, for each query head that shares its KV head. Maximum and sum of a query run
along (FlashAttention, arXiv:2205.14135, section 3.1). Each sum has one writer and a fixed order,
without atomics, so results are the same bits in every run.

Ranges of tokens are compared in partial blocks only, and the length of keys in those and in the
last block. Exponentials are of base 2: scores are multiplied by log2(e) before.

Operands, lists and sizes are the tuples of `_launch.py`. Lists are trusted: they are those of a
`Layout` for operands of these lengths.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_tile(num_tokens, TILE: tl.constexpr, BLOCK: tl.constexpr, num_heads):
    """Return batch, head and first token of a program, and the blocks of a head."""
    num_blocks = tl.cdiv(num_tokens, BLOCK)
    num_tiles = num_blocks * (BLOCK // TILE)
    of_all = (tl.program_id(0) // num_tiles).to(tl.int64)
    first = (tl.program_id(0) % num_tiles) * TILE
    return of_all // num_heads, of_all % num_heads, first, num_blocks


@triton.jit
def point_to_rows(of, batch, head, token, WIDTH: tl.constexpr):
    """Return pointers to the elements of tokens, `(tokens, WIDTH)`."""
    start = of.pointer + batch * of.batch + head * of.head
    return start + token.to(tl.int64)[:, None] * of.token + tl.arange(0, WIDTH)[None, :]


@triton.jit
def mask_rows(is_token, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return which elements of `(tokens, WIDTH)` are of a token and of its DIM elements."""
    mask = is_token[:, None]
    if DIM < WIDTH:
        mask = mask & (tl.arange(0, WIDTH) < DIM)[None, :]
    return mask


@triton.jit
def load_rows(of, batch, head, token, num_tokens, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load tokens as `(tokens, WIDTH)`, with zeros beyond the tokens and their elements."""
    pointers = point_to_rows(of, batch, head, token, WIDTH)
    return tl.load(pointers, mask=mask_rows(token < num_tokens, DIM, WIDTH), other=0.0)


@triton.jit
def load_keys(of, batch, head, token, num_tokens, sizes):
    """Load tokens of an operand that is as wide as keys."""
    return load_rows(of, batch, head, token, num_tokens, sizes.dim, sizes.width)


@triton.jit
def load_values(of, batch, head, token, num_tokens, sizes):
    """Load tokens of an operand that is as wide as values."""
    return load_rows(of, batch, head, token, num_tokens, sizes.value_dim, sizes.value_width)


@triton.jit
def store_rows(of, batch, head, token, num_tokens, rows, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store `(tokens, WIDTH)` in the dtype of the operand."""
    pointers = point_to_rows(of, batch, head, token, WIDTH)
    mask = mask_rows(token < num_tokens, DIM, WIDTH)
    tl.store(pointers, rows.to(of.pointer.dtype.element_ty), mask=mask)


@triton.jit
def find_steps(lists, head, first, num_blocks, TILE: tl.constexpr, sizes):
    """Return begin and end of the steps of a token: the tiles of its listed blocks."""
    STEPS: tl.constexpr = sizes.block // TILE
    at = lists.offsets + (head % sizes.layout_heads) * (num_blocks + 1) + first // sizes.block
    return tl.load(at) * STEPS, tl.load(at + 1) * STEPS


@triton.jit
def find_step(lists, step, num_tokens, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tokens of a step, and whether some may be hidden or beyond the last one."""
    STEPS: tl.constexpr = BLOCK // TILE
    entry = step // STEPS
    first = tl.load(lists.blocks + entry) * BLOCK + (step - entry * STEPS) * TILE
    is_partial = (tl.load(lists.is_partial + entry) != 0) | (first + TILE > num_tokens)
    return first + tl.arange(0, TILE), is_partial


@triton.jit
def load_bias(bias, batch, head, key, num_keys):
    """Load the bias of keys, times log2(e); beyond the last key its bias."""
    start = bias.pointer + batch * bias.batch + head * bias.head
    return tl.load(start + tl.minimum(key, num_keys - 1) * bias.token) * LOG2_E


@triton.jit
def load_key_range(ranges, query, num_keys):
    """Load the first key and the end of the keys that queries see."""
    first_key = tl.maximum(tl.load(ranges.first_key + query), 0)
    return first_key, tl.minimum(tl.maximum(tl.load(ranges.end_key + query), 0), num_keys)


@triton.jit
def hide(s, query, key, first_key, end_key, end_query):
    """Return scores with -inf where a query does not see a key.

    All others are broadcast against the scores. One number is compared for the three conditions, so
    that a score's mask is alive by itself.
    """
    excess = tl.maximum(first_key - key, key + 1 - end_key)
    excess = tl.maximum(excess, query + 1 - end_query)
    return tl.where(excess <= 0, s, -float("inf"))


@triton.jit
def score_keys(q, k, bias, batch, head, query, key, is_partial, seen, ranges, num_keys, sizes):
    """Return scores times log2(e), `(queries, keys)`, of queries that are scaled by `seen[2]`."""
    first_key, end_key, scale = seen
    s = tl.dot(q, tl.trans(k), input_precision=sizes.precision) * scale
    if sizes.has_bias:
        s += load_bias(bias, batch, head, key, num_keys)[None, :]
    if is_partial:
        end_query = tl.maximum(tl.load(ranges.end_query + key), 0)[None, :]
        s = hide(s, query[:, None], key[None, :], first_key[:, None], end_key[:, None], end_query)
    return s


@triton.jit
def hide_queries(s, query, key, end_query, ranges, num_keys):
    """Return scores `(keys, queries)` with -inf where a query does not see a key."""
    first_key, end_key = load_key_range(ranges, query, num_keys)
    first_key, end_key = first_key[None, :], end_key[None, :]
    return hide(s, query[None, :], key[:, None], first_key, end_key, end_query[:, None])


@triton.jit
def divide(sums, total, largest):
    """Return the output, and its log-sum-exp, of sums of weights that are relative to a maximum."""
    is_none = total == 0  # not where it is NaN
    lse = tl.where(is_none, -float("inf"), (largest + tl.log2(total)) / LOG2_E)
    return sums / tl.where(is_none, 1.0, total)[:, None], lse


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def attend_queries(q, k, v, bias, out, lse, lists, ranges, num_queries, num_keys, scale, sizes):
    """Compute output and log-sum-exp of a tile of queries."""
    batch, head, first, num_blocks = find_tile(num_queries, sizes.queries, sizes.block, sizes.heads)
    query = first + tl.arange(0, sizes.queries)
    kv_head = head // sizes.group
    rows = load_keys(q, batch, head, query, num_queries, sizes)
    first_key, end_key = load_key_range(ranges, query, num_keys)
    largest = tl.full([sizes.queries], -float("inf"), tl.float32)
    total = tl.zeros([sizes.queries], tl.float32)
    sums = tl.zeros([sizes.queries, sizes.value_width], tl.float32)
    begin, end = find_steps(lists, head, first, num_blocks, sizes.keys, sizes)
    for step in range(begin, end):
        key, is_partial = find_step(lists, step, num_keys, sizes.keys, sizes.block)
        keys = load_keys(k, batch, kv_head, key, num_keys, sizes)
        values = load_values(v, batch, kv_head, key, num_keys, sizes)
        seen = (first_key, end_key, scale * LOG2_E)
        s = score_keys(
            rows, keys, bias, batch, head, query, key, is_partial, seen, ranges, num_keys, sizes
        )
        now = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # exp(-inf - -inf) would be NaN
        weights, shrink = tl.exp2(s - base[:, None]), tl.exp2(largest - base)
        total, largest = total * shrink + tl.sum(weights, 1), now
        weights, sums = weights.to(values.dtype), sums * shrink[:, None]
        sums = tl.dot(weights, values, sums, input_precision=sizes.precision)
    sums, found = divide(sums, total, largest)
    place = (batch * sizes.heads + head) * num_queries + query
    tl.store(lse + place, found, mask=query < num_queries)
    store_rows(out, batch, head, query, num_queries, sums, sizes.value_dim, sizes.value_width)


@triton.jit
def find_terms(douts, outs, lse, terms, at_head, query, num_queries, num_blocks, sizes):
    """Return what is subtracted from scores and from dP, of queries, and store both."""
    delta = tl.sum(douts.to(tl.float32) * outs.to(tl.float32), 1)
    at = lse + at_head * num_queries + query
    shift = tl.load(at, mask=query < num_queries, other=-float("inf"))
    # exp(s - infinity) is 0, the weight of all keys of a query that sees nothing.
    shift = tl.where(shift == -float("inf"), float("inf"), shift * LOG2_E)
    place = at_head * num_blocks * sizes.block + query
    tl.store(terms.shift + place, shift)
    tl.store(terms.delta + place, delta)
    return shift, delta


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def differentiate_queries(
    q, k, v, bias, dout, out, lse, terms, dq, lists, ranges, num_queries, num_keys, scale, sizes
):
    """Compute delta and the gradient of a tile of queries."""
    batch, head, first, num_blocks = find_tile(num_queries, sizes.queries, sizes.block, sizes.heads)
    query = first + tl.arange(0, sizes.queries)
    kv_head, at_head = head // sizes.group, batch * sizes.heads + head
    rows = load_keys(q, batch, head, query, num_queries, sizes)
    douts = load_values(dout, batch, head, query, num_queries, sizes)
    outs = load_values(out, batch, head, query, num_queries, sizes)
    shift, delta = find_terms(
        douts, outs, lse, terms, at_head, query, num_queries, num_blocks, sizes
    )
    first_key, end_key = load_key_range(ranges, query, num_keys)
    sums = tl.zeros([sizes.queries, sizes.width], tl.float32)
    begin, end = find_steps(lists, head, first, num_blocks, sizes.keys, sizes)
    for step in range(begin, end):
        key, is_partial = find_step(lists, step, num_keys, sizes.keys, sizes.block)
        keys = load_keys(k, batch, kv_head, key, num_keys, sizes)
        values = load_values(v, batch, kv_head, key, num_keys, sizes)
        seen = (first_key, end_key, scale * LOG2_E)
        s = score_keys(
            rows, keys, bias, batch, head, query, key, is_partial, seen, ranges, num_keys, sizes
        )
        weights = tl.exp2(s - shift[:, None])
        changes = tl.dot(douts, tl.trans(values), input_precision=sizes.precision)
        changes = (weights * (changes - delta[:, None])).to(keys.dtype)
        sums = tl.dot(changes, keys, sums, input_precision=sizes.precision)
    store_rows(dq, batch, head, query, num_queries, sums * scale, sizes.dim, sizes.width)


@triton.jit
def add_queries(of_keys, of_queries, sums, hidden, terms, scale, sizes):
    """Return the sums of dK, dV and the gradient of the bias with those of a tile of queries.

    `hidden` is the tokens of both tiles, whether they are compared, and the ranges.
    """
    keys, values, added = of_keys
    rows, douts, place = of_queries
    key_sums, value_sums, bias_sums = sums
    query, key, is_partial, end_query, ranges, num_keys = hidden
    s = tl.dot(keys, tl.trans(rows), input_precision=sizes.precision) * (scale * LOG2_E)
    if sizes.has_bias:
        s += added[:, None]
    if is_partial:
        s = hide_queries(s, query, key, end_query, ranges, num_keys)
    weights = tl.exp2(s - tl.load(terms.shift + place)[None, :])
    value_sums = tl.dot(weights.to(douts.dtype), douts, value_sums, input_precision=sizes.precision)
    changes = tl.dot(values, tl.trans(douts), input_precision=sizes.precision)
    changes = weights * (changes - tl.load(terms.delta + place)[None, :])
    key_sums = tl.dot(changes.to(rows.dtype), rows, key_sums, input_precision=sizes.precision)
    return key_sums, value_sums, bias_sums + tl.sum(changes, 1)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def differentiate_keys(
    q, k, v, bias, dout, terms, dk, dv, dbias, lists, ranges, num_queries, num_keys, scale, sizes
):
    """Compute dK, dV and the gradient of the bias of a tile of keys."""
    batch, kv_head, first, num_blocks = find_tile(
        num_keys, sizes.keys, sizes.block, sizes.heads // sizes.group
    )
    key = first + tl.arange(0, sizes.keys)
    keys = load_keys(k, batch, kv_head, key, num_keys, sizes)
    values = load_values(v, batch, kv_head, key, num_keys, sizes)
    end_query = tl.maximum(tl.load(ranges.end_query + key), 0)
    key_sums = tl.zeros([sizes.keys, sizes.width], tl.float32)
    value_sums = tl.zeros([sizes.keys, sizes.value_width], tl.float32)
    for member in range(sizes.group):
        head = kv_head * sizes.group + member
        at_head = batch * sizes.heads + head
        place = at_head * tl.cdiv(num_queries, sizes.block) * sizes.block
        added = load_bias(bias, batch, head, key, num_keys) if sizes.has_bias else key
        bias_sums = tl.zeros([sizes.keys], tl.float32)
        begin, end = find_steps(lists, head, first, num_blocks, sizes.queries, sizes)
        for step in range(begin, end):
            query, is_partial = find_step(lists, step, num_queries, sizes.queries, sizes.block)
            rows = load_keys(q, batch, head, query, num_queries, sizes)
            douts = load_values(dout, batch, head, query, num_queries, sizes)
            of_keys, of_queries = (keys, values, added), (rows, douts, place + query)
            hidden = (query, key, is_partial, end_query, ranges, num_keys)
            sums = (key_sums, value_sums, bias_sums)
            sums = add_queries(of_keys, of_queries, sums, hidden, terms, scale, sizes)
            key_sums, value_sums, bias_sums = sums
        if sizes.has_bias:
            tl.store(dbias + at_head * num_keys + key, bias_sums, mask=key < num_keys)
    store_rows(dk, batch, kv_head, key, num_keys, key_sums * scale, sizes.dim, sizes.width)
    store_rows(dv, batch, kv_head, key, num_keys, value_sums, sizes.value_dim, sizes.value_width)
