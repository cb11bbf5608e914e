"""Pieces: the part of a storage that a rank has in its memory, and views of it.

The axes of a storage are dimensions, the outermost last. An axis that levels of the mesh split has
a digit for each of these levels, the outermost first, and a rank has the indices with its own
coordinates there:

    index = sum of digit_l * block_l + rest,    block_l = extent / (k_1 ... k_l)

So a change of placement is a change of digits: gathering makes one whole that was fixed, a cut
fixes one that was whole.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import NamedTuple

from penstock.graph.step_graph import TensorView
from penstock.partitioner._mesh import Placement, joint_levels


class Digit(NamedTuple):
    """A digit of an axis.

    Attributes:
        axis: The axis.
        level: The level that may split it; -1: none, the rest of the index.
        size: Its number of values.
    """

    axis: int
    level: int
    size: int


class StoragePiece(NamedTuple):
    """The part of a storage that a rank has.

    Attributes:
        value: The rank's value that holds it.
        dtype: Name of the dtype.
        placement: At each level.
        lows: For each axis the first index that is there, where the axis is not split.
        extents: For each axis the number of indices that are there.
        strides: Of the axes, in elements.
        offset: Of its first element.
    """

    value: int
    dtype: str
    placement: Placement
    lows: tuple[int, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def num_elements(self) -> int:
        """Elements that are there."""
        return prod(self.extents)

    @property
    def is_in_order(self) -> bool:
        """True if axes lie in memory in their order, the first densely."""
        strides = [
            stride for size, stride in zip(self.extents, self.strides, strict=True) if size > 1
        ]
        first = self.extents and self.extents[0] > 1
        return strides == sorted(strides) and (not first or strides[0] == 1)


def local_extents(
    extents: tuple[int, ...], placement: Placement, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the extents of a rank's piece."""
    return tuple(
        extent // prod(size for at, size in zip(placement, sizes, strict=True) if at == axis)
        for axis, extent in enumerate(extents)
    )


