"""Linear layers with low-rank adapters: arguments are checked and rows are grouped by adapter.

`_operator.py` is the operator, `_products.py` computes, `_dropout.py` makes the masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.compat.autograd import is_eager, is_transformed
from penstock.lora import _products
from penstock.lora._adapters import FLOATS, Adapter, AdapterRows, has_strides
from penstock.lora._operator import record, uses_of

_GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 divided by the golden ratio

Assignment = AdapterRows | Tensor | Sequence[int] | None
"""Rows by adapter; by row the number of its adapter, -1 for none; None: the only one has all."""

Seed = int | Sequence[int] | Tensor
"""An integer for all adapters, or one for each; a tensor: int64 on the CPU, `(num_adapters,)`."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapters: Sequence[Adapter],
    assignment: Assignment = None,
    *,
    seed: Seed,
) -> Tensor:
    """Return a linear layer's output with the adapters of its rows added.

    Each row of an adapter gets `scaling * dropout(x) @ down.T @ up.T` (LoRA, arXiv:2106.09685,
    section 4.1). The graph is split at the product of rank r (LoRAFusion, arXiv:2510.00206, section
    4): autograd keeps `x` and that product, no mask and no masked input, and the backward pass
    makes the mask again. Nothing is computed for an adapter that a row does not have. The result is
    the same in every run: no sum depends on the order of threads.

    Example:
        >>> x, weight = torch.randn(6, 16), torch.randn(8, 16)
        >>> adapters = [
        ...     Adapter(torch.randn(4, 16), torch.randn(8, 4), scaling=2.0, dropout=0.1),
        ...     Adapter(torch.randn(2, 16), torch.randn(8, 2)),
        ... ]
        >>> linear(x, weight, None, adapters, [0, 0, 1, 1, 1, -1], seed=7).shape
        torch.Size([6, 8])

    Args:
        x: Input of shape `(*batch, in_features)`; its rows are those of `x.flatten(0, -2)`.
        weight: The layer's weight, `(out_features, in_features)`. Where its dtype or that of `bias`
            is not that of `x`, it is converted in each call.
        bias: The layer's bias, `(out_features,)`, or None.
        adapters: Adapters of any ranks. Their dtype may differ from that of `x` (float32 adapters
            on a bfloat16 layer); the result has the dtype of `x`.
        assignment: By row the number of its adapter, -1 for none; or `AdapterRows`, grouped once
            for the layers of a step; or None where a single adapter has every row.
        seed: Of the dropout masks: an integer for all adapters, of which each makes masks of its
            own; or one by adapter, also as an int64 tensor on the CPU. The mask of an element
            depends on the seed, on the number of its row among the adapter's, and on the column.
            Layers and steps need seeds of their own.

    Returns:
        The output, `(*batch, out_features)`. Under autocast it has autocast's dtype.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes, dtypes or devices do not fit, or the assignment has another length than
            `x` has rows, or numbers an adapter that does not exist.
    """
    _check_layer(x, weight, bias)
    call = _prepare(x, adapters, assignment, seed, out_features=weight.shape[0])
    y = _run(call, weight, bias, None)
    return y.view(*x.shape[:-1], weight.shape[0]) if x.dim() != 2 else y


def add(
    y: Tensor,
    x: Tensor,
    adapters: Sequence[Adapter],
    assignment: Assignment = None,
    *,
    seed: Seed,
) -> Tensor:
    """Return a layer's output with the adapters of its rows added, where the layer computed it.

    This is `linear` for a layer whose own product is not `x @ weight.T`: a quantised one, say.

    Example:
        >>> layer, x = torch.nn.Linear(16, 8), torch.randn(6, 16)
        >>> adapter = Adapter(torch.randn(4, 16), torch.randn(8, 4))
        >>> add(layer(x), x, [adapter], seed=7).shape
        torch.Size([6, 8])

    Args:
        y: The layer's output, `(*batch, out_features)`.
        x: The layer's input, `(*batch, in_features)`.
        adapters: As in `linear`.
        assignment: As in `linear`.
        seed: As in `linear`.

    Returns:
        The sum, of the shape and dtype of `y`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Shapes, dtypes, devices or the assignment do not fit.
    """
    _check_input(x)
    _check_tensor("y", y, x)
    if not y.dim() or y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"y has the shape {tuple(y.shape)} and x {tuple(x.shape)}; accepted is a y with the "
            "rows of x"
        )
    call = _prepare(x, adapters, assignment, seed, out_features=y.shape[-1])
    total = _run(call, None, None, y.reshape(math.prod(y.shape[:-1]), y.shape[-1]))
    return total.view(y.shape)


@dataclass(frozen=True)
class _Call:
    """Arguments of one call as the operator takes them."""

    x: Tensor
    operands: tuple[Any, ...]


def _prepare(
    x: Tensor,
    adapters: Sequence[Adapter],
    assignment: Assignment,
    seed: Seed,
    *,
    out_features: int,
) -> _Call:
    """Check the adapters of a call and flatten its rows."""
    if isinstance(adapters, Adapter):
        raise TypeError("adapters is one Adapter; accepted is a sequence: [adapter]")
    for number, adapter in enumerate(adapters):
        _check_adapter(number, adapter, x, out_features)
    if _products.is_autocasting(x.device) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        downs = [adapter.down.to(dtype) for adapter in adapters]
        ups = [adapter.up.to(dtype) for adapter in adapters]
    else:
        downs = [adapter.down for adapter in adapters]
        ups = [adapter.up for adapter in adapters]
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = _group(assignment, flat.shape[0], len(adapters))
    operands = (
        downs,
        ups,
        rows.order if rows.order is None else rows.order.to(x.device),
        rows.counts,
        rows.starts,
        [adapter.scaling for adapter in adapters],
        [adapter.dropout for adapter in adapters],
        _derive_seeds(seed, adapters),
    )
    return _Call(flat, operands)


