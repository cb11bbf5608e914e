"""Bytes that the kernel asks of memory, as formulas of patterns.

With I bytes of an index and 4 of a value:

    an entry            4 I [row, column, ends of its list] + 4 stored
    a number of a list  3 I [key, ends of the row of the table] + 4, and I of its order
    a search            (ceil(log2 n) + 1) I in a row of n > 0 entries, and 4 where it finds one

They are requests, before any cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.codegen import ByteCount
from penstock.ops.sparse._rows import rows_of
from penstock.ops.sparse.triton._launch import Sampling

_VALUE = 4


def count_sampling(sampling: Sampling, num_found: int) -> ByteCount:
    """Return the bytes of one launch.

    Args:
        sampling: Its operands.
        num_found: Numbers of lists that meet an entry of the table.
    """
    pattern, lists, table = sampling.pattern, sampling.lists, sampling.table
    index, num_entries = pattern.columns.element_size(), len(pattern.columns)
    rows, columns = rows_of(pattern), pattern.columns.long()
    lengths = lists.offsets.diff().long()
    of_entry = lengths[columns if sampling.is_by_column else rows]
    num_numbers = int(of_entry.sum())
    probes = _count_probes(table.offsets.diff())
    if sampling.is_by_column:
        num_probes = int((probes[rows] * of_entry).sum())
    else:
        by_list = torch.zeros(len(lengths), dtype=torch.long, device="cpu").index_add_(
            *(0, torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)),
            probes[lists.columns.long()],
        )
        num_probes = int(by_list[rows].sum())
    loaded = 4 * index * num_entries + num_numbers * ((3 + sampling.has_order) * index + _VALUE)
    return ByteCount(
        loaded_bytes=loaded + num_probes * index + num_found * _VALUE,
        stored_bytes=num_entries * _VALUE,
    )


def _count_probes(lengths: Tensor) -> Tensor:
    """Return the columns that a search in rows of so many entries loads."""
    halvings = torch.tensor(
        [max(0, int(n) - 1).bit_length() for n in lengths], dtype=torch.long, device="cpu"
    )
    return halvings + (lengths > 0)
