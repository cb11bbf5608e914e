"""Tile orders: each tile once, and the bytes of known grids through a cache."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.iomodel import TiledProduct, TileOrder, choose_order, simulate_order, tile_order
from penstock.iomodel._tile_order import ORDERS

COUNTS = st.integers(1, 40)


@given(rows=COUNTS, columns=COUNTS, group=st.integers(1, 9), chiplets=st.integers(1, 9))
def test_every_order_has_each_tile_once(rows, columns, group, chiplets):
    tiles = set(itertools.product(range(rows), range(columns)))
    for name in ORDERS:
        order = TileOrder(name=name, group=group, num_chiplets=chiplets)
        found = tile_order(rows, columns, order)
        assert len(found) == len(tiles) and set(map(tuple, found.tolist())) == tiles


def test_orders_of_a_small_grid():
    assert tile_order(2, 2, "row").tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert tile_order(4, 4, "morton")[:5].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2]]
    grouped = tile_order(3, 2, TileOrder(name="grouped", group=2))
    assert grouped.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]
    chiplet = tile_order(2, 4, TileOrder(name="chiplet", group=1, num_chiplets=2))
    assert chiplet[::2].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]  # chiplet 0 has the first row


def test_bytes_of_a_wave_at_a_time():
    """Without room for more than a wave's step, each wave reads its rows and columns."""
    product = TiledProduct(
        rows=4, columns=4, inner=2, tile_rows=1, tile_columns=1, tile_inner=1,
        element_bytes=1, cache_bytes=4, num_programs=4,
    )  # fmt: skip
    assert simulate_order(product, TileOrder(name="row", group=1)) == 4 * (1 + 4) * 2
    assert simulate_order(product, TileOrder(name="grouped", group=2)) == 4 * (2 + 2) * 2
    warm = TiledProduct(**{**vars(product), "cache_bytes": 8})  # two waves share their rows
    assert simulate_order(warm, TileOrder(name="grouped", group=2)) == 3 * (2 + 2) * 2
    fits = TiledProduct(**{**vars(product), "cache_bytes": 16})
    assert simulate_order(fits, "row") == (4 + 4) * 2


def test_the_planner_takes_the_order_with_the_fewest_bytes():
    product = TiledProduct(rows=8192, columns=8192, inner=4096, cache_bytes=2**23)
    order, num_bytes = choose_order(product)
    assert order.name == "grouped" or order.name == "morton"
    others = [simulate_order(product, name) for name in ORDERS[:3]]
    assert num_bytes <= min(others) and num_bytes < simulate_order(product, "row")


def test_chiplets_want_their_own_parts():
    product = TiledProduct(
        rows=8192, columns=4224, inner=1024, num_programs=256, num_chiplets=8, cache_bytes=2**20
    )
    order, num_bytes = choose_order(product)
    assert order.name == "chiplet"
    assert num_bytes < 0.5 * simulate_order(product, TileOrder(name="grouped", group=8))


def test_wrong_orders_are_named():
    with pytest.raises(ValueError, match="order is 'spiral'"):
        tile_order(2, 2, "spiral")
    with pytest.raises(ValueError, match="group is 0"):
        TileOrder(group=0)
    with pytest.raises(ValueError, match="rows is 0"):
        tile_order(0, 2)
    assert tile_order(1, 1, "morton").dtype == np.int64


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_segment_products_need_no_order(width):
    """The weights of a type fit beside a wave, so rows come once where columns are next to them.

    Tiles are those of `segment_gemm` in float32, whose programs go through the columns first.
    """
    product = TiledProduct(
        rows=64 * 200, columns=width, inner=width, tile_rows=64, tile_columns=64, tile_inner=32,
        element_bytes=4,
    )  # fmt: skip
    compulsory = 4 * width * (product.rows + width)
    assert simulate_order(product, "row") == choose_order(product)[1] == compulsory