def _run(call: _Call, weight: Tensor | None, bias: Tensor | None, total: Tensor | None) -> Tensor:
    if is_transformed():
        return _products.compose(call.x, weight, bias, total, uses_of(*call.operands))
    is_direct = is_eager(call.x, weight, bias, total, *call.operands[0], *call.operands[1])
    run = record if is_direct else torch.ops.penstock.lora_forward
    return run(call.x, weight, bias, total, *call.operands)[0]


def _check_input(x: Tensor) -> None:
    _check_tensor("x", x, x)
    if not has_strides(x):
        raise TypeError("x is nested, sparse or of a layout without strides; accepted are others")
    if not x.dim():
        raise ValueError("x has no dimension; accepted are tensors of shape (*batch, in_features)")


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_input(x)
    _check_tensor("weight", weight, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has the shape {tuple(weight.shape)} for an x of shape {tuple(x.shape)}; "
            f"accepted is (out_features, {x.shape[-1]})"
        )
    if bias is not None:
        _check_tensor("bias", bias, x)
        if tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(
                f"bias has the shape {tuple(bias.shape)}; accepted is ({weight.shape[0]},), the "
                "rows of weight"
            )


def _check_tensor(name: str, value: Tensor, x: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is of the type {type(value).__name__}; accepted are tensors")
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{name} has the dtype {value.dtype}; accepted are float16, bfloat16, float32 and "
            "float64. For a layer of another kind there is `add`, with the layer's own output"
        )
    if value.device != x.device:
        raise ValueError(
            f"{name} is on {value.device} and x on {x.device}; both must be on one device"
        )


def _check_adapter(number: int, adapter: Adapter, x: Tensor, out_features: int) -> None:
    shapes = (adapter.down.shape[1], adapter.up.shape[0])
    if shapes != (x.shape[-1], out_features):
        raise ValueError(
            f"adapters[{number}] is for {shapes[0]} features in and {shapes[1]} out; the layer has "
            f"{x.shape[-1]} and {out_features}"
        )
    if adapter.down.device != x.device:
        raise ValueError(
            f"adapters[{number}] is on {adapter.down.device} and x on {x.device}; both must be on "
            "one device"
        )


def _group(assignment: Assignment, num_rows: int, num_adapters: int) -> AdapterRows:
    if assignment is None:
        if num_adapters != 1:
            raise ValueError(
                f"assignment is None with {num_adapters} adapters; give the number of its adapter "
                "for each row, -1 for none"
            )
        return AdapterRows(num_rows, (num_rows,), (0,))
    if not isinstance(assignment, AdapterRows):
        assignment = AdapterRows.group(assignment, num_adapters)
    if (assignment.num_rows, assignment.num_adapters) != (num_rows, num_adapters):
        raise ValueError(
            f"assignment is for {assignment.num_rows} rows and {assignment.num_adapters} adapters; "
            f"x has {num_rows} rows, and there are {num_adapters} adapters"
        )
    return assignment


def _derive_seeds(seed: Seed, adapters: Sequence[Adapter]) -> Tensor | None:
    """Return a seed of 64 bits for each adapter; None where none has dropout."""
    if type(seed) is int and not any(adapter.dropout for adapter in adapters):
        return None
    num_adapters = len(adapters)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.device.type != "cpu" or seed.dim() != 1:
            raise TypeError(
                f"seed is a tensor of {seed.dtype} and shape {tuple(seed.shape)} on {seed.device}; "
                "accepted are int64 tensors on the CPU with one number for each adapter"
            )
        seeds = seed
    elif isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str):
        parts = [_fill(_to_integer(each), 1) for each in seed]
        seeds = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
    elif num_adapters == 1:
        seeds = _fill(_to_integer(seed), 1)
    else:
        others = [_to_signed(number * _GOLDEN) for number in range(num_adapters)]
        seeds = _fill(_to_integer(seed), num_adapters) ^ torch.tensor(
            others, dtype=torch.int64, device="cpu"
        )
    if len(seeds) != num_adapters:
        raise ValueError(f"seed has {len(seeds)} numbers for {num_adapters} adapters")
    return seeds if any(adapter.dropout for adapter in adapters) else None


def _fill(seed: int, size: int) -> Tensor:
    """Return copies of a seed; a compiled step then takes another one without being recompiled."""
    if not -(2**63) <= seed < 2**63:
        seed = _to_signed(seed)
    return torch.full((size,), seed, dtype=torch.int64, device="cpu")


def _to_integer(seed: Any) -> int:
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed  # as it is: a compiler follows it
    if not isinstance(seed, np.integer):
        raise TypeError(f"seed is {seed!r}; accepted are an integer, or one for each adapter")
    return int(seed)


def _to_signed(seed: int) -> int:
    return ((seed + 2**63) % 2**64) - 2**63
