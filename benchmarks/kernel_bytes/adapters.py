"""Bytes that each kernel asks of memory, as formulas of shapes, rows and tiles.

With c rows of a block or piece, of an adapter of rank r, and ceil(a / b) written a // b here, a
program asks for

    down_product    c K + w K of x and A, c w of S        for each w of r columns, in tiles
    base_product    c r + u r of S and B (or dS and A), c K + u K of x and W (or dy and W),
                    u of b, c u of y                      for each u of N columns, in tiles
    up_gradient     u w of B, c u of dy, c w of S and of dS, u w of dB
    down_gradient   c u of x, c w of dS, u w of dA
    add_slices      each element of dS, in each tile of columns of dy
    add_pieces      each element of dA or dB, in each piece

elements, and for numbers of tables and of the order, 8 bytes each. Summed over the tiles of columns
and of ranks these are sums over blocks and pieces alone. They are requests, before any cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from penstock.codegen import ByteCount, ceil_div
from penstock.lora.triton._tables import Entry, RowTables

_NUMBER = 8  # bytes of an entry of a table or of the order
_SUM = 4  # bytes of a partial sum
_TILE = 4  # bytes of a tile's number in an order that is read


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """A layer with its rows, of which each method has the bytes of a launch.

    Attributes:
        rows: Tables of the rows.
        in_features: K.
        out_features: N.
        element: Bytes of an element of x, W, b, y and their gradients.
        adapter_element: Bytes of an element of A, B and S.
        has_dropout: Whether an adapter has dropout.
    """

    rows: RowTables
    in_features: int
    out_features: int
    element: int
    adapter_element: int
    has_dropout: bool

    def down_product(self) -> ByteCount:
        """Return the bytes of S = (m * x) A^T."""
        loaded = stored = table = 0
        for block, rank, tiles in self._walk(self.rows.blocks):
            loaded += tiles * block.num_rows * self.in_features * self.element
            loaded += rank * self.in_features * self.adapter_element
            stored += block.num_rows * rank * self.adapter_element
            numbers = 5 + 2 * self.has_dropout + self._order_numbers(block)
            table += self._rank_tiles() * 2 + tiles * numbers
        return _requests(loaded, stored, table)

    def base_product(
        self, *, backward: bool = False, has_bias: bool = False, has_weight: bool = True,
        has_addend: bool = False, has_tile_table: bool = False,
    ) -> ByteCount:  # fmt: skip
        """Return the bytes of y, or `backward` those of dx."""
        inner, width = self.in_features, self.out_features
        if backward:
            inner, width = width, inner
        loaded = stored = table = 0
        columns = ceil_div(width, self.rows.tiles.base_columns)
        for block, rank, _ in self._walk(self.rows.all_blocks):
            loaded += (columns * block.num_rows + width) * rank * self.adapter_element
            if has_weight:
                loaded += (columns * block.num_rows + width) * inner * self.element
            loaded += has_bias * width * self.element
            loaded += has_addend * block.num_rows * width * self.element
            stored += block.num_rows * width * self.element
            numbers = 6 + 3 * self.has_dropout if backward else 7
            table += columns * (numbers + self._order_numbers(block))
        tiles = has_tile_table * columns * len(self.rows.all_blocks)
        return _requests(loaded, stored, table, tiles * _TILE)

    def up_gradient(self) -> ByteCount:
        """Return the bytes of partial dB and dS."""
        width, tiles = self.out_features, self.rows.tiles
        loaded = stored = table = 0
        columns = ceil_div(width, tiles.up_columns)
        slice_element = self.adapter_element if columns == 1 else _SUM
        for piece, rank, num_tiles in self._walk(self.rows.pieces):
            loaded += width * rank * self.adapter_element
            loaded += num_tiles * piece.num_rows * width * self.element
            loaded += columns * piece.num_rows * rank * self.adapter_element
            stored += columns * piece.num_rows * rank * slice_element + width * rank * _SUM
            numbers = 6 + self._order_numbers(piece)
            table += columns * (self._rank_tiles() * 2 + num_tiles * numbers)
        return _requests(loaded, stored, table)

    def down_gradient(self) -> ByteCount:
        """Return the bytes of partial dA."""
        width, tiles = self.in_features, self.rows.tiles
        loaded = stored = table = 0
        columns = ceil_div(width, tiles.down_columns)
        for piece, rank, num_tiles in self._walk(self.rows.pieces):
            loaded += num_tiles * piece.num_rows * width * self.element
            loaded += columns * piece.num_rows * rank * self.adapter_element
            stored += width * rank * _SUM
            numbers = 5 + 2 * self.has_dropout + self._order_numbers(piece)
            table += columns * (self._rank_tiles() * 2 + num_tiles * numbers)
        return _requests(loaded, stored, table)

    def add_slices(self) -> ByteCount:
        """Return the bytes of the sum dS over the columns' tiles."""
        length = self.rows.num_elements
        slices = ceil_div(self.out_features, self.rows.tiles.up_columns)
        return _requests(length * slices * _SUM, length * self.adapter_element, 0)

    def add_pieces(self, width: int) -> ByteCount:
        """Return the bytes of the sums dA, where `width` is K, or dB, where it is N."""
        rows, block = self.rows, self.rows.tiles.added
        programs = ceil_div(rows.max_rank * width, block)
        loaded = rows.num_partial_ranks * width * _SUM
        stored = sum(rows.ranks) * width * self.adapter_element
        table = len(rows.ranks) * programs
        for adapter, rank in enumerate(rows.ranks):
            parts = range(*rows.adapter_parts[adapter : adapter + 2])
            pieces = rows.part_pieces[parts.stop] - rows.part_pieces[parts.start]
            table += ceil_div(rank * width, block) * (3 + 2 * len(parts) + pieces)
        return _requests(loaded, stored, table)

    def _walk(self, entries: tuple[Entry, ...]) -> Iterator[tuple[Entry, int, int]]:
        """Yield each entry with its rank, and the tiles of ranks that have columns of it."""
        for entry in entries:
            rank = (*self.rows.ranks, 0)[entry.adapter]
            yield entry, rank, ceil_div(rank, self.rows.tiles.rank)

    def _rank_tiles(self) -> int:
        return ceil_div(self.rows.max_rank, self.rows.tiles.rank)

    def _order_numbers(self, entry: Entry) -> int:
        return 0 if self.rows.order is None else entry.num_rows


def _requests(loaded_bytes: int, stored_bytes: int, numbers: int, tile_bytes: int = 0) -> ByteCount:
    table_bytes = numbers * _NUMBER + tile_bytes
    return ByteCount(
        loaded_bytes=loaded_bytes + table_bytes,
        stored_bytes=stored_bytes,
        table_bytes=table_bytes,
        num_launches=int(loaded_bytes + stored_bytes + numbers > 0),  # none on an empty grid
    )