def dense_strides(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of axes that lie densely, the first innermost."""
    return (1, *accumulate(extents, mul))[: len(extents)]


def split_into_digits(
    extents: tuple[int, ...], placements: tuple[Placement, ...], sizes: tuple[int, ...]
) -> tuple[Digit, ...] | None:
    """Return the digits of all axes, the outermost axis first, that some placements have in common.

    None: two of them number the pieces of an axis in different ways.
    """
    found: list[Digit] = []
    for axis in reversed(range(len(extents))):
        used = [{i for i, at in enumerate(each) if at == axis} for each in placements]
        together = set().union(*used)
        joint = joint_levels(extents[axis], sizes)
        if together <= joint:
            levels = sorted(joint)
        elif all(each == together for each in used if each):
            levels = sorted(together)
        else:
            return None
        found += [Digit(axis, level, sizes[level]) for level in levels]
        found.append(Digit(axis, -1, extents[axis] // prod(sizes[level] for level in levels)))
    return tuple(found)


def view_digits(piece: StoragePiece, digits: tuple[Digit, ...]) -> TensorView:
    """Return a piece as a view with a dimension for each digit."""
    shape: list[int] = []
    for digit in digits:
        fixed = digit.level >= 0 and piece.placement[digit.level] == digit.axis
        shape.append(1 if fixed else digit.size)
    stride = [0] * len(digits)
    for axis, unit in enumerate(piece.strides):
        for dim in reversed([i for i, each in enumerate(digits) if each.axis == axis]):
            stride[dim] = unit
            unit *= shape[dim]
    return TensorView(piece.value, piece.dtype, tuple(shape), tuple(stride), piece.offset)


def join_digits(
    view: TensorView, digits: tuple[Digit, ...], placement: Placement, num_axes: int
) -> StoragePiece | None:
    """Return the piece that a view by digits shows; None if an axis does not have one stride."""
    extents, strides = [], []
    for axis in range(num_axes):
        dims = [i for i, each in enumerate(digits) if each.axis == axis and view.shape[i] > 1]
        for outer, inner in pairwise(dims):
            if view.stride[outer] != view.stride[inner] * view.shape[inner]:
                return None
        extents.append(prod(view.shape[dim] for dim in dims))
        strides.append(view.stride[dims[-1]] if dims else 1)
    lows = (0,) * num_axes
    return StoragePiece(
        view.value, view.dtype, placement, lows, tuple(extents), tuple(strides), view.offset
    )


def is_dense(view: TensorView) -> bool:
    """Return whether a view lies in its memory as its shape says, without gaps."""
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def find_region(
    view: TensorView, cuts: tuple[int, ...], blocked: frozenset[int]
) -> tuple[tuple[int, int], ...]:
    """Return for each axis of a storage the indices that a view shows, from one to before another.

    An axis that is not shown index by index is taken whole.
    """
    extents = [high // low for low, high in pairwise(cuts)]
    region = [(0, extent) for extent in extents]
    for axis in blocked:
        low = view.offset // cuts[axis] % extents[axis]
        high = low + 1
        for size, stride in zip(view.shape, view.stride, strict=True):
            if size > 1 and cuts[axis] <= stride < cuts[axis + 1]:
                high += (size - 1) * (stride // cuts[axis])
        if high > extents[axis]:
            return tuple((0, extent) for extent in extents)
        region[axis] = low, high
    return tuple(region)


def view_piece(
    view: TensorView, cuts: tuple[int, ...], piece: StoragePiece, shape: tuple[int, ...]
) -> TensorView | None:
    """Return the part of a view that a piece has.

    Args:
        view: Of the whole storage.
        cuts: The storage's.
        piece: A part of it.
        shape: Of the part.

    Returns:
        The view; None if the piece does not lie in a way that has one.
    """
    extents = tuple(high // low for low, high in pairwise(cuts))
    if piece.extents == extents and piece.strides == dense_strides(extents):
        offset = piece.offset + view.offset
        whole = view._replace(value=piece.value, shape=shape, offset=offset)
        return whole if view.end <= cuts[-1] else None
    places = _indices_in_piece(view.offset, cuts, piece)
    if places is None:
        return None
    strides = []
    used: set[int] = set()
    for dim, size in enumerate(shape):
        found = _stride_in_piece(view, dim, size, cuts, piece, places)
        if found is None or used & {*found.axes}:  # windows that overlap are not by digits
            return None
        used.update(found.axes)
        strides.append(found.stride)
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1 and strides[dim]:  # as torch would write it
            after = dim + 1 < len(shape)
            strides[dim] = strides[dim + 1] * shape[dim + 1] if after else 1
    offset = piece.offset + sum(map(mul, places, piece.strides))
    return TensorView(piece.value, view.dtype, shape, tuple(strides), offset)


def _indices_in_piece(
    offset: int, cuts: tuple[int, ...], piece: StoragePiece
) -> tuple[int, ...] | None:
    """Return for each axis the index in a piece of an element; None if it is not there."""
    if offset >= cuts[-1]:
        return None
    found = []
    for axis, (low, high) in enumerate(pairwise(cuts)):
        index = offset // low % (high // low) - piece.lows[axis]
        found.append(index)
        # Ranks have different indices of an axis that is split: views of it begin at the first.
        if not 0 <= index < piece.extents[axis] or (index and axis in piece.placement):
            return None
    return tuple(found)


class _DimInPiece(NamedTuple):
    """A dimension of a view: its stride in a piece, and the axes over which it goes."""

    stride: int
    axes: range = range(0)


def _stride_in_piece(
    view: TensorView,
    dim: int,
    size: int,
    cuts: tuple[int, ...],
    piece: StoragePiece,
    places: tuple[int, ...],
) -> _DimInPiece | None:
    """Return the stride that a dimension of a view has in a piece; None if it has none.

    Args:
        view: Of the whole storage.
        dim: The dimension.
        size: Of the dimension in the piece.
        cuts: Of the storage.
        piece: A part of it.
        places: For each axis the index in the piece at which the view begins.
    """
    stride = view.stride[dim]
    if size <= 1 or stride == 0:
        return _DimInPiece(0 if stride == 0 else 1)
    lowest = axis = max(i for i, cut in enumerate(cuts[:-1]) if cut <= stride)
    factor, rest = divmod(stride, cuts[axis])
    if rest:
        return None
    whole_end = stride * view.shape[dim]
    # Indices that axes so far have; the last one that is shown; stride of the first, and after.
    covered, last, first, end = 1, (size - 1) * factor, 0, 0
    while axis < len(piece.extents) and (covered <= last or cuts[axis] < whole_end):
        extent, unit = piece.extents[axis], piece.strides[axis]
        if extent > 1:
            if end and unit != end:
                return None
            first, end = first or unit * factor, unit * extent
            last += places[axis] * covered
            covered *= extent
        axis += 1
    axes = range(lowest, axis)
    narrowed = {each for each in axes if _is_narrowed(each, cuts, piece)}
    if covered <= last or narrowed & {*axes[:-1]}:
        return None
    if any(each in piece.placement for each in axes):  # it has the indices of another rank too
        spans = factor == 1 and covered == size and cuts[axis] == whole_end
        if not spans or any(places[each] for each in axes):
            return None
    elif size != view.shape[dim]:
        return None
    return _DimInPiece(first, axes)


def _is_narrowed(axis: int, cuts: tuple[int, ...], piece: StoragePiece) -> bool:
    """Return whether a piece lacks indices of an axis that no level splits."""
    is_part = piece.extents[axis] < cuts[axis + 1] // cuts[axis]
    return is_part and axis not in piece.placement
