"""Gathering rows of tables: from host memory and from a file, against what PyTorch and NumPy offer.

    python benchmarks/unified.py                     # the grid, in memory
    python benchmarks/unified.py --part file         # random rows of a file with a cold cache

All arms of a case gather into the same buffer, one after the other, in an order that alternates.
Every time the rows are new ones, drawn alike, so that no arm finds in the caches what another has
left there. Before each measured call stands one that is not measured, of the same arm: otherwise
an arm pays for the lines of the result that the one before it has left unwritten in the caches.
Ratios are taken within a repetition.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from penstock.units import format_bytes, parse_bytes

ROW_BYTES = (64, 128, 256, 400, 512, 1024, 2052, 4096, 16384)
NUM_INDICES = (64, 512, 4096, 65536, 1 << 20)
MAX_RESULT_BYTES = 2 << 30
FILE_ROW_BYTES = 512
FILE_REPETITIONS = 7
FIO_DEPTHS = (32, 64, 128, 256, 512)
ZIPF_EXPONENT = 1.1

Arm = Callable[[torch.Tensor, torch.Tensor], object]


def indices(kind: str, count: int, num_rows: int, generator: np.random.Generator) -> torch.Tensor:
    """`count` row numbers: all alike, or a few popular ones that lie anywhere in the table."""
    if kind == "uniform":
        return torch.from_numpy(generator.integers(0, num_rows, count))
    ranks = generator.zipf(ZIPF_EXPONENT, count) % num_rows
    return torch.from_numpy(ranks * 2654435761 % num_rows)  # spread over the table


def measured(
    arms: dict[str, Arm], draw: Callable[[], torch.Tensor], out: torch.Tensor, repetitions: int
) -> dict[str, list[float]]:
    """Seconds of every arm, each time for indices that `draw` has made."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(repetitions + 1):
        order = list(arms) if number % 2 == 0 else list(reversed(arms))
        for name in order:
            arms[name](draw(), out)
            batch = draw()
            start = time.perf_counter()
            arms[name](batch, out)
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def repetitions_of(num_bytes: int) -> int:
    """More for what is short: the clock and the threads of a small gather are noisy."""
    return 7 if num_bytes > 64 << 20 else 15 if num_bytes > 1 << 20 else 101


def memory_rows(row_bytes: int, table_bytes: int, where: Any) -> list[BenchmarkRow]:
    """The grid for one width of rows."""
    from penstock.unified import empty

    num_rows, width = table_bytes // row_bytes, row_bytes // 4
    table = torch.empty(num_rows, width)
    for start in range(0, num_rows, 1 << 20):
        table[start : start + (1 << 20)].random_(0, 1000)
    unified = empty(table.shape)
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
            seconds = measured(arms, draw, out, repetitions_of(num_bytes))
            case = f"{format_bytes(table_bytes)} table, {row_bytes} B rows, {count} {kind}"
            rows += rows_of(case, seconds, "index_select", num_bytes, where)
    return rows


def rows_of(
    case: str,
    seconds: dict[str, list[float]],
    reference: str,
    num_bytes: int,
    where: Any,
    limit: Limit | None = None,
    count: int = 0,
) -> list[BenchmarkRow]:
    """A row per arm, with how many times faster than the reference it was.

    `limit` is in rows per second; `count` rows were gathered.
    """
    rows = []
    for arm, times in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(times, seconds[reference], strict=True)]
        added = [ours - theirs for ours, theirs in zip(times, seconds[reference], strict=True)]
        extra = {
            "speedup_median": statistics.median(ratios),
            "speedup_quartiles": list(np.quantile(ratios, [0.25, 0.75])),
            "added_microseconds_median": statistics.median(added) * 1e6,
            "bytes_per_second": num_bytes / statistics.median(times),
        }
        held = {} if limit is None else {"measured": count / statistics.median(times)}
        rows.append(
            BenchmarkRow.of(
                times,
                topic="unified",
                case=case,
                arm=arm,
                extra=extra,
                limit=limit,
                **held,
                **where,
            )
        )
        print(
            f"{case:55s} {arm:26s} {statistics.median(times) * 1e6:10.1f} us "
            f"x{extra['speedup_median']:.2f}",
            file=sys.stderr,
            flush=True,
        )
    return rows


# ---------------------------------------------------------------------------------- files


