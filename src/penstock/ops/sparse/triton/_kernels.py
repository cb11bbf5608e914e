"""Triton kernel of sampled products; importing this imports Triton.

The values of a product and both gradients are one computation: for each entry (r, c) of a pattern

    values       c_ij  = sum over k in row i of A   of a_ik B[k, j]
    left         dA_ik = sum over j in row k of B   of b_kj dC[i, j]
    right        dB_kj = sum over i in row k of A'  of a_ik dC[i, j]

a list of numbers, of row r or c, each times an entry of a table, which is found in its sorted row
by halving. An entry has one writer and a fixed order, so bits are the same in every run.

Tuples are those of `_launch.py`.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_entry(table, row, column, is_there, STEPS: tl.constexpr):
    """Return places in the table, and whether the column is there."""
    base = tl.load(table.offsets + row, mask=is_there, other=0)
    length = tl.load(table.offsets + row + 1, mask=is_there, other=0) - base
    for _ in range(STEPS):
        half = length // 2
        probe = tl.load(table.columns + base + half, mask=is_there & (length > 1), other=0)
        base += tl.where((length > 1) & (probe <= column), half, 0)
        length = tl.where(length > 1, length - half, length)
    is_there &= length > 0
    found = tl.load(table.columns + base, mask=is_there, other=0)
    return base, is_there & (found == column)


@triton.jit(do_not_specialize=["num_entries"])
def sample_products(entries, lists, table, out, num_entries, sizes):
    """Compute the sums of some entries of a pattern."""
    entry = tl.program_id(0).to(tl.int64) * sizes.block + tl.arange(0, sizes.block)
    is_entry = entry < num_entries
    row = tl.load(entries.rows + entry, mask=is_entry, other=0)
    column = tl.load(entries.columns + entry, mask=is_entry, other=0)
    own = column if sizes.is_by_column else row
    begin = tl.load(lists.offsets + own, mask=is_entry, other=0)
    end = tl.load(lists.offsets + own + 1, mask=is_entry, other=0)
    sums = tl.zeros([sizes.block], tl.float32)
    for step in range(tl.max(end - begin, 0)):
        place = begin + step
        is_there = is_entry & (place < end)
        key = tl.load(lists.columns + place, mask=is_there, other=0)
        if sizes.has_order:
            place = tl.load(lists.order + place, mask=is_there, other=0)
        value = tl.load(lists.numbers + place, mask=is_there, other=0.0)
        if sizes.is_by_column:
            at, is_found = find_entry(table, row, key, is_there, sizes.steps)
        else:
            at, is_found = find_entry(table, key, column, is_there, sizes.steps)
        other = tl.load(table.numbers + at, mask=is_found, other=0.0)
        sums += tl.where(is_found, value * other, 0.0)
    tl.store(out + entry, sums, mask=is_entry)
