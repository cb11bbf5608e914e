"""Triton kernels that move rows between host memory and a GPU; importing this imports Triton.

The GPU reads host memory over its link in requests of at most one line of 128 bytes, and a warp's
access becomes as few requests as lines that it touches. So rows are read in the widest words that
their addresses allow, and the lanes of a warp are laid on the grid of lines of the host's
addresses: the lanes before and after a row that begins within a line are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_at(index, places, inside, num_rows, HAS_INDEX: tl.constexpr, NEGATIVE: tl.constexpr):
    """Return the rows at some places of a batch: int64, below zero where there is none."""
    if HAS_INDEX:
        rows = tl.load(index + places, mask=inside, other=-1).to(tl.int64)
        if NEGATIVE:
            rows = tl.where((rows < 0) & inside, rows + num_rows, rows)
        return rows
    else:
        return tl.where(inside, places.to(tl.int64), -1)


@triton.jit
def _report_wrong(first_wrong, places, wrong):
    """Lower `first_wrong` to the first of the places that is wrong."""
    first = tl.min(tl.where(wrong, places, 0x7FFFFFFFFFFFFFFF), axis=0)
    if first != 0x7FFFFFFFFFFFFFFF:
        tl.atomic_min(first_wrong, first)


# How many rows there are must not compile a kernel anew.
@triton.jit(do_not_specialize=["num_places", "num_source_rows"])
def copy_rows(
    source,
    source_index,
    target,
    target_index,
    first_wrong,
    num_places,
    num_source_rows,
    HAS_SOURCE_INDEX: tl.constexpr,
    HAS_TARGET_INDEX: tl.constexpr,
    NEGATIVE: tl.constexpr,
    CHECK: tl.constexpr,
    HOST_IS_SOURCE: tl.constexpr,
    UNIT: tl.constexpr,
    ROW: tl.constexpr,
    VECTOR: tl.constexpr,
    LINE: tl.constexpr,
    BASE: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy rows word by word: `target[target_index[i]] = source[source_index[i]]`.

    Rows have ROW words, a multiple of VECTOR; a line has LINE, and the host's memory begins BASE
    words into one. A tile has ROWS rows of COLUMNS words; SPAN words hold a row wherever it begins
    in a line.

    With UNIT, rows of the host are read whose bytes are no multiple of four. A warp that read
    single bytes would ask for 32 of them at a time. So words of four bytes are read, which also
    hold a little of the rows beside it, and stored in units of UNIT bytes (1 or 2). LINE, BASE, ROW
    are bytes then.

    Places whose target is below zero are passed over. With CHECK a source row that is not there
    becomes zeroes, and its place in the target is reported; without, rows below zero are passed
    over, and larger ones must not occur.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    block = tl.program_id(0)
    while block < tl.cdiv(num_places, ROWS):
        # 64 bits before the product: a table may have more than 2**31 rows, words or bytes.
        places = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = places < num_places
        read = _rows_at(source_index, places, inside, num_source_rows, HAS_SOURCE_INDEX, NEGATIVE)
        written = _rows_at(target_index, places, inside, 0, HAS_TARGET_INDEX, False)
        there = (read >= 0) & (written >= 0) & inside
        stored = there
        if CHECK:
            stored = (written >= 0) & inside
            there = there & (read < num_source_rows)
            _report_wrong(first_wrong, written, stored & ~there)
        read = tl.where(there, read, 0)[:, None]
        written = tl.where(stored, written, 0)[:, None]
        # How far into a line the host's row begins; LINE is VECTOR where that does not matter.
        if UNIT:
            lead = (read * ROW + BASE) % LINE
            # BASE is a multiple of four, so this division leaves nothing.
            first_word = (read * ROW - lead) // 4
        else:
            # A multiple of VECTOR, which the compiler has to see to load VECTOR words at once.
            host_vectors = (read if HOST_IS_SOURCE else written) * (ROW // VECTOR) + BASE // VECTOR
            lead = (host_vectors % (LINE // VECTOR)) * VECTOR
        for first in tl.static_range(0, SPAN, COLUMNS):
            if UNIT:
                byte = (first + columns) * 4 - lead
                within = (byte > -4) & (byte < ROW)
                word_at = source + (first_word + first + columns)
                words = tl.load(word_at, mask=within & there[:, None], other=0)
                for shift in tl.static_range(0, 4, UNIT):
                    part = (words >> (8 * shift)).to(target.dtype.element_ty)
                    mask = stored[:, None] & (byte + shift >= 0) & (byte + shift < ROW)
                    # Where `byte + shift` is below zero the quotient is not used.
                    unit_at = target + (written * (ROW // UNIT) + (byte + shift) // UNIT)
                    tl.store(unit_at, part, mask=mask)
            else:
                column = first + columns - lead
                within = (column >= 0) & (column < ROW)
                word_at = source + (read * ROW + column)
                words = tl.load(word_at, mask=within & there[:, None], other=0)
                tl.store(target + (written * ROW + column), words, mask=within & stored[:, None])
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_places"])
def add_runs(
    table,
    rows,
    order,
    source,
    num_places,
    SUM: tl.constexpr,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add rows element by element: `table[rows[i]] += source[order[i]]` for sorted `rows`.

    One program has all of a row's addends, in the order in which they were given, so the sum is
    the same from run to run. It is kept in SUM and rounded once.
    """
    columns = tl.arange(0, COLUMNS)
    start = tl.program_id(0)
    while start < num_places:
        row = tl.load(rows + start)
        before = tl.load(rows + start - 1, mask=start > 0, other=-1)
        if row != before:
            row_start = table + row.to(tl.int64) * ROW
            for first in range(0, ROW, COLUMNS):
                column = first + columns
                within = column < ROW
                total = tl.load(row_start + column, mask=within, other=0).to(SUM)
                place = start
                current = row
                while current == row:
                    addend = source + tl.load(order + place).to(tl.int64) * ROW
                    total += tl.load(addend + column, mask=within, other=0).to(SUM)
                    place += 1
                    current = tl.load(rows + place, mask=place < num_places, other=-1)
                tl.store(row_start + column, total.to(table.dtype.element_ty), mask=within)
        start += tl.num_programs(0)
