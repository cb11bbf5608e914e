"""Products of matrices: the bytes of the best schedule with one operand stationary.

A tile of C stays while a column of A and a row of B pass by, or a tile of A or B stays, and C is
loaded and stored again: whichever moves the fewest bytes over all tile sizes.
"""

from __future__ import annotations

from penstock.codegen import ceil_div
from penstock.iomodel._bounds import PRODUCT_BOUND, product_bound
from penstock.iomodel._levels import (
    FastMemory,
    IOModel,
    TiledSchedule,
    check_counts,
    model_levels,
    tile_lengths,
)

LEAST_ELEMENTS = 3  # one of each matrix


def matmul(
    rows: int, columns: int, inner: int, fast_memory: FastMemory, *, element_bytes: int = 4
) -> IOModel:
    """Model C = A B with A (rows, inner), B (inner, columns): bytes, tiles, and the lower bound.

    Example:
        >>> model = matmul(1024, 1024, 1024, "32KiB")
        >>> model.regime, dict(model.tiles), round(model.ratio, 2)
        ('result stationary', {'rows': 114, 'columns': 69}, 1.11)

    Args:
        rows: m, rows of A and C.
        columns: n, columns of B and C.
        inner: k, what is summed over.
        fast_memory: Bytes of the fast memory, or a machine: a size for each level.
        element_bytes: Bytes of an element.

    Returns:
        The bytes by level, in the two-level model: what the fast memory loads and stores.

    Raises:
        TypeError: A length is no integer, or `fast_memory` is no size.
        ValueError: A length is below 1, or the fast memory holds less than 3 elements.

    The bound is that of Smith, Lowery, Langou and van de Geijn (arXiv:1702.02017).
    """
    check_counts(rows=rows, columns=columns, inner=inner)
    compulsory = rows * inner + inner * columns + rows * columns

    def bound(elements: int) -> int:
        return max(compulsory, product_bound(rows * columns * inner, elements))

    def choose(elements: int) -> TiledSchedule:
        return choose_product(rows, columns, inner, elements)

    levels = model_levels(fast_memory, element_bytes, choose, bound, LEAST_ELEMENTS)
    return IOModel(f"matmul {rows} x {columns} x {inner}", levels, PRODUCT_BOUND)


def choose_product(rows: int, columns: int, inner: int, elements: int) -> TiledSchedule:
    """Return the schedule of a product that moves the fewest elements.

    With a tile of a x b of the stationary matrix, one column and one row of a and b elements of the
    others are at hand: a b + a + b <= M. They pass by ceil(./b) and ceil(./a) times.
    """
    best: TiledSchedule | None = None
    result = rows * columns
    for tile_rows, tile_columns in _tile_pairs(rows, columns, elements):
        loaded = inner * (
            rows * ceil_div(columns, tile_columns) + columns * ceil_div(rows, tile_rows)
        )
        best = _less(
            best, "result stationary", {"rows": tile_rows, "columns": tile_columns}, loaded, result
        )
    for regime, names, height, width, other in (
        ("left stationary", ("rows", "inner"), rows, inner, columns),
        ("right stationary", ("columns", "inner"), columns, inner, rows),
    ):
        for tile_height, tile_width in _tile_pairs(height, width, elements):
            sweeps = ceil_div(width, tile_width)  # in each C is stored, and loaded but in the first
            loaded = height * width + width * other * ceil_div(height, tile_height)
            loaded += result * (sweeps - 1)
            tiles = dict(zip(names, (tile_height, tile_width), strict=True))
            best = _less(best, regime, tiles, loaded, result * sweeps)
    assert best is not None, "three elements hold a tile of one"
    return best


def _tile_pairs(height: int, width: int, elements: int) -> list[tuple[int, int]]:
    """Return the largest tiles a x b with a b + a + b <= M, one for each number of tiles down."""
    pairs = []
    for tall in tile_lengths(height):
        wide = min(width, (elements - tall) // (tall + 1))
        if wide >= 1:
            pairs.append((tall, ceil_div(width, ceil_div(width, wide))))
    return pairs


def _less(
    best: TiledSchedule | None, regime: str, tiles: dict[str, int], loaded: int, stored: int
) -> TiledSchedule:
    if best is not None and best.moved <= loaded + stored:
        return best
    return TiledSchedule(regime=regime, tiles=tiles, loaded=loaded, stored=stored)
