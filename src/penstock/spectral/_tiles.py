"""Operators larger than the device: their rows stream past in tiles, some of which stay.

A product uses each tile once and products follow each other, so the order of uses is a cycle, and
of tiles that are read only. What Belady's rule evicts on a cycle is the tile that was just used: a
fixed set stays, as many as the budget holds, and the others go through two buffers, one of which is
read into while the other is multiplied. What multiplies a tile also takes the step of the Chebyshev
recurrence for its rows, which are still in the cache.
"""

from __future__ import annotations

import abc
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CapacityError, StoreReadError
from penstock.memory import Ledger, Link, Tier, WholeFile, WorkerThreads
from penstock.memory.pages import DIRECT_IO_BYTES, map_anonymous, round_up
from penstock.spectral import _native
from penstock.spectral._operator import LinearOperator, combine_dense
from penstock.unified import UnifiedTensor
from penstock.unified.file.layout import RowLayout, open_layout
from penstock.units import format_bytes

_LEAST_TILE_BYTES = 256 << 10
_TILE_BYTES = 32 * 2**20
TILE_BLOCK = 4  # vectors that share a read of the operator


class TileSource(abc.ABC):
    """A matrix in a file, of which ranges of rows are read.

    Attributes:
        shape: Rows and columns.
        dtype: Dtype of the entries.
    """

    shape: tuple[int, int]
    dtype: torch.dtype

    @abc.abstractmethod
    def tile_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of memory that rows take."""

    @abc.abstractmethod
    def read(self, begin: int, end: int, memory: Tensor) -> tuple[Tensor, ...]:
        """Read rows into memory, uint8, and return the tensors that they are."""

    @abc.abstractmethod
    def combine(
        self, tile: tuple[Tensor, ...], begin: int, x: Tensor, out: Tensor, factors: Factors
    ) -> None:
        """Compute `out = alpha A x + gamma z + beta out` for the rows of a tile."""


Factors = tuple[float, Tensor, float, float]
"""alpha, z, gamma and beta."""


class DenseSource(TileSource):
    """A dense matrix in a table in a file.

    Rows without gaps between them are read as one list, past the table, which would copy each.
    """

    def __init__(self, table: UnifiedTensor) -> None:
        self.shape, self.dtype = (table.shape[0], table.shape[1]), table.dtype
        self._table, layout = table, table.file_layout
        assert layout is not None, "the table is in a file"
        self._list = FileList(layout) if has_no_gaps(layout) else None

    def tile_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of rows; see `TileSource`."""
        count = (end - begin) * self.shape[1]
        return self._list.room_bytes(count) if self._list else count * self.dtype.itemsize

    def read(self, begin: int, end: int, memory: Tensor) -> tuple[Tensor, ...]:
        """Read rows; see `TileSource`."""
        width = self.shape[1]
        if self._list is not None:
            if not begin:  # a sweep begins
                # The table ends writes that were interrupted, and knows if its file has changed.
                self._table.gather_rows(torch.tensor([0], device="cpu"))
            return (self._list.read(begin * width, end * width, memory).view(-1, width),)
        rows = memory[: self.tile_bytes(begin, end)].view(self.dtype).view(end - begin, width)
        self._table.gather_rows(torch.arange(begin, end, device="cpu"), out=rows)
        return (rows,)

    def combine(
        self, tile: tuple[Tensor, ...], begin: int, x: Tensor, out: Tensor, factors: Factors
    ) -> None:
        """Compute the rows of a tile; see `TileSource`."""
        alpha, z, gamma, beta = factors
        part = slice(begin, begin + len(tile[0]))
        combine_dense(tile[0], x, out[:, part], alpha, z[:, part], gamma, beta)


