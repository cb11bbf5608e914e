"""Triton kernels that are the same for all programs; importing this imports Triton.

A row here is one row of a matrix product: an operand with batch axes beside its heads has several
for each of its rows (`BATCH`). Every sum has one writer and a fixed order, so results are the same
bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent, accurate near zero too, where `1 - exp(-2x)` cancels."""
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    # Lambert's continued fraction, to double precision for |x| < 1/2.
    square = x * x
    near = x / (1 + square / (3 + square / (5 + square / (7 + square / (9 + square / 11)))))
    return tl.where(square < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x)) without an overflow for large negative numbers."""
    power = tl.exp(-tl.abs(x))
    return tl.where(x < 0, power, 1.0) / (1 + power)


@triton.jit
def segment_gemm(
    operand,
    operand_index,
    weight,
    out,
    out_index,
    tile_types,
    tile_begins,
    tile_ends,
    HAS_OPERAND_INDEX: tl.constexpr,
    HAS_OUT_INDEX: tl.constexpr,
    OPERAND_ROW: tl.constexpr,
    OPERAND_HEAD: tl.constexpr,
    BATCH: tl.constexpr,
    HEADS: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Compute `out[out_index[i]] = operand[operand_index[i]] @ weight[type of i]` for each head.

    A program has the rows of one tile, which are all of one type, and BLOCK_WIDTH columns of one
    head. The operand's heads are OPERAND_HEAD numbers apart: 0 where one is read by all heads.
    """
    # Programs of one tile run together, so that its rows are read from memory once.
    num_blocks: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    tile, head = tl.program_id(0) // num_blocks, tl.program_id(1)
    rows = tl.load(tile_begins + tile).to(tl.int64) + tl.arange(0, BLOCK_ROWS)
    is_row = rows < tl.load(tile_ends + tile)
    at, batch = rows // BATCH, rows % BATCH
    read = tl.load(operand_index + at, mask=is_row, other=0) if HAS_OPERAND_INDEX else at
    written = tl.load(out_index + at, mask=is_row, other=0) if HAS_OUT_INDEX else at
    columns = tl.program_id(0) % num_blocks * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_column = (columns < WIDTH)[None, :]
    inner = tl.arange(0, BLOCK_INNER)
    matrix = tl.load(tile_types + tile).to(tl.int64) * HEADS + head
    operand_at = read.to(tl.int64) * OPERAND_ROW + head * OPERAND_HEAD + batch * INNER
    operand_rows = operand + operand_at[:, None]
    weight_at = weight + matrix * (INNER * WIDTH)
    total = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], SUM)
    for first in range(0, INNER, BLOCK_INNER):
        k = first + inner
        is_inner = k < INNER
        left = tl.load(operand_rows + k[None, :], mask=is_row[:, None] & is_inner[None, :], other=0)
        if TRANSPOSED:
            right_at = weight_at + columns[None, :] * INNER + k[:, None]
        else:
            right_at = weight_at + k[:, None] * WIDTH + columns[None, :]
        right = tl.load(right_at, mask=is_inner[:, None] & is_column, other=0)
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=SUM)
    out_at = ((written.to(tl.int64) * HEADS + head) * BATCH + batch) * WIDTH
    out_rows = out + out_at[:, None]
    tl.store(out_rows + columns[None, :], total, mask=is_row[:, None] & is_column)


