"""Orders of the tiles of a product, and the bytes that each moves through a cache that all share.

A GPU starts programs in the order of their numbers, some hundred at a time. Those that run together
read the same rows and columns of the operands through the last cache, so the order alone decides
what is read from memory again. On GPUs of several chiplets neighbours in number run on different
chiplets, each with a cache of its own, unless they are renumbered (HipKittens, arXiv:2511.08083,
section 3.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from penstock.codegen import ceil_div
from penstock.iomodel._access import AccessTrace, simulate_caches
from penstock.iomodel._levels import check_counts

OrderName = Literal["row", "grouped", "morton", "chiplet"]
ORDERS: tuple[OrderName, ...] = ("row", "grouped", "morton", "chiplet")
_GROUPS = (2, 4, 8, 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileOrder:
    """An order of tiles.

    Attributes:
        name: `"row"`: row after row. `"grouped"`: down through `group` rows, then to the next
            column. `"morton"`: along a Z-shaped curve. `"chiplet"`: each chiplet has a contiguous
            part of the grouped order, programs being dealt to chiplets one by one.
        group: Rows of a group; of `"grouped"` and `"chiplet"`.
        num_chiplets: Chiplets; of `"chiplet"`.
    """

    name: OrderName = "grouped"
    group: int = 8
    num_chiplets: int = 8

    def __post_init__(self) -> None:
        if self.name not in ORDERS:
            raise ValueError(f"order is {self.name!r}; pass one of {', '.join(ORDERS)}")
        check_counts(group=self.group, num_chiplets=self.num_chiplets)


def tile_order(rows: int, columns: int, order: OrderName | TileOrder = "grouped") -> np.ndarray:
    """Return the tile of each program of a grid, in the order in which programs start.

    Example:
        >>> tile_order(2, 3, TileOrder(name="grouped", group=2)).tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1], [0, 2], [1, 2]]

    Args:
        rows: Tiles down.
        columns: Tiles across.
        order: The order, or its name.

    Returns:
        Row and column of each program's tile, int64 of shape (rows * columns, 2); each once.

    Raises:
        ValueError: There is no order of this name, or a number is below 1.
    """
    check_counts(rows=rows, columns=columns)
    of = order if isinstance(order, TileOrder) else TileOrder(name=order)
    if of.name == "morton":
        return _order_along_curve(rows, columns)
    numbers = np.arange(rows * columns)
    if of.name == "chiplet":
        numbers = _deal_to_chiplets(numbers, of.num_chiplets)
    group = 1 if of.name == "row" else of.group
    # As in the kernels: `group` rows go through the columns together.
    band = numbers // (group * columns)
    height = np.minimum(rows - band * group, group)
    within = numbers % (group * columns)
    return np.stack([band * group + within % height, within // height], axis=1)


def _deal_to_chiplets(numbers: np.ndarray, num_chiplets: int) -> np.ndarray:
    """Return for each program the place in the order whose tile it computes.

    Program p runs on chiplet p % C; of the places each chiplet has a contiguous part, the first
    ones one place longer where they cannot be equal.
    """
    chiplet, turn = numbers % num_chiplets, numbers // num_chiplets
    whole, rest = divmod(len(numbers), num_chiplets)
    return chiplet * whole + np.minimum(chiplet, rest) + turn


def _order_along_curve(rows: int, columns: int) -> np.ndarray:
    """Return tiles by the number whose even and odd bits are their column and row (Morton 1966)."""
    row, column = (each.ravel() for each in np.indices((rows, columns)))
    key = np.zeros(rows * columns, np.int64)
    for bit in range(max(rows, columns).bit_length()):
        key |= ((column >> bit) & 1) << (2 * bit) | ((row >> bit) & 1) << (2 * bit + 1)
    at = np.argsort(key, kind="stable")
    return np.stack([row[at], column[at]], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledProduct:
    """A product of matrices in tiles, and the GPU that runs them.

    Attributes:
        rows: Rows of the result.
        columns: Columns of the result.
        inner: Elements that are summed over.
        tile_rows: Rows of a tile.
        tile_columns: Columns of a tile.
        tile_inner: Inner elements that a program takes at a time.
        element_bytes: Bytes of an element.
        cache_bytes: The cache; with chiplets, that of each.
        num_programs: Programs that run at a time, on all chiplets together.
        num_chiplets: Chiplets with a cache each; 1 where all programs share one.
    """

    rows: int
    columns: int
    inner: int
    tile_rows: int = 128
    tile_columns: int = 128
    tile_inner: int = 64
    element_bytes: int = 2
    cache_bytes: int = 50 * 2**20
    num_programs: int = 132
    num_chiplets: int = 1

    def __post_init__(self) -> None:
        check_counts(**dataclasses.asdict(self))

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across."""
        return ceil_div(self.rows, self.tile_rows), ceil_div(self.columns, self.tile_columns)


