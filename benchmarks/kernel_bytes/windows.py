"""Bytes that the kernels ask of memory, as formulas of shapes.

With E bytes of an element, and R places of windows' rows and columns that are of the image and not
of padding (a product of one number for rows and one for columns):

    unfold_rows           loads N C (places of rows) (columns of a strip inside) E; stores strips
    sum_windows           loads N C R E; stores dx
    multiply              of each instance: weights once for each block of samples, and for each
                          sample, output and input channel R E of x; stores y
    differentiate_input   weights at R for each block of samples; dy as x above; stores dx
    differentiate_weight  for each sample, output and input channel, R E of x, and Fh Fw Ho Wo E of
                          dy; stores dweight
"""

from __future__ import annotations

import dataclasses

import torch

from penstock.codegen import ByteCount
from penstock.ops.windows._filters import Filters
from penstock.ops.windows._geometry import Windows
from penstock.ops.windows._launch import SAMPLES


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowBytes:
    """Bytes of each kernel of windows of images.

    Attributes:
        shape: Of the images, `(N, C, H, W)`.
        windows: The windows.
        element: Bytes of an element.
    """

    shape: torch.Size
    windows: Windows
    element: int

    def unfold(self) -> ByteCount:
        """Return the bytes of `unfold_windows`."""
        out, span = self._out, self.windows.span(self._out[1])
        first = min(self.windows.padding[1], span)
        num_columns = max(0, min(self.windows.padding[1] + self.shape[3], span) - first)
        rows = self._count_inside(0, self.shape[2], out[0])
        strips = out[0] * span * self.windows.kernel[0]
        return self._count(self._planes * rows * num_columns, self._planes * strips)

    def fold(self) -> ByteCount:
        """Return the bytes of its backward pass."""
        return self._count(self._planes * self._inside, self.shape.numel())

    def multiply(self, of: Filters) -> ByteCount:
        """Return the bytes of filters, forward."""
        pairs, places = of.instances * of.channels * of.outs, self._out[0] * self._out[1]
        of_weights = pairs * self.windows.kernel[0] * self.windows.kernel[1] * places
        loaded = of_weights * -(-of.batch // SAMPLES) + pairs * of.batch * self._inside
        return self._count(loaded, of.instances * of.batch * of.outs * places)

    def differentiate_input(self, of: Filters) -> ByteCount:
        """Return the bytes of the gradient of images."""
        pairs = of.instances * of.channels * of.outs
        loaded = pairs * self._inside * (-(-of.batch // SAMPLES) + of.batch)
        return self._count(loaded, self.shape.numel())

    def differentiate_weight(self, of: Filters) -> ByteCount:
        """Return the bytes of the gradient of weights."""
        pairs, places = of.instances * of.channels * of.outs, self._out[0] * self._out[1]
        of_weights = pairs * self.windows.kernel[0] * self.windows.kernel[1] * places
        return self._count(of.batch * (of_weights + pairs * self._inside), of_weights)

    def _count(self, loaded: int, stored: int) -> ByteCount:
        return ByteCount(
            loaded_bytes=loaded * self.element,
            stored_bytes=stored * self.element,
            num_launches=int(stored > 0),
        )

    @property
    def _planes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def _out(self) -> tuple[int, int]:
        return self.windows.count_windows(self.shape[2], self.shape[3])

    @property
    def _inside(self) -> int:
        """Places of all windows that are of the image."""
        rows, columns = (
            self._count_inside(axis, self.shape[2 + axis], self._out[axis]) for axis in range(2)
        )
        return rows * columns

    def _count_inside(self, axis: int, length: int, num_windows: int) -> int:
        """Return the places of all windows along an axis that are of the image, not of padding."""
        stride, padding, dilation = (pair[axis] for pair in self.windows[1:])
        return sum(
            0 <= i * stride + f * dilation - padding < length
            for i in range(num_windows)
            for f in range(self.windows.kernel[axis])
        )
