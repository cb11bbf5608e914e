"""Random rows of a file with a cold cache, against a memory map and against what the disk can."""

from __future__ import annotations

import ctypes
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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _rows import Limit
from _unified_arms import Arm, indices, rows_of
from penstock.units import format_bytes

FILE_ROW_BYTES = 512
FILE_REPETITIONS = 7
FIO_DEPTHS = (32, 64, 128, 256, 512)


def drop_cache(path: Path) -> None:
    """Have the kernel forget the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def page_cache_bytes(path: Path) -> int:
    """Bytes of the file that are in the page cache."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
    address, length = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(len(mapped))
    if ctypes.CDLL(None, use_errno=True).mincore(
        address, length, ctypes.c_void_p(pages.ctypes.data)
    ):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((pages & 1).sum()) * mmap.PAGESIZE


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
    from penstock.unified import unify
    from penstock.unified.file._rows import RowReader
    from penstock.unified.file.layout import open_layout

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

        table = unify(path, device="cpu")  # which may choose another way than these readers

        def from_table(index: torch.Tensor, out: torch.Tensor) -> None:
            table.gather_rows(index, out=out)

        arms = {
            "unify": functools.partial(timed, from_table, count),
            "numpy.memmap, MADV_RANDOM": functools.partial(timed, memmap, few),
            **{
                name: functools.partial(timed, each.read_rows, count)
                for name, each in readers.items()
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
        reads = table.report().reads
        for reader in readers.values():
            reader.close()
    case = f"{format_bytes(table_bytes)} file, {FILE_ROW_BYTES} B rows, {count} uniform, cold"
    limit = None
    if depth is not None:
        best = statistics.median(seconds[f"fio, {depth} in flight"])
        limit = Limit(name="rows per second of fio", value=count / best, unit="1/s")
    rows = rows_of(
        case, seconds, "numpy.memmap, MADV_RANDOM", count * FILE_ROW_BYTES, where, limit, count
    )
    next(row for row in rows if row.arm == "unify").extra["reads"] = reads
    return rows
