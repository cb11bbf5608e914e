"""Products with a quantised weight by blocks of its rows, so that no whole weight is dequantised.

With W_i the rows of block i, dequantised when they are needed, forward and backward:

    y_i = x W_i^T + b_i        dx = sum over i of dy_i W_i

Autograd keeps the quantised weight alone. A weight is a subclass of `torch.Tensor` whose slices of
rows are of the same class and have a `dequantize()`, as those of torchao are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.compat.fake_tensors import FakeTensor
from penstock.lora._products import is_autocasting

_BLOCK_ELEMENTS = 1 << 20  # dequantised at a time
_MIN_ROWS = 64

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
"""Classes of weights that are not quantised: a captured step has fake tensors for plain ones."""

_OF_INPUT = ("act_quant_kwargs", "activation_quantization")  # the layer quantises its input too

_can_split: dict[type, bool] = {}


def can_split_rows(weight: Tensor) -> bool:
    """Return whether a weight is quantised and a block of its rows can be dequantised alone."""
    kind = type(weight)
    if kind in PLAIN or weight.requires_grad:
        return False
    if any(getattr(weight, name, None) is not None for name in _OF_INPUT):
        return False
    if kind not in _can_split:
        _can_split[kind] = _try_row(weight)
    return _can_split[kind]


def multiply_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias` of a quantised weight.

    Args:
        x: Input, `(*batch, in_features)`.
        weight: A weight of shape `(out_features, in_features)` that `can_split_rows` accepts.
        bias: Of shape `(out_features,)`, or None.

    Returns:
        The product, `(*batch, out_features)`, of the dtype of `x`; under autocast of autocast's.
    """
    if is_autocasting(x.device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    product: Tensor = _ProductByRows.apply(x.flatten(0, -2), weight)  # pyright: ignore[reportAssignmentType]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.unflatten(0, x.shape[:-1])


class _ProductByRows(torch.autograd.Function):
    """The product, of which the backward pass dequantises the blocks again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        y = x.new_empty(x.shape[0], weight.shape[0])
        for rows, block in _blocks(weight, x.dtype):
            y[:, rows] = x @ block.t()
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        (dy,) = grad_outputs
        (weight,) = ctx.saved_tensors
        dx = dy.new_zeros(dy.shape[0], weight.shape[1])
        for rows, block in _blocks(weight, dy.dtype):
            dx.addmm_(dy[:, rows], block)
        return dx, None


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows, dequantised, each with its place."""
    num_rows, num_columns = weight.shape
    step = max(_MIN_ROWS, _BLOCK_ELEMENTS // max(num_columns, 1))
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        yield rows, weight[rows].dequantize().to(dtype)


def _try_row(weight: Tensor) -> bool:
    """Return whether the first row can be dequantised alone."""
    try:
        row = weight[:1]
        values = row.dequantize() if type(row) is type(weight) else None
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False
    return type(values) is Tensor and values.shape == (1, weight.shape[1])
