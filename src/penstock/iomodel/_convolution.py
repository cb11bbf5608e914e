"""Convolutions in two dimensions: direct with a tile of outputs, or as a product of matrices.

Direct, a tile of outputs stays while for each input channel its patch of inputs is loaded once and
the weights pass by; as a product, each window is read as a row of `kernel` x `in_channels`
elements, the padding included.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from penstock.codegen import ceil_div
from penstock.iomodel._bounds import CONVOLUTION_BOUND, product_bound
from penstock.iomodel._levels import (
    FastMemory,
    IOModel,
    TiledSchedule,
    check_counts,
    model_levels,
    tile_lengths,
)
from penstock.iomodel._matmul import LEAST_ELEMENTS, choose_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ImageAxis:
    """One spatial axis: outputs, inputs, and a window of taps."""

    inputs: int
    outputs: int
    taps: int
    stride: int
    padding: int

    def span(self, first: int, count: int) -> int:
        """Return how many inputs the windows of `count` outputs from `first` on span."""
        begin = first * self.stride - self.padding
        end = begin + (count - 1) * self.stride + self.taps
        return max(0, min(end, self.inputs) - max(begin, 0))

    def spans(self, tile: int) -> int:
        """Return the inputs that the tiles of outputs span, one after the other."""
        starts = range(0, self.outputs, tile)
        return sum(self.span(first, min(tile, self.outputs - first)) for first in starts)

    @property
    def used(self) -> int:
        """Inputs that some window covers."""
        covered = {
            first * self.stride - self.padding + tap
            for first in range(self.outputs)
            for tap in range(self.taps)
        }
        return sum(0 <= at < self.inputs for at in covered)

    @property
    def used_taps(self) -> int:
        """Taps that meet an input for some output, not padding alone."""
        begins = [first * self.stride - self.padding for first in range(self.outputs)]
        return sum(
            any(0 <= begin + tap < self.inputs for begin in begins) for tap in range(self.taps)
        )

    @property
    def pairs(self) -> int:
        """Pairs of an output and a tap that meet an input, not the padding."""
        return sum(self.span(first, 1) for first in range(self.outputs))


def convolution(
    batch: int,
    in_channels: int,
    out_channels: int,
    image: tuple[int, int],
    kernel: tuple[int, int],
    fast_memory: FastMemory,
    *,
    stride: int = 1,
    padding: int = 0,
    element_bytes: int = 4,
) -> IOModel:
    """Model a convolution in two dimensions: bytes, tiles, regime, and the lower bound.

    Example:
        >>> model = convolution(1, 64, 64, (56, 56), (3, 3), "32KiB", padding=1)
        >>> model.regime, model.ratio < 2
        ('direct', True)

    Args:
        batch: Images.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        image: Height and width of the input.
        kernel: Height and width of the window.
        fast_memory: Bytes of the fast memory, or a machine: a size for each level.
        stride: Of the window, along both axes.
        padding: Zeroes on each side, along both axes.
        element_bytes: Bytes of an element.

    Raises:
        TypeError: A length is no integer, `image` or `kernel` no pair, or `fast_memory` no size.
        ValueError: A length is below 1, no window fits into the image, or the fast memory holds
            less than 3 elements.
    """
    check_counts(batch=batch, in_channels=in_channels, out_channels=out_channels, stride=stride)
    for name, pair in (("image", image), ("kernel", kernel)):
        if not hasattr(pair, "__getitem__") or len(pair) != 2:
            raise TypeError(f"{name} is {pair!r}; pass its height and width, such as (3, 3)")
    axes = [_axis(name, image, kernel, stride, padding) for name in ("height", "width")]
    of = _Convolution(batch, in_channels, out_channels, *axes)
    levels = model_levels(fast_memory, element_bytes, of.choose, of.bound, LEAST_ELEMENTS)
    return IOModel(str(of), levels, CONVOLUTION_BOUND)


def _axis(
    name: str, image: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int
) -> _ImageAxis:
    inputs, taps = image[name == "width"], kernel[name == "width"]
    check_counts(**{f"image {name}": inputs, f"kernel {name}": taps})
    check_counts(least=0, padding=padding)
    outputs = (inputs + 2 * padding - taps) // stride + 1
    if padding >= taps or outputs < 1:
        raise ValueError(
            f"the {name} of the window is {taps} on {inputs} inputs with padding {padding}; pass a "
            "window that is larger than the padding and no larger than the padded image"
        )
    return _ImageAxis(inputs=inputs, outputs=outputs, taps=taps, stride=stride, padding=padding)


@dataclasses.dataclass(frozen=True)
class _Convolution:
    batch: int
    in_channels: int
    out_channels: int
    down: _ImageAxis
    across: _ImageAxis

    @property
    def weights(self) -> int:
        return self.in_channels * self.out_channels * self.down.taps * self.across.taps

    @property
    def outputs(self) -> int:
        return self.batch * self.out_channels * self.down.outputs * self.across.outputs

    def __str__(self) -> str:
        down, across = self.down, self.across
        return (
            f"convolution {self.batch} x {self.in_channels} x {down.inputs} x {across.inputs} to "
            f"{self.out_channels}, window {down.taps} x {across.taps}, stride {down.stride}"
        )

    def bound(self, elements: int) -> int:
        """Return the elements that move at least through so many."""
        down, across = self.down, self.across
        used = self.batch * self.in_channels * down.used * across.used
        pairs = self.batch * self.in_channels * self.out_channels * down.pairs * across.pairs
        reuse = ceil_div(down.taps, down.stride) * ceil_div(across.taps, across.stride)
        weights = self.in_channels * self.out_channels * down.used_taps * across.used_taps
        return max(used + weights + self.outputs, product_bound(pairs, elements, reuse))

    def choose(self, elements: int) -> TiledSchedule:
        """Return the schedule that moves the fewest elements through so many."""
        window = self.down.taps * self.across.taps
        rows = self.batch * self.down.outputs * self.across.outputs
        best = choose_product(rows, self.out_channels, self.in_channels * window, elements)
        best = dataclasses.replace(best, regime=f"product, {best.regime}")
        for each in self._direct(elements):
            best = each if each.moved < best.moved else best
        return best

    def _direct(self, elements: int) -> Iterator[TiledSchedule]:
        """Yield a schedule for each tile of images, rows and columns with its most channels.

        A tile holds images x rows x columns x channels outputs, a patch of one input channel for
        each image, and one weight.
        """
        of_down, of_across = (self._tiles(axis) for axis in (self.down, self.across))
        tiles_of_axes = itertools.product(tile_lengths(self.batch), of_down, of_across)
        for images, (height, tall, rows), (width, wide, columns) in tiles_of_axes:
            room = elements - tall * wide * images - 1
            channels = min(self.out_channels, room // (images * height * width))
            if channels < 1:
                continue
            sweeps = ceil_div(self.out_channels, channels)
            tiles = ceil_div(self.batch, images) * ceil_div(self.down.outputs, height)
            tiles *= ceil_div(self.across.outputs, width)
            inputs = self.batch * self.in_channels * rows * columns
            yield TiledSchedule(
                regime="direct",
                tiles={
                    "images": images,
                    "rows": height,
                    "columns": width,
                    "channels": ceil_div(self.out_channels, sweeps),
                },
                loaded=inputs * sweeps + tiles * self.weights,
                stored=self.outputs,
            )

    @staticmethod
    def _tiles(axis: _ImageAxis) -> list[tuple[int, int, int]]:
        """Return each length of a tile, with the inputs that one and that all of them span."""
        return [
            (tile, min(axis.inputs, (tile - 1) * axis.stride + axis.taps), axis.spans(tile))
            for tile in tile_lengths(axis.outputs)
        ]
