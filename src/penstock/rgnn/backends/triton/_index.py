"""Indices of the features of a row, as arithmetic on the axes of a block.

A kernel computes blocks of numbers. Instead of moving numbers about in a block, an operator that
reshapes, slices or concatenates asks its operand for other features: so what a value is read with
is an index for each axis of its row, and all of them come down to addresses of loads.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from penstock.codegen import ceil_power
from penstock.rgnn.ir import Shape


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Axis:
    """An axis of a block; axes of one block are sorted."""

    depth: int
    length: int
    """Indices below it mean something; a block is padded to a power of two."""
    name: str
    block: int | None
    """Length in a block; None where it is tiled, so that any index may occur."""


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """Quotient or remainder of an index."""

    of: Index
    divisor: int
    is_remainder: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """`offset` plus multiples of axes, quotients and remainders."""

    terms: tuple[tuple[Axis | Division, int], ...] = ()
    offset: int = 0

    def plus(self, offset: int) -> Index:
        """Return this index plus a number."""
        return Index(self.terms, self.offset + offset)

    def times(self, factor: int) -> Index:
        """Return a multiple of this index."""
        terms = tuple((base, factor * times) for base, times in self.terms)
        return Index(terms, factor * self.offset)

    def axes(self) -> frozenset[Axis]:
        """Return the axes that it depends on."""
        found: frozenset[Axis] = frozenset()
        for base, _ in self.terms:
            found |= {base} if isinstance(base, Axis) else base.of.axes()
        return found

    def as_axis(self) -> Axis | None:
        """Return the axis that it is, if it is nothing else."""
        if self.offset == 0 and len(self.terms) == 1 and self.terms[0][1] == 1:
            base = self.terms[0][0]
            return base if isinstance(base, Axis) else None
        return None

    def drop_division(self, bound: int) -> tuple[Index, int]:
        """Return an index and its bound without a division: `i // n < m` is `i < n * m`."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and not self.offset:
            base = self.terms[0][0]
            if isinstance(base, Division) and not base.is_remainder:
                return base.of.drop_division(bound * base.divisor)
        return self, bound

    def bounds(self, *, is_padded: bool = True) -> tuple[float, float]:
        """Return the least and the largest number that it can be in a block, or without padding."""
        low = high = float(self.offset)
        for base, times in self.terms:
            least, most = 0.0, math.inf
            if isinstance(base, Axis):
                length = base.block if is_padded else base.length
                most = math.inf if length is None else length - 1
            else:
                bounds = base.of.bounds(is_padded=is_padded)
                least, most = (bound / base.divisor for bound in bounds)
                if base.is_remainder:
                    least, most = (1 - base.divisor if least < 0 else 0), base.divisor - 1
            low, high = low + times * least, high + times * most
        return low, high

    def write(self, place: Callable[[Axis], str]) -> str:
        """Return the index as source; `place` gives the name of an axis in the block at hand."""
        parts = []
        for base, times in self.terms:
            if isinstance(base, Axis):
                text = place(base)
            else:
                sign = "%" if base.is_remainder else "//"
                text = f"({base.of.write(place)}) {sign} {base.divisor}"
                text = f"({text})" if times != 1 or len(self.terms) > 1 or self.offset else text
            parts.append(text if times == 1 else f"{text} * {times}")
        if self.offset or not parts:
            parts.append(str(self.offset))
        return " + ".join(parts).replace("+ -", "- ")


ZERO = Index()


def index_axis(axis: Axis) -> Index:
    """Return an axis as an index."""
    return Index(((axis, 1),))


def index_row(shape: Shape) -> tuple[Index, ...]:
    """Return the indices of all features of rows of a shape: an axis where there are several."""
    return tuple(
        ZERO if length == 1 else index_axis(make_feature_axis(depth, length))
        for depth, length in enumerate(shape)
    )


def make_feature_axis(depth: int, length: int) -> Axis:
    """Return the axis of a block for the feature axis `depth` of rows that have `length` there."""
    return Axis(depth, length, f"i{depth}_{length}", ceil_power(length))


