"""Sizes and strides of filters that depend on the position: one form for both functions.

    y[b][o][i][j] = sum_cfk weight[o][c][f][k][i][j] x[b][c][row(i, f)][column(j, k)]

for each of some instances: the groups of channels of `local_conv2d`, or the samples and groups of
`dynamic_filter2d`, where the channels of a group are its batch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters:
    """Sizes and strides, of elements, of a call on contiguous images and outputs.

    Attributes:
        instances: Products with weights of their own.
        batch: Samples of each.
        channels: Input channels of each.
        outs: Output channels of each.
        x: Strides of images by instance, sample and channel.
        y: Strides of outputs by instance, sample and channel.
        weight: Strides of weights by instance, output channel, input channel, row and column of the
            kernel, and row of the output.
    """

    instances: int
    batch: int
    channels: int
    outs: int
    x: tuple[int, int, int]
    y: tuple[int, int, int]
    weight: tuple[int, int, int, int, int, int]

    @classmethod
    def of(cls, shape: torch.Size, weight: Tensor, groups: int) -> Filters:
        """Return the sizes of a call.

        Args:
            shape: Of x, `(N, C, H, W)`.
            weight: As `can_multiply` has it.
            groups: Groups of channels; 0 where each sample has weights of its own.
        """
        pixels, places = shape[2] * shape[3], weight.shape[4] * weight.shape[5]
        first, second, row, column, line, _ = weight.stride()
        if groups == 0:
            batch = shape[1] // weight.shape[1]
            return cls(
                instances=shape[0] * weight.shape[1],
                batch=batch,
                channels=1,
                outs=1,
                x=(batch * pixels, pixels, 0),
                y=(batch * places, places, 0),
                weight=(second, 0, 0, row, column, line),
            )
        channels, outs = weight.shape[1], weight.shape[0] // groups
        return cls(
            instances=groups,
            batch=shape[0],
            channels=channels,
            outs=outs,
            x=(channels * pixels, shape[1] * pixels, pixels),
            y=(outs * places, weight.shape[0] * places, places),
            weight=(outs * first, first, second, row, column, line),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Instances, batch, input channels and output channels."""
        return self.instances, self.batch, self.channels, self.outs


def can_multiply(weight: Tensor, groups: int) -> bool:
    """Return whether weights lie as kernels read them: along the columns of the output."""
    has_lines = weight.shape[5] == 1 or weight.stride(5) == 1
    is_one = groups > 0 or weight.shape[0] <= 1
    return has_lines and (is_one or weight.stride(0) == weight.shape[1] * weight.stride(1))


def read_weight(weight: Tensor, groups: int) -> Tensor:
    """Return weights as kernels read them, copied where they lie otherwise."""
    return weight if can_multiply(weight, groups) else weight.contiguous()
