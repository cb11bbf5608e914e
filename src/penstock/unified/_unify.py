"""Making tables: from what is in memory, or empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.unified._tables import HostTable
from penstock.unified._tensor import UnifiedTensor


def unify(source: Any, *, requires_grad: bool = False) -> UnifiedTensor:
    """Copy a table once into memory that processes share, and that rows are gathered from.

    Example:
        >>> features = unify(torch.rand(1000, 16))
        >>> features[torch.tensor([3, 1, 3])].shape
        torch.Size([3, 16])

    Args:
        source: a dense tensor on the CPU or a NumPy array, of shape (num_rows, *row) and any
            strides; it is left untouched. A `UnifiedTensor` gives another one over the same table.
        requires_grad: whether gradients are recorded; those of gathered rows are sparse.

    Returns:
        The table, contiguous, of the same shape and dtype.

    Raises:
        TypeError: `source` is something else.
        ValueError: `source` has no dimension of rows.
        CapacityError: there is not enough memory.
    """
    if isinstance(source, UnifiedTensor):
        return UnifiedTensor._over(source._table, requires_grad=requires_grad)
    if not isinstance(source, torch.Tensor | np.ndarray):
        raise TypeError(f"source: expected a tensor or a NumPy array, got {type(source).__name__}")
    if source.ndim == 0:
        raise ValueError("source: expected a table of shape (num_rows, *row), got a scalar")
    if isinstance(source, np.ndarray):
        return UnifiedTensor._over(_table_like(source), requires_grad=requires_grad)
    if source.device.type != "cpu" or source.layout != torch.strided or source.is_quantized:
        raise TypeError(
            f"source: expected a dense tensor on the CPU, got {source.layout} on {source.device}; "
            "call source.cpu() or source.to_dense() first"
        )
    table = HostTable.empty(tuple(source.shape), source.dtype)
    table.rows.copy_(source.detach())
    return UnifiedTensor._over(table, requires_grad=requires_grad)


def empty(
    shape: Sequence[int], dtype: torch.dtype | None = None, *, requires_grad: bool = False
) -> UnifiedTensor:
    """A table of zeroes.

    Example:
        >>> empty((1000, 16), torch.float16).shape
        torch.Size([1000, 16])

    Args:
        shape: (num_rows, *row).
        dtype: of the elements; by default PyTorch's.
        requires_grad: whether gradients are recorded; those of gathered rows are sparse.

    Raises:
        ValueError: `shape` is empty or has a negative length.
        CapacityError: there is not enough memory.
    """
    lengths = tuple(int(length) for length in shape)
    if not lengths or min(lengths) < 0:
        raise ValueError(f"shape={tuple(shape)}: expected (num_rows, *row), none of them negative")
    table = HostTable.empty(lengths, dtype or torch.get_default_dtype())
    return UnifiedTensor._over(table, requires_grad=requires_grad)


def _table_like(array: np.ndarray) -> HostTable:
    """A table with the content of an array, whatever its strides and byte order."""
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"source: {error}") from error
    table = HostTable.empty(array.shape, dtype)
    np.copyto(table.rows.numpy(), array)
    return table
