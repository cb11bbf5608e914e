"""The module `GroupRational`, an activation that is learned."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from penstock.ops.rational._fit import fit
from penstock.ops.rational._rational import group_rational
from penstock.units import parse_count


class GroupRational(torch.nn.Module):
    """A rational activation with coefficients of its own for each group of channels.

    It begins as the rational function that is nearest to a given activation, by least squares. In
    the MLP of a Kolmogorov-Arnold transformer (Yang and Wang, arXiv:2409.10594, section 4) one
    stands before each linear layer, the first of which begins as the identity:

    Example:
        >>> from torch import nn
        >>> mlp = nn.Sequential(
        ...     GroupRational(8, activation=lambda x: x),
        ...     nn.Linear(64, 256),
        ...     GroupRational(8),
        ...     nn.Linear(256, 64),
        ... )
        >>> x = torch.randn(2, 10, 64)
        >>> (x + mlp(x)).shape
        torch.Size([2, 10, 64])
        >>> mlp[2]
        GroupRational(num_groups=8, numerator_degree=5, denominator_degree=4)

    Args:
        num_groups: Groups of channels; the number of channels is a multiple.
        numerator_degree: The degree m of `group_rational`.
        denominator_degree: The degree n.
        activation: The function that it begins as, of float64 points.
        interval: The points' ends; beyond it the function may be another.
        device: Device of the coefficients.
        dtype: Dtype of the coefficients; sums over inputs of 16 bits are float32 whatever it is.

    Attributes:
        numerator: Coefficients a, `(G, m + 1)`.
        denominator: Coefficients b, `(G, n)`.

    Raises:
        TypeError: A number is no int, or `activation` no function.
        ValueError: There are no groups, a degree is negative, or `interval` has no two ends.
    """

    def __init__(
        self,
        num_groups: int,
        numerator_degree: int = 5,
        denominator_degree: int = 4,
        *,
        activation: Callable[[Tensor], Tensor] = gelu,
        interval: tuple[float, float] = (-4.0, 4.0),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_groups = parse_count(num_groups, name="num_groups", least=1)
        numerator_degree = parse_count(numerator_degree, name="numerator_degree")
        denominator_degree = parse_count(denominator_degree, name="denominator_degree")
        self.num_groups = num_groups
        # Numbers, not the activation: a module with a lambda could not be pickled.
        self._begin = fit(activation, numerator_degree, denominator_degree, interval)
        make = {"device": device, "dtype": dtype}
        self.numerator = torch.nn.Parameter(torch.empty(num_groups, numerator_degree + 1, **make))
        self.denominator = torch.nn.Parameter(torch.empty(num_groups, denominator_degree, **make))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Let all groups begin as the activation."""
        numerator, denominator = self._begin
        self.numerator.copy_(numerator.expand(self.num_groups, -1))
        self.denominator.copy_(denominator.expand(self.num_groups, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Return `group_rational` of x, `(..., C)`."""
        return group_rational(x, self.numerator, self.denominator)

    def extra_repr(self) -> str:
        """Return the sizes."""
        degrees = self.numerator.shape[1] - 1, self.denominator.shape[1]
        return (
            f"num_groups={self.num_groups}, numerator_degree={degrees[0]}, "
            f"denominator_degree={degrees[1]}"
        )
