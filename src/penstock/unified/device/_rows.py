"""Rows of host memory that a GPU reads, writes and adds to.

The kernels are in `_kernels.py`; here are the operators of PyTorch over them, and the shapes of
their tiles. The table's memory is a registered tensor on the CPU (`_registration.py`). It goes
to Triton as it is: Triton asks the driver for the address at which the GPU of the launch sees it,
so this needs neither an alias nor the GPU that was current when the memory was registered.

Under Triton's interpreter everything here runs on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.codegen import COMPILER_OPTIONS, ceil_power, use_device
from penstock.unified._row_index import resolve_index
from penstock.unified.device import _kernels

_LINE_BYTES = 128  # a request over the link, at most
_TILE_WORDS = 2048  # of a program at a time: 64 bytes in flight per thread, of words of 4 bytes
_NUM_WARPS = 4
_MAX_ROWS = 256  # of a tile, for rows of a word or two
_PROGRAMS_PER_PROCESSOR = 8
_SORT_ROW_BYTES = 256  # rows up to here gain from being read in the order of their addresses
_SORT_INDICES = 4096  # fewer than this are read before they would be sorted
_WORDS = {16: tl.int32, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_SUMS = {
    getattr(torch, name): getattr(tl, name)
    for name in ("float32", "float64", "int8", "uint8", "int16", "int32", "int64")
} | {torch.float16: tl.float32, torch.bfloat16: tl.float32}


def read_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    negative: bool = False,
    first_wrong: torch.Tensor | None = None,
    max_programs: int = 0,
) -> None:
    """Read rows: `out[places[i]] = table[index[i]]`, launched on the current stream.

    Args:
        table: Shape (num_rows, *row), contiguous; on the GPU, or registered.
        index: On the GPU, int32 or int64 of shape (n,).
        out: Shape (m, *row) on the GPU, contiguous.
        places: On the GPU, int64 of shape (n,); below zero passes over the row. None: 0 to n - 1.
        negative: Whether indices below zero count from the end.
        first_wrong: On the GPU, int64 of shape (); it becomes the smallest place whose index is out
            of range, if it was larger, and such a row becomes zeroes; not of rows without bytes.
            With None, indices below
            zero are passed over and larger ones must not occur.
        max_programs: Programs that may run at a time; 0 is as many as the GPU can.
    """
    if (
        places is None
        and 0 < row_bytes(table) <= _SORT_ROW_BYTES
        and index.numel() >= _SORT_INDICES
    ):
        index, places = torch.sort(index)
    copy_rows(table, index, out, places, first_wrong, negative, True, max_programs)


def write_rows(
    table: torch.Tensor, index: torch.Tensor, source: torch.Tensor, *, negative: bool = False
) -> None:
    """Write rows: `table[index[i]] = source[i]`; of several for one row the last one stays.

    Nothing is written if an index is out of range; the host waits for that check. Shapes as of
    `read_rows`, `source` being the `out`.

    Raises:
        IndexError: An index is out of range; the message names it.
    """
    rows, order = _sort_rows(index, table.shape[0], negative)
    if len(rows):
        is_last = torch.ones_like(rows, dtype=torch.bool)
        is_last[:-1] = rows[1:] != rows[:-1]
        rows = torch.where(is_last, rows, -1)
        copy_rows(source, order, table, rows, None, False, False, 0)


def add_rows(
    table: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: float = 1,
    negative: bool = False,
) -> None:
    """Add rows: `table[index[i]] += alpha * source[i]`, in the order of `i` for each row.

    Nothing is written if an index is out of range; the host waits for that check. Shapes as of
    `write_rows`, dtypes for which `can_add` is true.

    Raises:
        IndexError: An index is out of range; the message names it.
    """
    rows, order = _sort_rows(index, table.shape[0], negative)
    if table.dtype.is_complex:
        table, source = torch.view_as_real(table), torch.view_as_real(source)
    if alpha != 1:
        # Multiplied here, because a kernel's arguments are no float64 and would be fused with the
        # addition. Narrow floats are rounded once, after everything was added.
        is_narrow = table.dtype in (torch.float16, torch.bfloat16)
        source = (source.float() if is_narrow else source) * alpha
    add_sorted_rows(table, rows, order, source)


def can_add(dtype: torch.dtype) -> bool:
    """Return whether `add_rows` can add numbers of this dtype."""
    return dtype in _SUMS or dtype in (torch.complex64, torch.complex128)


def _sort_rows(
    index: torch.Tensor, num_rows: int, negative: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows in ascending order, and their places; of equal ones the first comes first."""
    rows = torch.where(index < 0, index + num_rows, index) if negative else index
    rows, order = torch.sort(rows.long(), stable=True)
    if len(rows):
        smallest, largest = rows[:: max(1, len(rows) - 1)][[0, -1]].tolist()
        if smallest < 0 or largest >= num_rows:
            resolve_index(index, num_rows, negative)
    return rows, order


# ------------------------------------------------------------------- operators


