"""The function `group_rational`: checks of its operands."""

from __future__ import annotations

from torch import Tensor

from penstock.ops._operands import check_operand, check_together, sum_dtype
from penstock.ops.rational._operator import rational_forward


def group_rational(x: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a rational function of each element, of its own for each group of channels.

        y = (sum_i a_i x^i) / (1 + sum_j abs(b_j) abs(x)^j),    i = 0 ... m,    j = 1 ... n

    It has no poles (Molina et al., "Pade Activation Units", arXiv:1907.06732, section 3). Forward
    and backward are one pass each, that keep nothing but x; gradients of coefficients are sums by
    tile (FlashKAT, arXiv:2505.13813, section 4), whose bits depend neither on threads nor on the
    run.

    Example:
        >>> import torch
        >>> x = torch.randn(4, 100, 64, requires_grad=True)
        >>> numerator, denominator = torch.randn(8, 6), torch.randn(8, 4)
        >>> group_rational(x, numerator, denominator).shape
        torch.Size([4, 100, 64])

    Args:
        x: `(..., C)`, float32, float16, bfloat16 or float64. Sums are of float32 at least; where a
            power overflows (in float32 with m = 5 beyond abs(x) = 5e7), y is what the formula gives
            with infinities, NaN among it.
        numerator: `(G, m + 1)`, or `(1, m + 1)` for all groups; G divides C, and group g has the
            channels `g * C / G` to `(g + 1) * C / G`. Of any of these dtypes.
        denominator: `(G, n)`, or `(1, n)`; n may be 0, for a polynomial.

    Returns:
        `(..., C)`, of the dtype of x.

    Raises:
        TypeError: An operand has another dtype.
        ValueError: Shapes do not fit, or operands are on several devices.
    """
    num_groups = _check_operands(x, numerator, denominator)
    of_sums = sum_dtype(x.dtype)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    expanded = (
        each.to(of_sums).expand(num_groups, -1).contiguous() for each in (numerator, denominator)
    )
    return rational_forward(rows, *expanded).reshape(x.shape)


def _check_operands(x: Tensor, numerator: Tensor, denominator: Tensor) -> int:
    """Return the number of groups.

    Raises:
        TypeError: As `group_rational`.
        ValueError: As `group_rational`.
    """
    operands = {"x": x, "numerator": numerator, "denominator": denominator}
    for name, each in operands.items():
        check_operand(name, each)
    check_together(**operands)
    if x.dim() == 0 or numerator.dim() != 2 or denominator.dim() != 2:
        raise ValueError(
            f"x, numerator and denominator have the shapes {tuple(x.shape)}, "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}, but must have (..., C), "
            "(G, m + 1) and (G, n)"
        )
    if numerator.shape[1] == 0:
        raise ValueError("numerator has no coefficients, but must be (G, m + 1) with m >= 0")
    given = {numerator.shape[0], denominator.shape[0]}
    num_groups = max(given)
    if not given <= {1, num_groups} or num_groups == 0:
        raise ValueError(
            f"numerator and denominator have {numerator.shape[0]} and {denominator.shape[0]} "
            "groups, but must have the same number, or 1 for all"
        )
    if x.shape[-1] % num_groups:
        raise ValueError(
            f"x has {x.shape[-1]} channels, but must have a multiple of the {num_groups} groups "
            "of the coefficients"
        )
    return num_groups
