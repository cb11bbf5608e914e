"""Triton kernels of linear layers with many adapters; importing this imports Triton.

With m the dropout mask, c = scaling / (1 - dropout), and for each adapter its own rows of x, y:

    down_product    S  = (m * x) A^T                   reads x once
    base_product    y  = c S B^T + x W^T + b           writes y once; the first term begins the sum
                    dx = m * (dS A) + dy W             the same kernel
    up_gradient     dS = c dy B,    dB = c dy^T S      reads dy once
    down_gradient   dA = dS^T (m * x)                  makes the mask again

Products are split at S of rank r (LoRAFusion, arXiv:2510.00206, section 4). Rank-r factors are
multiplied in the adapters' dtype, x and W in that of x; sums are float32. Gradients' sums over rows
are stored by piece and added by `add_slices` and `add_pieces`: each sum has one writer and a fixed
order, without atomics, so results are the same bits in every run.

Tables of blocks and pieces have the fields of `_tables.Entry`, that of adapters those of
`_launch.AdapterRecord`, int64 each.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(word):
    """Compute the function `mix` of `_dropout.py` of unsigned words."""
    word = word ^ (word >> 16)
    word = tl.mul(word, 0x7FEB352D, sanitize_overflow=False)
    word = word ^ (word >> 15)
    word = tl.mul(word, 0x846CA68B, sanitize_overflow=False)
    return word ^ (word >> 16)


@triton.jit
def load_mask(adapter_fields):
    """Load the key and the threshold of an adapter's dropout mask."""
    key = tl.load(adapter_fields + 3).to(tl.uint32)
    return key, tl.load(adapter_fields + 4).to(tl.uint32)


@triton.jit
def keep(key, threshold, numbers, columns):
    """Compute the dropout mask of an adapter's rows, by their numbers, and of columns."""
    rows = mix(tl.add(key, numbers.to(tl.uint32), sanitize_overflow=False))
    spread = tl.mul(columns.to(tl.uint32), 0x9E3779B9, sanitize_overflow=False)
    words = mix(tl.add(rows[:, None], spread[None, :], sanitize_overflow=False))
    return words >= threshold


