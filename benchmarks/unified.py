"""Gathering rows of tables: from host memory and from a file, against what PyTorch and NumPy offer.

    python benchmarks/unified.py                     # the grid, from memory
    python benchmarks/unified.py --part file         # random rows of a file with a cold cache
    python benchmarks/unified.py --part pages        # random rows in small and huge pages
    python benchmarks/unified.py --part epoch        # training GraphSAGE, end to end
    python benchmarks/unified.py --device cuda       # the grid and the epoch, to a GPU

All arms of a case gather into the same buffer, one after the other, in an order that alternates.
Every time the rows are new ones, drawn alike, so that no arm finds in the caches what another has
left there. Before each measured call stands one that is not measured, of the same arm: otherwise
an arm pays for the lines of the result that the one before it has left unwritten in the caches.
Ratios are taken within a repetition.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from _rows import BenchmarkRow, announce, argument_parser, environment, write_rows
from _unified_arms import Arm, fill, indices, measure, repetitions_of, rows_of
from _unified_epoch import epoch_rows
from _unified_file import file_rows
from _unified_gpu import FOOTPRINT_BYTES, FOOTPRINT_ROW_BYTES, GPU_ROW_BYTES, gpu_rows
from _unified_pages import page_rows
from penstock.units import format_bytes, parse_bytes

ROW_BYTES = (64, 128, 256, 400, 512, 1024, 2052, 4096, 16384)
NUM_INDICES = (64, 512, 4096, 65536, 1 << 20)
MAX_RESULT_BYTES = 2 << 30


def memory_rows(row_bytes: int, table_bytes: int, where: Any) -> list[BenchmarkRow]:
    """The grid for one width of rows."""
    from penstock.unified import empty

    num_rows, width = table_bytes // row_bytes, row_bytes // 4
    table = torch.empty(num_rows, width)
    fill(table)
    unified = empty(table.shape, device="cpu")
    unified.cpu().copy_(table)
    arms: dict[str, Arm] = {
        "index_select": lambda index, out: torch.index_select(table, 0, index, out=out),
        "gather_rows": lambda index, out: unified.gather_rows(index, out=out),
        "F.embedding, fresh result": lambda index, out: functional.embedding(index, table),
        "gather_rows, fresh result": lambda index, out: unified.gather_rows(index),
        "numpy.take": lambda index, out: np.take(
            table.numpy(), index.numpy(), axis=0, out=out.numpy(), mode="clip"
        ),
    }
    rows = []
    generator = np.random.default_rng(0)
    for count in NUM_INDICES:
        num_bytes = count * row_bytes
        if num_bytes > MAX_RESULT_BYTES:
            continue
        out = torch.zeros(count, width)
        for kind in ("uniform", "zipf"):
            draw = functools.partial(indices, kind, count, num_rows, generator)
            seconds = measure(arms, draw, out, repetitions_of(num_bytes))
            case = f"{format_bytes(table_bytes)} table, {row_bytes} B rows, {count} {kind}"
            rows += rows_of(case, seconds, "index_select", num_bytes, where)
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--part", choices=["memory", "file", "pages", "epoch"], help="memory, without a GPU"
    )
    parser.add_argument("--table-bytes", help="4GiB in memory, 16GiB in a file, 6GiB of pages")
    parser.add_argument("--row-bytes", type=int, nargs="+", help="of the grid")
    parser.add_argument("--count", type=int, default=40_000, help="rows of a batch, of the file")
    parser.add_argument("--arms", nargs="+", help="of the epoch, by name; all by default")
    parser.add_argument("--store", help="directory on the disk to measure")
    parser.add_argument("--no-footprints", action="store_true", help="on a GPU: only the grid")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    parts = [options.part] if options.part else ["memory", "epoch"] if on_gpu else ["memory"]
    if options.dry_run:
        widths = options.row_bytes or (GPU_ROW_BYTES if on_gpu else ROW_BYTES)
        cases = [f"rows of {width} B" for width in widths] if "memory" in parts else []
        announce((case, "all arms") for case in [*cases, *(set(parts) - {"memory"})])
        return
    where = environment(options.device)
    if "file" in parts:
        table_bytes = parse_bytes(options.table_bytes or "16GiB", name="--table-bytes")
        write_rows(file_rows(table_bytes, options.store, options.count, where), options.out)
    if "pages" in parts:
        table_bytes = parse_bytes(options.table_bytes or "6GiB", name="--table-bytes")
        write_rows(page_rows(table_bytes, where), options.out)
    if "memory" in parts:
        table_bytes = parse_bytes(options.table_bytes or "4GiB", name="--table-bytes")
        for row_bytes in options.row_bytes or (GPU_ROW_BYTES if on_gpu else ROW_BYTES):
            if on_gpu:
                rows = gpu_rows(row_bytes, table_bytes, options.device, where)
            else:
                rows = memory_rows(row_bytes, table_bytes, where)
            write_rows(rows, options.out)
        if on_gpu and not options.no_footprints:
            for table_bytes in FOOTPRINT_BYTES:
                rows = gpu_rows(FOOTPRINT_ROW_BYTES, table_bytes, options.device, where)
                write_rows(rows, options.out)
    if "epoch" in parts:
        rows = epoch_rows(options.device, options.store, where, options.arms)
        write_rows(rows, options.out)


if __name__ == "__main__":
    main()
