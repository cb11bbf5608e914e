"""Views of pieces: a rank's part of a view has the elements that the view has there, or is none."""

from __future__ import annotations

import itertools

import pytest

from penstock.graph.step_graph import TensorView
from penstock.partitioner._pieces import StoragePiece, dense_strides, view_piece

CUTS = (1, 2, 4, 8, 32)
EXTENTS = (2, 2, 2, 4)
NUM_ELEMENTS = 32


def find_elements(view: TensorView) -> list[int]:
    places = itertools.product(*map(range, view.shape))
    return [
        view.offset + sum(i * s for i, s in zip(place, view.stride, strict=True))
        for place in places
    ]


def make_piece(lows: tuple[int, ...], highs: tuple[int, ...], offset: int) -> StoragePiece:
    extents = tuple(high - low for low, high in zip(lows, highs, strict=True))
    return StoragePiece(0, "float32", (-1,), lows, extents, dense_strides(extents), offset)


def elements_of_piece(piece: StoragePiece) -> dict[int, int]:
    """The element of the storage at each place of a piece's memory."""
    found = {}
    for place in itertools.product(*map(range, piece.extents)):
        at = piece.offset + sum(i * s for i, s in zip(place, piece.strides, strict=True))
        found[at] = sum(
            (i + low) * cut for i, low, cut in zip(place, piece.lows, CUTS[:-1], strict=True)
        )
    return found


RANGES = {
    "whole": ((0, 0, 0, 0), EXTENTS),
    "rows": ((0, 0, 0, 1), (2, 2, 2, 3)),
    "columns": ((0, 0, 1, 0), EXTENTS),
    "every other": ((1, 0, 0, 0), EXTENTS),
    "middle": ((0, 1, 0, 2), (2, 2, 2, 4)),
}


@pytest.mark.parametrize("name", RANGES)
def test_slices_of_a_piece_are_those_of_the_storage(name: str):
    piece = make_piece(*RANGES[name], offset=3)
    elements, num_found = elements_of_piece(piece), 0
    for first, rows, low, columns, step in itertools.product(
        range(4), range(1, 5), range(8), range(1, 9), (1, 2, 3)
    ):
        offset = 8 * first + low
        view = TensorView(0, "float32", (rows, columns), (8, step), offset)
        if view.end > NUM_ELEMENTS:
            continue
        found = view_piece(view, CUTS, piece, view.shape)
        if found is not None:
            num_found += 1
            assert [elements.get(at) for at in find_elements(found)] == find_elements(view)
    assert num_found > 0


def test_pieces_of_ranks_have_views_of_their_rows():
    extents = (2, 2, 2, 2)  # two ranks have two rows each
    piece = StoragePiece(0, "float32", (3,), (0,) * 4, extents, dense_strides(extents))
    view = TensorView(0, "float32", (4, 8), (8, 1))
    assert view_piece(view, CUTS, piece, (2, 8)) == view._replace(shape=(2, 8))
    columns = view_piece(view._replace(shape=(4, 4), offset=2), CUTS, piece, (2, 4))
    assert columns == TensorView(0, "float32", (2, 4), (8, 1), 2)
    for rows, offset in ((2, 8), (3, 0), (2, 24)):  # indices of the whole are not a rank's
        part = view._replace(shape=(rows, 8), offset=offset)
        assert view_piece(part, CUTS, piece, (2, 8)) is None


def test_a_broadcast_dimension_of_a_whole_storage_may_be_split():
    whole = make_piece((0, 0, 0, 0), EXTENTS, 0)
    view = TensorView(0, "float32", (32, 6), (1, 0))
    assert view_piece(view, CUTS, whole, (32, 3)) == view._replace(shape=(32, 3))
