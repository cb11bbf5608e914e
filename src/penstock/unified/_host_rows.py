"""Rows of tables in host memory: gathered, put and added.

`host_rows.cpp` does it, built at first use; without a compiler torch does, with the same results.
Which of the two is chosen once per process, and logged.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import torch

from penstock.codegen import load_optional_library

_SOURCES = [Path(__file__).with_name(name) for name in ("threads.cpp", "host_rows.cpp")]
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off")
_ALONE_BYTES = 64 * 1024  # fewer bytes than this are copied before a second thread is awake
_STREAM_BYTES = 8 * 2**20  # results larger than this go past the caches
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX_DTYPES = (torch.int64, torch.int32)


def backend() -> str:
    """What gathers rows in this process: "cpp" or "torch"."""
    return "torch" if _library() is None else "cpp"


def gather_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    *,
    negative: bool = False,
    alone: bool = False,
) -> None:
    """`out[i] = table[index[i]]`, for rows of any shape.

    Args:
        table: on the CPU, shape (num_rows, *row); rows contiguous, at any distance.
        index: on the CPU, integers of any shape.
        out: on the CPU, shape (*index.shape, *row), of the table's dtype; contiguous.
        negative: whether indices below zero count from the end.
        alone: whether the calling thread does it all, as in a forked process, in which the threads
            of its parent are not.

    Raises:
        IndexError: an index is out of range; the message names it. `out` is then undefined.
    """
    index = as_index(index)
    library = _library()
    if library is None:
        index = checked_index(index.view(-1), table.shape[0], negative)
        rows = out.view(index.numel(), *table.shape[1:])
        torch.index_select(table, 0, index, out=rows)
        return
    num_bytes = out.numel() * out.element_size()
    bad = library.penstock_gather_rows(
        *_arguments(table, index, negative, num_bytes, alone=alone),
        out.data_ptr(),
        num_bytes >= _STREAM_BYTES,
    )
    if bad >= 0:
        raise out_of_range(index, bad, table.shape[0])


def put_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    negative: bool = False,
    alone: bool = False,
) -> None:
    """`table[index[i]] = source[i]`; of several for one row the last one stays.

    Nothing is written if an index is out of range. Shapes, and `alone`, as for `gather_rows`.
    """
    index = as_index(index)
    library = _library()
    if library is None:
        index = checked_index(index, table.shape[0], negative)
        # torch leaves the order of duplicates open; keep the last of each.
        last = torch.full((table.shape[0],), -1, dtype=torch.int64)
        last.scatter_reduce_(0, index, torch.arange(len(index)), "amax")
        rows = (last >= 0).nonzero().flatten()
        bits = _BITS.get(table.element_size(), table.dtype)  # torch does not copy every dtype
        table.view(bits).index_copy_(0, rows, source.view(bits).index_select(0, last[rows]))
        return
    num_bytes = source.numel() * source.element_size()
    bad = library.penstock_put_rows(
        *_arguments(table, index, negative, num_bytes, alone=alone),
        source.data_ptr(),
        source.stride(0) * source.element_size() if source.dim() else 0,
    )
    if bad >= 0:
        raise out_of_range(index, bad, table.shape[0])


def add_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
    negative: bool = False,
) -> None:
    """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row.

    Nothing is written if an index is out of range. Shapes as for `gather_rows`.
    """
    index = as_index(index)
    library = _library()
    if library is None or table.dtype not in (torch.float32, torch.float64):
        # Of narrow floats torch adds the rows up in float before it rounds.
        table.index_add_(0, checked_index(index, table.shape[0], negative), source, alpha=alpha)
        return
    bad = library.penstock_add_rows(
        *_arguments(table, index, negative, source.numel() * source.element_size()),
        source.data_ptr(),
        source.stride(0) * source.element_size() if source.dim() else 0,
        float(alpha),
        table.dtype == torch.float64,
    )
    if bad >= 0:
        raise out_of_range(index, bad, table.shape[0])


def _arguments(
    table: torch.Tensor,
    index: torch.Tensor,
    negative: bool,
    num_bytes: int,
    *,
    alone: bool = False,
) -> tuple[int, ...]:
    """What all functions of the library begin with; `num_bytes` will be moved."""
    num_rows = table.shape[0]
    element_bytes = table.element_size()
    row_bytes = table.numel() // num_rows * element_bytes if num_rows else 0
    return (
        table.data_ptr(),
        num_rows,
        table.stride(0) * element_bytes,
        row_bytes,
        index.data_ptr(),
        index.element_size(),
        index.numel(),
        negative,
        1 if alone or num_bytes < _ALONE_BYTES else torch.get_num_threads(),
    )


def as_index(index: torch.Tensor) -> torch.Tensor:
    """Contiguous int32 or int64."""
    return (index if index.dtype in _INDEX_DTYPES else index.long()).contiguous()


def checked_index(index: torch.Tensor, num_rows: int, negative: bool) -> torch.Tensor:
    """Non-negative indices in range, for torch; raises IndexError for others."""
    resolved = torch.where(index < 0, index + num_rows, index) if negative else index
    wrong = ((resolved < 0) | (resolved >= num_rows)).flatten().nonzero()
    if len(wrong):
        raise out_of_range(index, int(wrong[0]), num_rows)
    return resolved


def out_of_range(index: torch.Tensor, position: int, num_rows: int) -> IndexError:
    """The error that names an index."""
    place = "".join(f"[{int(each)}]" for each in np.unravel_index(position, index.shape))
    return IndexError(
        f"index{place} is {int(index.view(-1)[position])}, but the table has {num_rows} rows"
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    common = [pointer, count, count, count, pointer, flag, count, flag, flag]
    return load_optional_library(
        "host_rows",
        _SOURCES,
        flags=_FLAGS,
        functions={
            "penstock_gather_rows": (count, [*common, pointer, flag]),
            "penstock_put_rows": (count, [*common, pointer, count]),
            "penstock_add_rows": (count, [*common, pointer, count, ctypes.c_double, flag]),
        },
        work="rows are gathered",
        otherwise="by torch",
    )
