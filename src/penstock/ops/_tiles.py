"""Tiles of rows that sums are made of: they follow from the shape alone, and so do all bits."""

from __future__ import annotations

_LEAST_ROWS, _MOST_TILES = 64, 256


def choose_tile_rows(num_rows: int, least_rows: int = _LEAST_ROWS) -> int:
    """Return the rows of a tile: of the shape alone, and no more tiles than there is room for.

    Args:
        num_rows: Rows of all tiles.
        least_rows: Rows beside which the sums of a tile take little memory.
    """
    return max(_LEAST_ROWS, least_rows, -(-num_rows // _MOST_TILES))