def ravel(indices: Iterable[Index], shape: Shape) -> Index:
    """Return the place of a feature in a row that lies in memory."""
    terms: dict[Axis | Division, int] = {}
    offset, stride = 0, math.prod(shape)
    for index, length in zip(indices, shape, strict=True):
        stride //= length
        scaled = index.times(stride)
        offset += scaled.offset
        for base, times in scaled.terms:
            terms[base] = terms.get(base, 0) + times
    while _merge(terms):
        pass
    return Index(tuple(terms.items()), offset)


def _merge(terms: dict[Axis | Division, int]) -> bool:
    """Replace a quotient and its remainder by their dividend; return whether there were any."""
    for base, times in terms.items():
        if isinstance(base, Axis) or not base.is_remainder or base.of.offset:
            continue
        quotient = Division(base.of, base.divisor, False)
        if terms.get(quotient) == times * base.divisor:
            del terms[base], terms[quotient]
            for inner, factor in base.of.terms:
                terms[inner] = terms.get(inner, 0) + factor * times
            return True
    return False


def unravel(flat: Index, shape: Shape) -> tuple[Index, ...]:
    """Return the indices of a feature by its place: the inverse of `ravel`."""
    found: list[Index] = []
    num_left = sum(length != 1 for length in shape)
    for length in reversed(shape):
        if length == 1:
            found.append(ZERO)
            continue
        num_left -= 1
        if num_left:
            flat, remainder = _divide(flat, length)
            found.append(remainder)
        else:
            found.append(flat)
    return tuple(reversed(found))


def _divide(index: Index, divisor: int) -> tuple[Index, Index]:
    whole_part = tuple((base, n // divisor) for base, n in index.terms if n % divisor == 0)
    terms = tuple((base, n) for base, n in index.terms if n % divisor)
    rest = Index(terms, index.offset % divisor)
    low, high = rest.bounds(is_padded=False)
    if low >= 0 and high < divisor:
        return Index(whole_part, index.offset // divisor), rest
    quotient, remainder = (Division(index, divisor, is_remainder) for is_remainder in (False, True))
    return Index(((quotient, 1),)), Index(((remainder, 1),))


def refine_shapes(shapes: Iterable[Shape]) -> Shape | None:
    """Return the shape of fewest axes that rows of all shapes can be viewed as.

    Example:
        >>> refine_shapes([(1, 24), (4, 6), (8, 3)]), refine_shapes([(4, 6), (6, 4)])
        ((4, 2, 3), None)

    Args:
        shapes: Shapes of rows of one length.

    Returns:
        None where one has a bound between axes in the middle of what is an axis of any other.
    """
    strides = {math.prod(shape[axis:]) for shape in shapes for axis in range(len(shape) + 1)}
    lengths = []
    for inner, outer in itertools.pairwise(sorted(strides)):
        if outer % inner:
            return None
        lengths.append(outer // inner)
    return tuple(reversed(lengths))


def reshape_indices(indices: Sequence[Index], shape: Shape, of: Shape) -> tuple[Index, ...]:
    """Return the indices of the same feature in rows of shape `of`, of the same length.

    Axes that are alike keep their index; only what was split or merged is computed.
    """
    left = [(index, length) for index, length in zip(indices, shape, strict=True) if length != 1]
    right = [length for length in of if length != 1]
    found: list[Index] = []
    while left or right:
        mine, theirs = [left.pop()], [right.pop()]
        while (ours := math.prod(n for _, n in mine)) != (other := math.prod(theirs)):
            if ours < other:
                mine.insert(0, left.pop())
            else:
                theirs.insert(0, right.pop())
        flat = ravel((index for index, _ in mine), tuple(length for _, length in mine))
        found = [*unravel(flat, tuple(theirs)), *found]
    ends = iter(found)
    return tuple(ZERO if length == 1 else next(ends) for length in of)


def sort_axes(indices: Iterable[Index]) -> tuple[Axis, ...]:
    """Return the axes of a block that has all the indices."""
    return tuple(sorted(set(itertools.chain.from_iterable(index.axes() for index in indices))))
