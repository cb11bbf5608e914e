"""A comparison of modules on sequences, images and the like with the same modules on their rows.

A chain runs on rows, so that a module that names a dimension, or takes the second one for channels,
computes something else than in a sequence of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.compat.dynamo import run_uncompiled
from penstock.compat.random_numbers import keep_random_state
from penstock.iomodel._chain_checks import refuse_buffer_changes
from penstock.iomodel._modules import Module, find_in_place, is_plain_linear, name_module
from penstock.iomodel._row_checks import differ

_NUM_PLACES = 3  # of each dimension


@run_uncompiled(reason="what the rows are decides what is refused")
def check_sequences(modules: Sequence[Module], x: Tensor) -> None:
    """Refuse modules that compute something else of x than of its rows, by a few of them.

    Args:
        modules: Those of a chain whose one argument is the rows.
        x: The chain's input, of more dimensions than 2.

    Raises:
        ValueError: The result of one has other numbers or another shape.
    """
    compared = [is_plain_linear(each) or find_in_place(each) is not None for each in modules]
    value = x.detach()
    for dim in range(x.dim() - 1):
        num_places = min(_NUM_PLACES, x.shape[dim])
        at = torch.arange(num_places, device=x.device) * x.shape[dim] // num_places
        value = value.index_select(dim, at)
    shape, rows = value.shape[:-1], value.flatten(0, -2)
    with torch.no_grad(), refuse_buffer_changes(modules):
        for number, module in enumerate(modules):
            if all(compared[number:]):
                return
            result = _call(module, rows)
            if not compared[number]:
                _compare_shapes(module, rows, result, shape, x.shape[1])
            if not isinstance(result, Tensor) or result.shape[:1] != rows.shape[:1]:
                return  # a number, or what is refused later
            rows = result


def _compare_shapes(
    module: Module, rows: Tensor, result: Any, shape: torch.Size, num_channels: int
) -> None:
    """Compare a module's result of rows with that of the same rows in more dimensions."""
    found = _try(module, rows.reshape(*shape, *rows.shape[1:]))
    if found is None and rows.shape[1] == num_channels:
        # The module may be for all channels, in the second dimension and in the last one.
        shape = torch.Size([1, num_channels, *(1 for _ in shape[2:])])
        rows = rows[torch.arange(num_channels, device=rows.device) % len(rows)]
        result = _call(module, rows)
        found = _try(module, rows.reshape(*shape, *rows.shape[1:]))
    if found is None or not isinstance(result, Tensor):
        return  # it is for rows alone
    expected = shape + result.shape[1:] if result.dim() else result.shape
    if found.shape != expected or differ(found.reshape(result.shape), result, by_column=True):
        raise ValueError(
            f"{name_module(module)} does not work on each row alone: of x in its {len(shape) + 1} "
            "dimensions it computes something else than of its rows, which are all dimensions but "
            "the last; name dimensions from the end, as dim=-1, or pass x.flatten(0, -2) to have "
            "it run on rows"
        )


def _call(module: Module, value: Tensor) -> Any:
    """Return what a module returns of a copy, which it may change, with the same random numbers."""
    with keep_random_state(value.device):
        return module(value.clone())


def _try(module: Module, value: Tensor) -> Tensor | None:
    """Return a module's result; None if it takes no value of this shape."""
    try:
        result = _call(module, value)
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None