@torch.library.custom_op("penstock::copy_rows", mutates_args=("target", "first_wrong"))
def copy_rows(
    source: torch.Tensor,
    source_index: torch.Tensor | None,
    target: torch.Tensor,
    target_index: torch.Tensor | None,
    first_wrong: torch.Tensor | None,
    negative: bool,
    host_is_source: bool,
    max_programs: int,
) -> None:
    """Copy rows: `target[target_index[i]] = source[source_index[i]]`; see `read_rows`."""
    index = source_index if source_index is not None else target_index
    num_places = len(index) if index is not None else min(len(source), len(target))
    if not num_places or not row_bytes(source):
        return
    tile = choose_tile(source, target, host_is_source=host_is_source)
    device = _device_of(source, target)
    grid = _choose_grid(device, -(-num_places // tile.rows), max_programs)
    kernel: Any = _kernels.copy_rows[grid]
    with use_device(device):
        kernel(
            _view_as_words(source, tl.int32 if tile.is_narrow else _WORDS[tile.word_bytes]),
            source_index,
            _view_as_words(target, _WORDS[tile.word_bytes]),
            target_index,
            first_wrong,
            num_places,
            len(source),
            HAS_SOURCE_INDEX=source_index is not None,
            HAS_TARGET_INDEX=target_index is not None,
            NEGATIVE=negative,
            CHECK=first_wrong is not None,
            HOST_IS_SOURCE=host_is_source,
            UNIT=tile.word_bytes if tile.is_narrow else 0,
            **{name.upper(): getattr(tile, name) for name in _TILE_CONSTANTS},
            num_warps=_NUM_WARPS,
            **COMPILER_OPTIONS,
        )


@torch.library.custom_op("penstock::add_rows", mutates_args=("table",))
def add_sorted_rows(
    table: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, source: torch.Tensor
) -> None:
    """Add rows: `table[rows[i]] += source[order[i]]` for sorted `rows`."""
    row_length = table.numel() // max(1, len(table))
    if not len(rows) or not row_length:
        return
    device = _device_of(source, table)
    kernel: Any = _kernels.add_runs[_choose_grid(device, len(rows), 0)]
    with use_device(device):
        kernel(
            table,
            rows,
            order,
            source,
            len(rows),
            SUM=_SUMS[table.dtype],
            ROW=row_length,
            COLUMNS=min(1024, ceil_power(row_length)),
            num_warps=_NUM_WARPS,
            **COMPILER_OPTIONS,
        )


# ----------------------------------------------------------------------- tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The rows and columns that a program copies at a time; see `_kernels.copy_rows`."""

    word_bytes: int
    """Bytes that a thread reads at once: the widest that all addresses are a multiple of."""
    vector: int
    """Words in those: Triton has no integer of 16 bytes, so those are four words of four."""
    row: int
    """Words of a row."""
    line: int
    """Words of a line, or `vector` where rows are not laid on the grid of lines."""
    base: int
    """Words from the line's beginning to the memory's."""
    span: int
    """Words that hold a row wherever it begins in a line."""
    rows: int
    columns: int
    is_narrow: bool = False
    """True if words of four bytes are read and smaller ones stored: lengths are bytes then."""


_TILE_CONSTANTS = ("vector", "row", "line", "base", "span", "rows", "columns")


def choose_tile(source: torch.Tensor, target: torch.Tensor, *, host_is_source: bool) -> Tile:
    """Return the tile of a copy of rows; one of the tensors is the table in host memory."""
    host, width = source if host_is_source else target, row_bytes(source)
    tile = _make_tile(width, host.data_ptr(), source.data_ptr(), target.data_ptr())
    # Words of four bytes can be read only where memory begins with one, as a table's does.
    if tile.word_bytes < 4 and host_is_source and source.data_ptr() % 4 == 0:
        return _make_narrow_tile(width, source.data_ptr(), tile.word_bytes)
    return tile


def _make_tile(num_bytes: int, host_address: int, *addresses: int) -> Tile:
    word_bytes = math.gcd(16, num_bytes, *addresses)
    vector = 4 if word_bytes == 16 else 1
    unit = word_bytes // vector
    line, base, row = _LINE_BYTES // unit, host_address % _LINE_BYTES // unit, num_bytes // unit
    if num_bytes <= _LINE_BYTES or (num_bytes % _LINE_BYTES == 0 and base == 0):
        line, base = vector, 0  # a row lies in two lines at most, or begins one anyway
    span = row + line - math.gcd(row, line, base)
    return _shape_tile(
        word_bytes=word_bytes, vector=vector, row=row, line=line, base=base, span=span
    )


def _make_narrow_tile(num_bytes: int, host_address: int, unit: int) -> Tile:
    """Return the tile of rows of no multiple of four bytes; lengths are bytes but for `span`."""
    line = _LINE_BYTES if num_bytes > _LINE_BYTES else 4
    base = host_address % line
    span = -(-(num_bytes + line - 1) // 4)
    return _shape_tile(
        word_bytes=unit, vector=1, row=num_bytes, line=line, base=base, span=span, is_narrow=True
    )


def _shape_tile(*, span: int, is_narrow: bool = False, **lengths: int) -> Tile:
    """Return the tile whose columns waste few lanes on the last of them."""
    columns = ceil_power(span)
    while columns > 1024 or (columns > 32 and -(-span // columns) * columns > 1.125 * span):
        columns //= 2
    rows = min(_MAX_ROWS, max(1, _TILE_WORDS // columns))
    return Tile(span=span, rows=rows, columns=columns, is_narrow=is_narrow, **lengths)


def row_bytes(table: torch.Tensor) -> int:
    """Return the bytes of a row; 0 where there is none."""
    return table.numel() // len(table) * table.element_size() if len(table) else 0


def _view_as_words(tensor: torch.Tensor, word: Any) -> Any:
    """Return the tensor's memory as words; Triton needs nothing but the address and the type."""
    assert tensor.is_contiguous()
    return triton.reinterpret(tensor.view(-1).view(torch.uint8), word)


def _device_of(first: torch.Tensor, second: torch.Tensor) -> torch.device:
    """Return the GPU of one of the tensors; Triton's interpreter has both on the CPU."""
    return first.device if first.is_cuda else second.device


def _choose_grid(device: torch.device, most: int, cap: int) -> tuple[int]:
    if not cap:
        if device.type == "cuda":
            cap = torch.cuda.get_device_properties(device).multi_processor_count
        cap = max(1, cap) * _PROGRAMS_PER_PROCESSOR
    return (max(1, min(most, cap)),)