@triton.jit
def load_pointer(field, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load an address; ALIGNED says that it is a multiple of 16 bytes."""
    pointer = tl.load(field).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_factor(adapter_fields):
    """Load c, which lies in the table as the bits of a float32."""
    return tl.load(adapter_fields + 5).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_rank(adapter_fields, RANK_FACTOR: tl.constexpr):
    """Load an adapter's rank, a multiple of RANK_FACTOR, at which rows of S and B begin."""
    return tl.multiple_of(tl.load(adapter_fields + 2).to(tl.int32), RANK_FACTOR)


@triton.jit
def find_rows(order, positions, is_row, HAS_ORDER: tl.constexpr):
    """Return the rows of positions in the order."""
    if HAS_ORDER:
        return tl.load(order + positions, mask=is_row, other=0)
    else:
        return positions


@triton.jit
def down_product(
    x,
    x_row,
    x_column,
    order,
    blocks,
    adapters,
    s,
    inner,
    HAS_ORDER: tl.constexpr,
    RANK_FACTOR: tl.constexpr,
    DROPOUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Compute S = (m * x) A^T for a block of one adapter's rows."""
    entry = blocks + tl.program_id(0) * 6
    fields = adapters + tl.load(entry) * 8
    rank = load_rank(fields, RANK_FACTOR)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    j = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    lane = tl.arange(0, BLOCK_ROWS)
    is_row = lane < tl.load(entry + 2)
    number = tl.load(entry + 3) + lane
    rows = find_rows(order, tl.load(entry + 1) + lane, is_row, HAS_ORDER)
    x_rows = x + rows[:, None] * x_row
    down = load_pointer(fields, ELEMENT, ALIGNED) + j[None, :].to(tl.int64) * inner
    total = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    if DROPOUT:
        key, threshold = load_mask(fields)
    for first in range(0, inner, BLOCK_INNER):
        k = first + tl.arange(0, BLOCK_INNER)
        is_x = is_row[:, None] & (k < inner)[None, :]
        tile = tl.load(x_rows + k[None, :].to(tl.int64) * x_column, mask=is_x, other=0)
        if DROPOUT:
            tile = tl.where(keep(key, threshold, number, k), tile, 0.0)
        is_down = (k < inner)[:, None] & (j < rank)[None, :]
        factor = tl.load(down + k[:, None], mask=is_down, other=0)
        total = tl.dot(tile.to(ELEMENT), factor, total, input_precision=PRECISION)
    s_rows = s + tl.multiple_of(tl.load(entry + 4), RANK_FACTOR) + lane[:, None] * rank
    tl.store(s_rows + j[None, :], total, mask=is_row[:, None] & (j < rank)[None, :])


@triton.jit
def base_product(
    left,
    left_row,
    left_column,
    weight,
    weight_inner,
    weight_column,
    bias,
    addend,
    addend_row,
    addend_column,
    out,
    order,
    blocks,
    num_blocks,
    adapters,
    s,
    inner,
    width,
    tile_table,
    BACKWARD: tl.constexpr,
    HAS_TILE_TABLE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    RANK_FACTOR: tl.constexpr,
    DROPOUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute `out = s factor + left weight + bias + addend`, a tile of it in each program.

    Forward the factor is c B^T. BACKWARD it is A, and `s factor` is masked.
    """
    num_columns = tl.cdiv(width, BLOCK_COLUMNS)
    if HAS_TILE_TABLE:
        number = tl.load(tile_table + tl.program_id(0))
        block, column = number // num_columns, number % num_columns
    else:
        # GROUP blocks of rows go through the columns together, so that they share W in the cache.
        group = tl.program_id(0) // (GROUP * num_columns)
        height = tl.minimum(num_blocks - group * GROUP, GROUP)
        within = tl.program_id(0) % (GROUP * num_columns)
        block, column = group * GROUP + within % height, within // height
    entry = blocks + block * 6
    columns = column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < width
    columns = columns.to(tl.int64)
    fields = adapters + tl.load(entry) * 8
    rank = load_rank(fields, RANK_FACTOR)
    lane = tl.arange(0, BLOCK_ROWS)
    is_row = lane < tl.load(entry + 2)
    rows = find_rows(order, tl.load(entry + 1) + lane, is_row, HAS_ORDER)
    s_rows = s + tl.multiple_of(tl.load(entry + 4), RANK_FACTOR) + lane[:, None] * rank
    # B is (N, r), A (r, K): the column of the result is the row of B, or the column of A.
    factors = load_pointer(fields + (0 if BACKWARD else 1), ELEMENT, ALIGNED)
    factors += columns[None, :] * (1 if BACKWARD else rank)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, rank, BLOCK_RANK):
        j = first + tl.arange(0, BLOCK_RANK)
        is_s = is_row[:, None] & (j < rank)[None, :]
        is_factor = (j < rank)[:, None] & is_column[None, :]
        s_tile = tl.load(s_rows + j[None, :], mask=is_s, other=0)
        at = j[:, None].to(tl.int64) * (width if BACKWARD else 1)
        factor = tl.load(factors + at, mask=is_factor, other=0)
        total = tl.dot(s_tile, factor, total, input_precision=PRECISION)
    if BACKWARD:
        if DROPOUT:
            key, threshold = load_mask(fields)
            is_kept = keep(key, threshold, tl.load(entry + 3) + lane, columns)
            total = tl.where(is_kept, total, 0.0)
    else:
        total *= load_factor(fields)
    if HAS_WEIGHT:
        left_rows = left + rows[:, None] * left_row
        weights = weight + columns[None, :] * weight_column
        for first in range(0, inner, BLOCK_INNER):
            k = first + tl.arange(0, BLOCK_INNER)
            is_left = is_row[:, None] & (k < inner)[None, :]
            is_weight = (k < inner)[:, None] & is_column[None, :]
            k = k.to(tl.int64)
            tile = tl.load(left_rows + k[None, :] * left_column, mask=is_left, other=0)
            matrix = tl.load(weights + k[:, None] * weight_inner, mask=is_weight, other=0)
            total = tl.dot(tile.to(COMPUTE), matrix.to(COMPUTE), total, input_precision=PRECISION)
    is_out = is_row[:, None] & is_column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0)[None, :].to(tl.float32)
    if HAS_ADDEND:
        at = rows[:, None] * addend_row + columns[None, :] * addend_column
        total += tl.load(addend + at, mask=is_out, other=0).to(tl.float32)
    tl.store(out + rows[:, None] * width + columns[None, :], total, mask=is_out)


@triton.jit
def up_gradient(
    dy,
    dy_row,
    dy_column,
    order,
    pieces,
    adapters,
    s,
    ds_slices,
    slice_length,
    up_partial,
    width,
    HAS_ORDER: tl.constexpr,
    RANK_FACTOR: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Compute c dy^T S of a piece and columns of dy, and what these columns add to c dy B."""
    num_columns = tl.cdiv(width, BLOCK_COLUMNS)
    column = tl.program_id(0) % num_columns
    entry = pieces + tl.program_id(0) // num_columns * 6
    fields = adapters + tl.load(entry) * 8
    rank = load_rank(fields, RANK_FACTOR)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    j = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    n = (column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    is_up = (n < width)[:, None] & (j < rank)[None, :]
    up_at = (column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[:, None] * rank + j[None, :]
    up = tl.load(load_pointer(fields + 1, ELEMENT, ALIGNED) + up_at, mask=is_up, other=0)
    scaling = load_factor(fields)
    count, position = tl.load(entry + 2), tl.load(entry + 1)
    offset = tl.multiple_of(tl.load(entry + 4), RANK_FACTOR)
    count, s = count.to(tl.int32), s + offset
    ds = ds_slices + column.to(tl.int64) * slice_length + offset
    total = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    for first in range(0, count, BLOCK_ROWS):
        lane = first + tl.arange(0, BLOCK_ROWS)
        is_row = lane < count
        rows = find_rows(order, position + lane, is_row, HAS_ORDER)
        at = rows[:, None] * dy_row + n[None, :] * dy_column
        tile = tl.load(dy + at, mask=is_row[:, None] & (n < width)[None, :], other=0).to(ELEMENT)
        s_at = lane[:, None] * rank + j[None, :]
        is_s = is_row[:, None] & (j < rank)[None, :]
        s_tile = tl.load(s + s_at, mask=is_s, other=0)
        part = tl.dot(tile, up, input_precision=PRECISION)
        tl.store(ds + s_at, part * scaling, mask=is_s)
        total = tl.dot(tl.trans(tile), s_tile, total, input_precision=PRECISION)
    tl.store(up_partial + tl.load(entry + 5) * width + up_at, total * scaling, mask=is_up)


@triton.jit
def down_gradient(
    x,
    x_row,
    x_column,
    order,
    pieces,
    adapters,
    ds,
    down_partial,
    width,
    HAS_ORDER: tl.constexpr,
    RANK_FACTOR: tl.constexpr,
    DROPOUT: tl.constexpr,
    ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Compute dS^T (m * x) of a piece and columns of x."""
    num_columns = tl.cdiv(width, BLOCK_COLUMNS)
    entry = pieces + tl.program_id(0) // num_columns * 6
    fields = adapters + tl.load(entry) * 8
    rank = load_rank(fields, RANK_FACTOR)
    if tl.program_id(1) * BLOCK_RANK >= rank:
        return
    j = tl.program_id(1) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    k = tl.program_id(0) % num_columns * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    k = k.to(tl.int64)
    count, position = tl.load(entry + 2), tl.load(entry + 1)
    offset = tl.multiple_of(tl.load(entry + 4), RANK_FACTOR)
    number, count, ds = tl.load(entry + 3), count.to(tl.int32), ds + offset
    if DROPOUT:
        key, threshold = load_mask(fields)
    total = tl.zeros([BLOCK_COLUMNS, BLOCK_RANK], tl.float32)
    for first in range(0, count, BLOCK_ROWS):
        lane = first + tl.arange(0, BLOCK_ROWS)
        is_row = lane < count
        rows = find_rows(order, position + lane, is_row, HAS_ORDER)
        at = rows[:, None] * x_row + k[None, :] * x_column
        tile = tl.load(x + at, mask=is_row[:, None] & (k < width)[None, :], other=0)
        if DROPOUT:
            tile = tl.where(keep(key, threshold, number + lane, k), tile, 0.0)
        ds_at = lane[:, None] * rank + j[None, :]
        ds_tile = tl.load(ds + ds_at, mask=is_row[:, None] & (j < rank)[None, :], other=0)
        total = tl.dot(tl.trans(tile.to(ELEMENT)), ds_tile, total, input_precision=PRECISION)
    at = (tl.load(entry + 5) + j[None, :]) * width + k[:, None]
    tl.store(down_partial + at, total, mask=(k < width)[:, None] & (j < rank)[None, :])


@triton.jit
def add_slices(slices, out, slice_length, num_slices, BLOCK: tl.constexpr):
    """Compute `out = slices.sum(0)`, slice after slice."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(0, num_slices):
        place = slices + tl.full([], number, tl.int64) * slice_length
        total += tl.load(place + at, mask=at < slice_length, other=0)
    tl.store(out + at, total, mask=at < slice_length)


@triton.jit
def add_pieces(
    partial,
    pieces,
    part_pieces,
    adapter_parts,
    adapters,
    width,
    FIELD: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute an adapter's gradient: its parts in their order, each the sum of its pieces.

    FIELD says which field of the table of adapters has the address of the gradient.
    """
    fields = adapters + tl.program_id(0).to(tl.int64) * 8
    length = tl.load(fields + 2).to(tl.int32) * width
    if tl.program_id(1) * BLOCK >= length:
        return
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    first_part = tl.load(adapter_parts + tl.program_id(0))
    for part in range(first_part, tl.load(adapter_parts + tl.program_id(0) + 1)):
        of_part = tl.zeros([BLOCK], tl.float32)
        for piece in range(tl.load(part_pieces + part), tl.load(part_pieces + part + 1)):
            place = partial + tl.load(pieces + piece * 6 + 5) * width
            of_part += tl.load(place + at, mask=at < length, other=0)
        total += of_part
    gradient = load_pointer(fields + FIELD, ELEMENT, ALIGNED)
    tl.store(gradient + at, total, mask=at < length)