def drop_cache(path: Path) -> None:
    """Have the kernel forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_table(path: Path, num_rows: int) -> None:
    """A .npy file of noise, written in pieces."""
    width = FILE_ROW_BYTES // 4
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_rows, width))
    generator = np.random.default_rng(0)
    piece = generator.random((1 << 18, width), dtype=np.float32)
    for start in range(0, num_rows, len(piece)):
        array[start : start + len(piece)] = piece[: num_rows - start]
    array.flush()


def fio_seconds(path: Path, depth: int, count: int) -> float:
    """Seconds in which fio reads `count` blocks of the size of a row, anywhere in the file."""
    command = ["fio", "--name=rows", f"--filename={path}", "--readonly", "--rw=randread"]
    command += [f"--bs={FILE_ROW_BYTES}", "--direct=1", "--ioengine=io_uring", f"--iodepth={depth}"]
    num_bytes = 4 * count * FILE_ROW_BYTES  # its start takes a part of a short run
    command += ["--norandommap", "--randrepeat=0", f"--io_size={num_bytes}"]
    done = subprocess.run(
        [*command, "--output-format=json"], capture_output=True, text=True, check=True
    )
    return count / json.loads(done.stdout)["jobs"][0]["read"]["iops"]


def best_fio_depth(path: Path, count: int) -> int | None:
    """The number of requests in flight at which fio is fastest; None where it is not installed."""
    if shutil.which("fio") is None:
        print("unified: fio is not installed; no limit is measured", file=sys.stderr)
        return None

    def seconds(depth: int) -> float:
        return statistics.median(fio_seconds(path, depth, count) for _ in range(3))

    return min(FIO_DEPTHS, key=seconds)


def file_rows(table_bytes: int, directory: str | None, count: int, where: Any) -> list[Any]:
    """Random rows of a file, nothing of it in memory."""
    from penstock.unified._file_rows import RowReader
    from penstock.unified._row_file import open_layout

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder, "table.npy")
        num_rows = table_bytes // FILE_ROW_BYTES
        write_table(path, num_rows)
        mapped = np.load(path, mmap_mode="r")
        mapped._mmap.madvise(mmap.MADV_RANDOM)
        readers = {
            f"gather_rows, {reader.method}": reader
            for reader in (RowReader(open_layout(path), ring=ring) for ring in (True, False))
        }
        out = torch.zeros(count, FILE_ROW_BYTES // 4)
        generator = np.random.default_rng(1)
        few = count // 4  # the memory map gathers a quarter of the rows, or it would take ages

        def timed(gather: Arm, num: int) -> float:
            index = indices("uniform", num, num_rows, generator)
            start = time.perf_counter()
            gather(index, out[:num])
            return (time.perf_counter() - start) * count / num

        def memmap(index: torch.Tensor, out: torch.Tensor) -> None:
            np.take(mapped, index.numpy(), axis=0, out=out.numpy())

        arms = {
            "numpy.memmap, MADV_RANDOM": functools.partial(timed, memmap, few),
            **{
                name: functools.partial(timed, each.gather, count) for name, each in readers.items()
            },
        }
        depth = best_fio_depth(path, count)
        if depth is not None:
            arms[f"fio, {depth} in flight"] = functools.partial(fio_seconds, path, depth, count)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(FILE_REPETITIONS + 1):
            for name in list(arms) if number % 2 else list(reversed(arms)):
                drop_cache(path)
                spent = arms[name]()
                if number:
                    seconds[name].append(spent)
        for reader in readers.values():
            reader.close()
    case = f"{format_bytes(table_bytes)} file, {FILE_ROW_BYTES} B rows, {count} uniform, cold"
    limit = None
    if depth is not None:
        best = statistics.median(seconds[f"fio, {depth} in flight"])
        limit = Limit(name="rows per second of fio", value=count / best, unit="1/s")
    return rows_of(
        case, seconds, "numpy.memmap, MADV_RANDOM", count * FILE_ROW_BYTES, where, limit, count
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", choices=["memory", "file"], default="memory")
    parser.add_argument("--table-bytes", default=None, help="4GiB in memory, 16GiB in a file")
    parser.add_argument("--row-bytes", type=int, nargs="+", default=list(ROW_BYTES))
    parser.add_argument("--count", type=int, default=40_000, help="rows of a batch, of the file")
    parser.add_argument("--store", default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    if options.device != "cpu":
        print("unified: nothing here runs on a GPU yet; no rows", file=sys.stderr)
        return
    where = environment(options.device)
    if options.part == "file":
        table_bytes = parse_bytes(options.table_bytes or "16GiB", name="--table-bytes")
        write_rows(file_rows(table_bytes, options.store, options.count, where), options.out)
        return
    table_bytes = parse_bytes(options.table_bytes or "4GiB", name="--table-bytes")
    for row_bytes in options.row_bytes:
        write_rows(memory_rows(row_bytes, table_bytes, where), options.out)


if __name__ == "__main__":
    main()
