"""Order of the tiles of the base product: planned for the GPU's last cache, or given.

Orders in rows and groups are computed by the kernel; of others it reads a table.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from penstock.codegen import ceil_power
from penstock.iomodel import TiledProduct, TileOrder, choose_order, tile_order
from penstock.lora.triton._tiles import Tiles

_GROUPED = TileOrder(name="grouped", group=8)
_MOST_ROW_TILES = 64  # that a plan looks at: the rest repeats them
_MOST_TABLES = 256


class OrderedTiles(NamedTuple):
    """An order as the kernel takes it.

    Attributes:
        group: Blocks of rows that go through the columns together.
        table: By program its tile, int32: the block of rows times the columns' tiles, and the
            column; None where `group` says it all.
    """

    group: int
    table: torch.Tensor | None


def order_tiles(
    order: TileOrder | None,
    num_blocks: int,
    shape: tuple[int, int],
    tiles: Tiles,
    like: torch.Tensor,
) -> OrderedTiles:
    """Return the order of a base product's tiles.

    Args:
        order: The order; None: the one that reads the fewest bytes of the operands from memory, by
            `iomodel.choose_order`, on a GPU; groups of eight blocks elsewhere.
        num_blocks: Blocks of rows.
        shape: Columns of the result, and elements that are summed over.
        tiles: Tile sizes.
        like: A tensor on the device, of the operands' dtype.
    """
    width, inner = shape
    columns = -(-width // tiles.base_columns)
    if order is None:
        order = _GROUPED
        if like.is_cuda and num_blocks:
            rows = min(_MOST_ROW_TILES, ceil_power(num_blocks))
            order = _plan(rows, width, inner, tiles, like.element_size(), like.device)
    if order.name in ("row", "grouped") or not num_blocks:
        return OrderedTiles(1 if order.name == "row" else order.group, None)
    return OrderedTiles(1, _table(order, num_blocks, columns, like.device))


@functools.lru_cache(maxsize=_MOST_TABLES)
def _plan(
    num_blocks: int,
    width: int,
    inner: int,
    tiles: Tiles,
    element_bytes: int,
    device: torch.device,
) -> TileOrder:
    properties = torch.cuda.get_device_properties(device)
    product = TiledProduct(
        rows=num_blocks * tiles.base_rows,
        columns=width,
        inner=inner,
        tile_rows=tiles.base_rows,
        tile_columns=tiles.base_columns,
        tile_inner=tiles.base_inner,
        element_bytes=element_bytes,
        cache_bytes=properties.L2_cache_size,
        num_programs=properties.multi_processor_count,
    )
    return choose_order(product)[0]


@functools.lru_cache(maxsize=_MOST_TABLES)
def _table(order: TileOrder, num_blocks: int, columns: int, device: torch.device) -> torch.Tensor:
    tiles = tile_order(num_blocks, columns, order)
    return torch.from_numpy(tiles[:, 0] * columns + tiles[:, 1]).to(device, torch.int32)