class SparseSource(TileSource):
    """A matrix in CSR whose columns and values are lists in files; offsets are in memory."""

    def __init__(self, offsets: Tensor, columns: FileList, values: FileList, width: int) -> None:
        self.shape, self.dtype = (len(offsets) - 1, width), values.dtype
        self._offsets, self._columns, self._values = offsets, columns, values

    def tile_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of rows; see `TileSource`."""
        first, last = int(self._offsets[begin]), int(self._offsets[end])
        return self._columns.room_bytes(last - first) + self._values.room_bytes(last - first)

    def read(self, begin: int, end: int, memory: Tensor) -> tuple[Tensor, ...]:
        """Read rows; see `TileSource`."""
        first, last = int(self._offsets[begin]), int(self._offsets[end])
        room = self._columns.room_bytes(last - first)
        columns = self._columns.read(first, last, memory[:room])
        values = self._values.read(first, last, memory[room:])
        self._check_columns(columns, begin)
        # From the tile's first entry on: places in the whole list may need more bits than columns.
        offsets = self._offsets[begin : end + 1].to(torch.int64) - first
        return offsets.to(columns.dtype), columns, values

    def _check_columns(self, columns: Tensor, begin: int) -> None:
        """Raise ValueError if a column of a tile that begins with a row is none."""
        if not len(columns):
            return
        low, high = (int(each) for each in columns.aminmax())
        if low < 0 or high >= self.shape[1]:
            raise ValueError(
                f"operator: a column is {low if low < 0 else high} in row {begin} or soon after; "
                f"columns must lie from 0 to {self.shape[1] - 1}"
            )

    def combine(
        self, tile: tuple[Tensor, ...], begin: int, x: Tensor, out: Tensor, factors: Factors
    ) -> None:
        """Compute the rows of a tile; see `TileSource`."""
        alpha, z, gamma, beta = factors
        offsets, columns, values = tile
        _native.combine_rows(
            *(offsets, columns, values, x, out),
            first_row=begin,
            alpha=alpha,
            z=z,
            gamma=gamma,
            beta=beta,
        )


class FileList:
    """A list of numbers in a file, of which ranges are read past the page cache.

    Args:
        layout: Layout of a table without gaps between its rows.

    Attributes:
        count: Numbers in the list.
        dtype: Their dtype.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._layout, self._file = layout, WholeFile(layout.path)
        self.count, self.dtype = math.prod(layout.shape), layout.dtype

    @classmethod
    def open(cls, source: str | os.PathLike[str]) -> FileList:
        """Return the list in a file.

        Raises:
            ValueError: The file holds a table of rows.
        """
        layout = open_layout(source)
        if len(layout.shape) != 1 or not has_no_gaps(layout):
            raise ValueError(
                f"operator: the list in {layout.path} has shape {layout.shape}; give one of one "
                "dimension, in a .npy or .safetensors file"
            )
        return cls(layout)

    def room_bytes(self, count: int) -> int:
        """Return the bytes that `read` needs for a range, with the pages around it."""
        return round_up(count * self.dtype.itemsize) + 2 * DIRECT_IO_BYTES

    def read(self, begin: int, end: int, memory: Tensor) -> Tensor:
        """Read a range into memory that begins at a page, and return it."""
        item = self.dtype.itemsize
        first = self._layout.offset + begin * item
        start = first // DIRECT_IO_BYTES * DIRECT_IO_BYTES
        stop = self._layout.offset + end * item
        whole = min(round_up(stop), self._file.num_bytes // DIRECT_IO_BYTES * DIRECT_IO_BYTES)
        if whole > start:
            self._file.read(start, memory.data_ptr(), whole - start)
        if stop > max(whole, start):  # the last page of the file is not whole
            at = max(whole, start)
            rest = self._file.read_bytes(at, stop - at)
            if len(rest) < stop - at:
                path = self._layout.path
                raise StoreReadError(f"{path} is shorter than it was", path=path, offset=at)
            memory[at - start : stop - start] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
        found = memory[first - start : stop - start]
        if (first - start) % item:  # a header of another length than a multiple of the numbers'
            found = found.clone()
        return found.view(self.dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def has_no_gaps(layout: RowLayout) -> bool:
    """Return whether rows follow each other in a file."""
    return layout.block_bytes == layout.rows_per_block * layout.row_bytes


class TileStream:
    """Tiles of a matrix in order, again and again; some stay in memory.

    Args:
        source: The matrix.
        budget_bytes: The most bytes of tiles that are in memory at once; None: all are kept.
        ledger: Account of bytes.
        device: Device of the tiles.
        is_read_once: Whether there is one sweep only: none is kept.

    Attributes:
        held_bytes: Bytes of the tiles that are kept and of the buffers.

    Raises:
        CapacityError: The budget does not hold two tiles of a row.
    """

    def __init__(
        self,
        source: TileSource,
        *,
        budget_bytes: int | None,
        ledger: Ledger,
        device: torch.device,
        is_read_once: bool = False,
    ) -> None:
        self._source, self._ledger, self._device = source, ledger, device
        self._is_read_once = is_read_once
        total = source.tile_bytes(0, source.shape[0])
        room = 2 * total + 1 if budget_bytes is None else budget_bytes
        # As many tiles as make two buffers an eighth of the budget; of a small one they may be
        # half, since a tile's lists begin and end within pages, and a row may be less than one.
        tile_bytes = max(room // 16, min(room // 4, _LEAST_TILE_BYTES))
        if not is_read_once and total <= min(room, _LEAST_TILE_BYTES):
            tile_bytes = total  # one that stays
        self._bounds = _cut(source, max(1, min(_TILE_BYTES, tile_bytes)))
        sizes = [round_up(source.tile_bytes(*each)) for each in self._bounds]
        self._buffer_bytes = max(sizes, default=0)
        is_whole = sum(sizes) <= room and not is_read_once
        self.held_bytes = 0 if is_whole else 2 * self._buffer_bytes
        if self.held_bytes > room:
            raise CapacityError(
                f"max_bytes: {format_bytes(room)} are left for tiles of the operator, but two of "
                f"one row have {format_bytes(2 * self._buffer_bytes)}; raise max_bytes"
            )
        self._num_kept, most = 0, 0 if is_read_once else len(sizes)
        while self._num_kept < most and self.held_bytes + sizes[self._num_kept] <= room:
            self.held_bytes += sizes[self._num_kept]
            self._num_kept += 1
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._buffers = [] if is_whole else [_map(self._buffer_bytes) for _ in range(2)]
        self._threads = WorkerThreads(1, thread_name_prefix="penstock-tiles")
        self._pending: tuple[int, Future[Any]] | None = None
        self._turn = 0
        ledger.add(Tier.DEVICE, self.held_bytes)

    @property
    def num_tiles(self) -> int:
        """Tiles of the matrix."""
        return len(self._bounds)

    @property
    def num_kept(self) -> int:
        """Tiles that stay in memory."""
        return self._num_kept

    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield each tile with its first row; it is valid until the next is asked for."""
        for at, (begin, _) in enumerate(self._bounds):
            yield begin, self._take(at)

    def _take(self, at: int) -> tuple[Tensor, ...]:
        """Return a tile, and start to read the next one that is not in memory."""
        if at in self._kept:
            return self._kept[at]
        if self._pending is None or self._pending[0] != at:
            self._wait_for_pending()
            self._start(at)
        assert self._pending is not None
        began = time.perf_counter_ns()
        pending, self._pending = self._pending[1], None
        tile = self._to_device(pending.result())
        self._ledger.record_stall("tile", began, time.perf_counter_ns())
        if at < self._num_kept:
            self._kept[at] = tile
        # The buffer that is read into now is that of the tile before, which is used no more.
        if at + 1 < len(self._bounds):
            self._start(at + 1)
        elif not self._is_read_once and self._num_kept < len(self._bounds):
            self._start(self._num_kept)
        return tile

    def _to_device(self, tile: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each.to(self._device) for each in tile)

    def _start(self, at: int) -> None:
        if at < self._num_kept:
            memory = _map(self._source.tile_bytes(*self._bounds[at]))
        else:
            self._turn += 1
            memory = self._buffers[self._turn % 2]
        self._pending = at, self._threads.submit(self._read, at, memory)

    def _read(self, at: int, memory: Tensor) -> tuple[Tensor, ...]:
        began = time.perf_counter_ns()
        tile = self._source.read(*self._bounds[at], memory)
        num_bytes = sum(each.numel() * each.element_size() for each in tile)
        self._ledger.record_transfer(Link.FILE_TO_DEVICE, num_bytes, began)
        return tile

    def _wait_for_pending(self) -> None:
        if self._pending is not None:
            self._pending[1].exception()
            self._pending = None

    def close(self) -> None:
        """Give back memory and threads; further calls do nothing."""
        self._wait_for_pending()
        self._threads.shutdown(wait=True)
        self._kept.clear()
        self._ledger.add(Tier.DEVICE, -self.held_bytes)
        self.held_bytes = 0


class TiledOperator(LinearOperator):
    """A square matrix, or some rows of one, that is read tile by tile.

    Args:
        source: The matrix.
        budget_bytes: The most bytes of tiles and reserved vectors; None: all tiles are kept.
        num_reserved: Vectors for which the budget has to have room beside the tiles.
        ledger: Account of bytes.
        device: Device of the vectors.
    """

    def __init__(
        self,
        source: TileSource,
        *,
        budget_bytes: int | None,
        num_reserved: int,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        num_rows = source.shape[0]
        total = source.tile_bytes(0, num_rows)
        super().__init__(num_rows, source.dtype, device, sweep_bytes=total, block=TILE_BLOCK)
        room = budget_bytes
        if room is not None:
            room = max(0, room - num_reserved * num_rows * source.dtype.itemsize)
        self._source = source
        self.tiles = TileStream(source, budget_bytes=room, ledger=ledger, device=device)
        self.held_bytes = self.tiles.held_bytes

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        for begin, tile in self.tiles:
            self._source.combine(tile, begin, x, out, (alpha, z, gamma, beta))

    def close(self) -> None:
        """Give back what the operator holds; see `LinearOperator`."""
        self.tiles.close()


def _cut(source: TileSource, tile_bytes: int) -> list[tuple[int, int]]:
    """Return ranges of rows of at most so many bytes, but of at least one row."""
    bounds, begin, num_rows = [], 0, source.shape[0]
    while begin < num_rows:
        low, high = begin + 1, num_rows
        while low < high:
            middle = (low + high + 1) // 2
            if source.tile_bytes(begin, middle) <= tile_bytes:
                low = middle
            else:
                high = middle - 1
        bounds.append((begin, low))
        begin = low
    return bounds


def _map(num_bytes: int) -> Tensor:
    return torch.frombuffer(map_anonymous(num_bytes, private=True), dtype=torch.uint8)
