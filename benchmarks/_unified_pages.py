"""Random rows beyond the reach of the translation cache, in small pages and in huge ones.

Arms "by page, sort included" in the results are of a loop that was measured and not kept: it sorted
each batch by huge page first (commit 0c32ec1).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from _rows import BenchmarkRow
from _unified_arms import Arm, fill, indices, measure, rows_of
from penstock.memory.pages import MADV_NOHUGEPAGE, map_anonymous
from penstock.units import format_bytes

NUM_INDICES = (65536, 262144, 1 << 20)
ROW_BYTES = 256
REPETITIONS = 7


def page_rows(table_bytes: int, where: Any) -> list[BenchmarkRow]:
    """Rows of a table in pages of 4 KiB, then of one in huge pages; one is in memory at a time."""
    from penstock.unified import empty

    shape = table_bytes // ROW_BYTES, ROW_BYTES // 4
    mapping = map_anonymous(table_bytes, private=True)
    mapping.madvise(MADV_NOHUGEPAGE)
    small = torch.frombuffer(mapping, dtype=torch.float32).view(shape)
    rows = _measure_pages(small, "4 KiB pages", where)
    del small, mapping
    return rows + _measure_pages(empty(shape, device="cpu").cpu(), "2 MiB pages", where)


def _measure_pages(table: torch.Tensor, pages: str, where: Any) -> list[BenchmarkRow]:
    from penstock.unified.host.table import read_rows

    fill(table)
    generator = np.random.default_rng(0)
    arms: dict[str, Arm] = {
        "index_select": lambda index, out: torch.index_select(table, 0, index, out=out),
        "as given": functools.partial(read_rows, table),
    }
    rows = []
    for count in NUM_INDICES:
        out = torch.zeros(count, table.shape[1])
        draw = functools.partial(indices, "uniform", count, len(table), generator)
        seconds = measure(arms, draw, out, REPETITIONS)
        num_bytes = out.numel() * out.element_size()
        size = format_bytes(table.numel() * table.element_size())
        case = f"{size} table, {pages}, {ROW_BYTES} B rows, {count} uniform"
        rows += rows_of(case, seconds, "as given", num_bytes, where)
    return rows