@triton.jit
def weight_gradient(
    left,
    left_index,
    right,
    right_index,
    partial,
    piece_begins,
    piece_ends,
    HAS_LEFT_INDEX: tl.constexpr,
    HAS_RIGHT_INDEX: tl.constexpr,
    LEFT_ROW: tl.constexpr,
    LEFT_HEAD: tl.constexpr,
    LEFT_BATCH: tl.constexpr,
    RIGHT_ROW: tl.constexpr,
    RIGHT_HEAD: tl.constexpr,
    RIGHT_BATCH: tl.constexpr,
    BATCH: tl.constexpr,
    HEADS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEIGHT: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Compute `partial[piece] = sum of outer(left[left_index[i]], right[right_index[i]])`.

    Pieces are of one type each and of a fixed length; `add_pieces` adds those of a type.
    """
    across: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    down: tl.constexpr = (HEIGHT + BLOCK_HEIGHT - 1) // BLOCK_HEIGHT
    piece, head = tl.program_id(0) // (across * down), tl.program_id(1)
    block = tl.program_id(0) % (across * down)
    i = block // across * BLOCK_HEIGHT + tl.arange(0, BLOCK_HEIGHT)
    j = block % across * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    is_i, is_j = (i < HEIGHT)[None, :], (j < WIDTH)[None, :]
    begin, end = tl.load(piece_begins + piece), tl.load(piece_ends + piece)
    total = tl.zeros([BLOCK_HEIGHT, BLOCK_WIDTH], SUM)
    for first in tl.range(begin, end, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        is_row = rows < end
        at, batch = rows // BATCH, rows % BATCH
        of_left = tl.load(left_index + at, mask=is_row, other=0) if HAS_LEFT_INDEX else at
        of_right = tl.load(right_index + at, mask=is_row, other=0) if HAS_RIGHT_INDEX else at
        left_at = of_left.to(tl.int64) * LEFT_ROW + head * LEFT_HEAD + batch * LEFT_BATCH
        right_at = of_right.to(tl.int64) * RIGHT_ROW + head * RIGHT_HEAD + batch * RIGHT_BATCH
        a = tl.load(left + left_at[:, None] + i[None, :], mask=is_row[:, None] & is_i, other=0)
        b = tl.load(right + right_at[:, None] + j[None, :], mask=is_row[:, None] & is_j, other=0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION, out_dtype=SUM)
    matrix = partial + (piece.to(tl.int64) * HEADS + head) * (HEIGHT * WIDTH)
    tl.store(matrix + i[:, None] * WIDTH + j[None, :], total, mask=(i < HEIGHT)[:, None] & is_j)


@triton.jit
def merge_softmax_pieces(
    partial_max,
    partial_sum,
    total_max,
    total_sum,
    first_pieces,
    LENGTH: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """Merge softmaxes of pieces: m = max of m_p, and s = sum of s_p * exp(m_p - m).

    Each piece has its own largest score, less which its powers were taken.
    """
    group = tl.program_id(0)
    begin, end = tl.load(first_pieces + group), tl.load(first_pieces + group + 1)
    place = tl.program_id(1) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_place = place < LENGTH
    # All lanes begin with a score that occurs, so that none grows from nothing.
    first_score = tl.load(partial_max + begin.to(tl.int64) * LENGTH + place, mask=is_place, other=0)
    largest = first_score[None, :] + tl.zeros([BLOCK_PIECES, 1], first_score.dtype)
    total = tl.zeros([BLOCK_PIECES, BLOCK_LENGTH], first_score.dtype)
    for first in tl.range(begin, end, BLOCK_PIECES):
        pieces = first + tl.arange(0, BLOCK_PIECES)
        mask = (pieces < end)[:, None] & is_place[None, :]
        at = pieces.to(tl.int64)[:, None] * LENGTH + place[None, :]
        score = tl.load(partial_max + at, mask=mask, other=0)
        power = tl.load(partial_sum + at, mask=mask, other=0)
        larger = tl.where(mask, tl.maximum(largest, score), largest)
        total = total * tl.exp(largest - larger)
        total += tl.where(mask, power * tl.exp(score - larger), 0.0)
        largest = larger
    largest_of_all = tl.max(largest, axis=0)
    powers = tl.sum(total * tl.exp(largest - largest_of_all[None, :]), axis=0)
    row = group.to(tl.int64) * LENGTH
    tl.store(total_max + row + place, largest_of_all, mask=is_place)
    tl.store(total_sum + row + place, powers, mask=is_place)


@triton.jit
def add_pieces(
    partial,
    out,
    targets,
    first_pieces,
    HAS_TARGETS: tl.constexpr,
    LENGTH: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """Compute `out[targets[i]] = sum of partial[first_pieces[i] : first_pieces[i + 1]]`."""
    at = tl.program_id(0)
    target = (tl.load(targets + at) if HAS_TARGETS else at).to(tl.int64)
    begin, end = tl.load(first_pieces + at), tl.load(first_pieces + at + 1)
    place = tl.program_id(1) * BLOCK_LENGTH + tl.arange(0, BLOCK_LENGTH)
    is_place = place < LENGTH
    total = tl.zeros([BLOCK_PIECES, BLOCK_LENGTH], SUM)
    for first in tl.range(begin, end, BLOCK_PIECES):
        pieces = first + tl.arange(0, BLOCK_PIECES)
        mask = (pieces < end)[:, None] & is_place[None, :]
        rows = partial + pieces.to(tl.int64)[:, None] * LENGTH
        total += tl.load(rows + place[None, :], mask=mask, other=0)
    tl.store(out + target * LENGTH + place, tl.sum(total, axis=0), mask=is_place)