def simulate_order(product: TiledProduct, order: OrderName | TileOrder) -> int:
    """Return the bytes of the operands that an order reads from memory, behind the caches.

    Programs run in waves; those of a wave go through the inner elements in step, so what they read
    at a time is read together, once for each cache.

    Example:
        >>> product = TiledProduct(rows=8192, columns=8192, inner=8192, cache_bytes=2**23)
        >>> simulate_order(product, "grouped") < simulate_order(product, "row")
        True

    Args:
        product: The product.
        order: The order of its tiles, or its name.
    """
    tiles = tile_order(*product.grid, order)
    inner = ceil_div(product.inner, product.tile_inner)
    total = 0
    for chiplet in range(product.num_chiplets):
        trace = AccessTrace()
        own = tiles[chiplet :: product.num_chiplets]
        wave = max(1, product.num_programs // product.num_chiplets)
        for first in range(0, len(own), wave):
            _add_wave(trace, product, own[first : first + wave], inner)
        # A block of an operand is one line: all of them have about the same bytes.
        blocks = (product.tile_rows + product.tile_columns) // 2
        line_bytes = blocks * product.tile_inner * product.element_bytes
        capacity = max(1, product.cache_bytes // line_bytes)
        (missed,) = simulate_caches(trace, [capacity], line_bytes=1)
        total += missed.loaded_bytes * line_bytes
    return total


def _add_wave(trace: AccessTrace, product: TiledProduct, tiles: np.ndarray, inner: int) -> None:
    """Add the blocks that a wave of programs reads, step by step; a line is one block."""
    lefts, rights = (np.unique(tiles[:, axis]) for axis in (0, 1))
    steps = np.arange(inner)[:, None]
    first_right = product.grid[0] * inner
    left = lefts[None, :] * inner + steps
    right = first_right + rights[None, :] * inner + steps
    trace.read(0, np.concatenate([left, right], axis=1), 1)


def choose_order(
    product: TiledProduct, candidates: Sequence[TileOrder] | None = None
) -> tuple[TileOrder, int]:
    """Choose the order that reads the fewest bytes from memory; of equal ones the first.

    Example:
        >>> choose_order(TiledProduct(rows=256, columns=256, inner=256))[0].name
        'row'

    Args:
        product: The product.
        candidates: Orders; None: by rows, in groups of 2 to 16 rows, along the curve, and on
            chiplets those groups in parts.

    Returns:
        The order, and its bytes.
    """
    if candidates is None:
        candidates = [TileOrder(name="row", group=1)]
        candidates += [TileOrder(name="grouped", group=group) for group in _GROUPS]
        candidates.append(TileOrder(name="morton"))
        if product.num_chiplets > 1:
            chiplets = product.num_chiplets
            candidates += [
                TileOrder(name="chiplet", group=group, num_chiplets=chiplets) for group in _GROUPS
            ]
    found = [(simulate_order(product, order), number) for number, order in enumerate(candidates)]
    num_bytes, number = min(found)
    return candidates[number], num_bytes
