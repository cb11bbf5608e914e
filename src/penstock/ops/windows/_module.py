"""The layer `LocalConv2d`: a convolution with filters of its own at each position."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from penstock.ops.windows._geometry import Pair, Windows, read_pair
from penstock.ops.windows._local import local_conv2d
from penstock.units import parse_count


class LocalConv2d(torch.nn.Module):
    """A locally connected layer: a convolution whose filters depend on the position.

    Weights have torch's shape, and lie in memory in the order in which windows pass: all of a row
    of positions together, each weight along the row. Gradients and optimizer states lie as they do.
    State dicts hold them contiguous.

    Example:
        >>> layer = LocalConv2d(16, 32, 3, image_size=20, padding=1)
        >>> layer(torch.randn(8, 16, 20, 20)).shape
        torch.Size([8, 32, 20, 20])
        >>> layer.state_dict()["weight"].shape
        torch.Size([32, 16, 3, 3, 20, 20])

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Rows and columns of a filter, or one number for both, as of all others.
        image_size: Rows and columns of the input.
        stride: Distance of neighbouring windows.
        padding: Zeros on each side.
        dilation: Distance of neighbouring elements of a window.
        groups: Groups of channels, each of which is filtered on its own.
        bias: Whether there is a bias, `(out_channels, Ho, Wo)`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: A number is no int, or a size no int or pair.
        ValueError: A number is too small, no window fits, or groups do not divide channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        image_size: Pair,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        in_channels = parse_count(in_channels, name="in_channels")
        out_channels = parse_count(out_channels, name="out_channels")
        groups = parse_count(groups, name="groups", least=1)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups is {groups}, but must divide in_channels {in_channels} and out_channels "
                f"{out_channels}"
            )
        kernel_size = read_pair("kernel_size", kernel_size, 1)
        self.windows = Windows.of(kernel_size, stride, padding, dilation)
        size = read_pair("image_size", image_size, 0)
        out, self.groups = self.windows.count_windows(*size), groups
        # As it lies: row of positions, output and input channel, kernel, position in the row.
        lies = (out[0], out_channels, in_channels // groups, *self.windows.kernel, out[1])
        weight = torch.empty(lies, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight.movedim(0, 4))
        if bias:
            memory = torch.empty(out_channels, *out, device=device, dtype=dtype)
            self.bias = torch.nn.Parameter(memory)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights and bias as `torch.nn.Conv2d` does."""
        bound = 1 / math.sqrt(max(1, self.weight.shape[1:4].numel()))
        self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return `local_conv2d` of x, `(N, in_channels, H, W)`."""
        _, stride, padding, dilation = self.windows
        return local_conv2d(
            *(x, self.weight, self.bias),
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=self.groups,
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            name = f"{prefix}weight"
            destination[name] = destination[name].contiguous()

    def extra_repr(self) -> str:
        """Return the sizes."""
        out_channels, in_channels = self.weight.shape[0], self.weight.shape[1] * self.groups
        kernel, stride, padding, dilation = self.windows
        return (
            f"{in_channels}, {out_channels}, kernel_size={kernel}, stride={stride}, "
            f"padding={padding}, dilation={dilation}, groups={self.groups}"
        )
