"""Shapes of a deformable convolution, which all of its implementations share."""

from __future__ import annotations

import dataclasses

from torch import Tensor


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


def count_taps(weight: Tensor) -> int:
    """Return the elements of a kernel's area."""
    return weight.shape[2] * weight.shape[3]


def count_offset_groups(offset: Tensor, weight: Tensor) -> int:
    """Return the groups of channels that have offsets of their own."""
    return offset.shape[1] // (2 * count_taps(weight))
