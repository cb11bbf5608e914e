"""Geometry of windows: kernel, stride, padding and dilation, and the places that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.ops._operands import read_integers

Pair = int | tuple[int, int]
"""A number for both dimensions, or one for height and one for width."""


class Windows(NamedTuple):
    """Windows of images, each number for height and for width.

    Attributes:
        kernel: Rows and columns of a window.
        stride: Distance of neighbouring windows.
        padding: Zeros on each side.
        dilation: Distance of neighbouring elements of a window.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Windows:
        """Return windows from the arguments of a call.

        Raises:
            TypeError: One is no int and no pair of them.
            ValueError: One is too small.
        """
        given = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        return cls(
            *(read_pair(name, value, int(name != "padding")) for name, value in given.items())
        )

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Windows:
        """Return windows from `numbers`."""
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return cls(*pairs)

    @property
    def numbers(self) -> list[int]:
        """All numbers, as operators take them."""
        return [number for pair in self for number in pair]

    def count_windows(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of windows in an image of this size.

        Raises:
            ValueError: The image is too small for one.
        """
        found = [self._count(axis, length) for axis, length in enumerate((height, width))]
        if min(found) < 1:
            raise ValueError(
                f"x has images of {height} x {width}, in which no window fits: kernel "
                f"{self.kernel}, padding {self.padding} and dilation {self.dilation} give "
                f"{found[0]} x {found[1]} windows; enlarge the padding"
            )
        return found[0], found[1]

    def _count(self, axis: int, length: int) -> int:
        reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (length + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def span(self, out_width: int) -> int:
        """Return the columns from the first one of the first window to the last of the last one."""
        return (out_width - 1) * self.stride[1] + (self.kernel[1] - 1) * self.dilation[1] + 1

    def strides_of(self, channels: int, out: tuple[int, int]) -> tuple[int, ...]:
        """Return the strides, of elements, of windows `(N, C, Ho, Wo, Fh, Fw)` in their strips."""
        rows = self.kernel[0]
        strip = self.span(out[1]) * rows
        of_windows = (self.stride[1] * rows, 1, self.dilation[1] * rows)
        return channels * out[0] * strip, out[0] * strip, strip, *of_windows


def read_pair(name: str, value: Pair, least: int) -> tuple[int, int]:
    """Return the numbers of height and width.

    Raises:
        TypeError: It is no whole number and no pair of them.
        ValueError: One is too small.
    """
    pair = read_integers(name, value)
    if len(pair) != 2:
        raise TypeError(f"{name} is {value!r}, but must be an int or a pair of them")
    if min(pair) < least:
        raise ValueError(f"{name} is {value!r}, but must be at least {least}")
    return pair[0], pair[1]
