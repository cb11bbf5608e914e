"""Operands and shapes of a deformable convolution, which all of its implementations share."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from penstock.ops._operands import sum_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeformGeometry:
    """Numbers of a call; those of two dimensions are of y and of x.

    Attributes:
        stride: Pixels of the input between two of the output.
        padding: Pixels of 0 around the input.
        dilation: Pixels between two taps.
        reach: Pixels that no offset is beyond, in either direction; None where there is no bound.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    reach: int | None = None

    @classmethod
    def of(cls, numbers: list[int]) -> DeformGeometry:
        """Return the geometry of its numbers."""
        sy, sx, py, px, dy, dx, reach = numbers
        return cls(
            stride=(sy, sx),
            padding=(py, px),
            dilation=(dy, dx),
            reach=None if reach < 0 else reach,
        )

    @property
    def numbers(self) -> list[int]:
        """The numbers as operators take them, -1 for no reach."""
        reach = -1 if self.reach is None else self.reach
        return [*self.stride, *self.padding, *self.dilation, reach]

    def out_size(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        """Return height and width of the output."""
        height, width = (
            (
                x.shape[2 + i]
                + 2 * self.padding[i]
                - self.dilation[i] * (weight.shape[2 + i] - 1)
                - 1
            )
            // self.stride[i]
            + 1
            for i in range(2)
        )
        return height, width


class DeformInputs(NamedTuple):
    """Operands of a convolution, and its geometry.

    Attributes:
        x: `(B, C, H, W)`.
        offset: `(B, 2 G kh kw, Ho, Wo)`, of the dtype of sums.
        weight: `(O, C / groups, kh, kw)`, of the dtype of x.
        bias: `(O,)`, of the dtype of x, or None.
        mask: `(B, G kh kw, Ho, Wo)`, of the dtype of sums, or None.
        geometry: Stride, padding and dilation.
    """

    x: Tensor
    offset: Tensor
    weight: Tensor
    bias: Tensor | None
    mask: Tensor | None
    geometry: DeformGeometry

    def in_sums(self) -> DeformInputs:
        """Return them with offsets and mask of the dtype of sums."""
        dtype = sum_dtype(self.x.dtype)
        mask = None if self.mask is None else self.mask.to(dtype)
        return self._replace(offset=self.offset.to(dtype), mask=mask)

    def new_output(self) -> Tensor:
        """Return an output without its numbers, `(B, O, Ho, Wo)`, of the dtype of x."""
        size = self.geometry.out_size(self.x, self.weight)
        return self.x.new_empty(self.x.shape[0], self.weight.shape[0], *size)


def count_taps(weight: Tensor) -> int:
    """Return the elements of a kernel's area."""
    return weight.shape[2] * weight.shape[3]


def count_offset_groups(offset: Tensor, weight: Tensor) -> int:
    """Return the groups of channels that have offsets of their own."""
    return offset.shape[1] // (2 * count_taps(weight))
