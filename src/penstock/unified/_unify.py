"""Making tables: from what is in memory, or empty."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.unified._row_file import create, is_path, split_source
from penstock.unified._tables import FileTable, HostTable
from penstock.unified._tensor import UnifiedTensor, tensor_over
from penstock.units import parse_bytes


def unify(
    source: Any, *, cache: int | str | None = None, requires_grad: bool = False
) -> UnifiedTensor:
    """A table whose rows are gathered from where they lie.

    Example:
        >>> features = unify(torch.rand(1000, 16))
        >>> features[torch.tensor([3, 1, 3])].shape
        torch.Size([3, 16])

    Args:
        source: a dense tensor on the CPU or a NumPy array, of shape (num_rows, *row) and any
            strides; it is left untouched. Or the path of a table in a file, which is read row by
            row: "x.npy", "file.safetensors#name", or what `empty(path=...)` has made.
            A `UnifiedTensor` gives another one over the same table.
        cache: for a table in a file, what the rows that are kept in memory may take, such as
            "2GiB"; None keeps none.
        requires_grad: whether gradients are recorded; those of gathered rows are sparse.

    Returns:
        The table, contiguous, of the same shape and dtype.

    Raises:
        TypeError: `source` is something else.
        ValueError: `source` has no dimension of rows, or `cache` makes no sense.
        CapacityError: there is not enough memory.
        StoreError: the file cannot be used; the message says why.
    """
    cache_bytes = 0 if cache is None else parse_bytes(cache, name="cache")
    if is_path(source):
        table = FileTable(_absolute(source), cache_bytes=cache_bytes)
        return tensor_over(table, requires_grad=requires_grad)
    if cache_bytes:
        raise ValueError(f"cache={cache!r}: only tables in files have one; this one is in memory")
    if isinstance(source, UnifiedTensor):
        return tensor_over(source._table, requires_grad=requires_grad)
    if not isinstance(source, torch.Tensor | np.ndarray):
        raise TypeError(
            f"source: expected a tensor, a NumPy array or a path, got {type(source).__name__}"
        )
    if source.ndim == 0:
        raise ValueError("source: expected a table of shape (num_rows, *row), got a scalar")
    if isinstance(source, np.ndarray):
        return tensor_over(_table_like(source), requires_grad=requires_grad)
    if source.device.type != "cpu" or source.layout != torch.strided or source.is_quantized:
        raise TypeError(
            f"source: expected a dense tensor on the CPU, got {source.layout} on {source.device}; "
            "call source.cpu() or source.to_dense() first"
        )
    table = HostTable.empty(tuple(source.shape), source.dtype)
    table.rows.copy_(source.detach())
    return tensor_over(table, requires_grad=requires_grad)


def empty(
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    requires_grad: bool = False,
) -> UnifiedTensor:
    """A table of zeroes.

    Example:
        >>> empty((1000, 16), torch.float16).shape
        torch.Size([1000, 16])

    Args:
        shape: (num_rows, *row).
        dtype: of the elements; by default PyTorch's.
        path: of a new file that holds the table, in a format of Penstock's; by default it lies in
            memory.
        requires_grad: whether gradients are recorded; those of gathered rows are sparse.

    Raises:
        ValueError: `shape` is empty or has a negative length.
        CapacityError: there is not enough memory.
        StoreError: the file cannot be made.
    """
    lengths = tuple(int(length) for length in shape)
    if not lengths or min(lengths) < 0:
        raise ValueError(f"shape={tuple(shape)}: expected (num_rows, *row), none of them negative")
    dtype = dtype or torch.get_default_dtype()
    if path is not None:
        return unify(create(path, lengths, dtype).path, requires_grad=requires_grad)
    table = HostTable.empty(lengths, dtype)
    return tensor_over(table, requires_grad=requires_grad)


def _absolute(source: str | os.PathLike[str]) -> str:
    """The same file from whatever directory a process may change to."""
    path, key = split_source(os.fspath(source))
    return os.path.abspath(path) + (f"#{key}" if key else "")


def _table_like(array: np.ndarray) -> HostTable:
    """A table with the content of an array, whatever its strides and byte order."""
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype
    except TypeError as error:
        raise TypeError(f"source: {error}") from error
    table = HostTable.empty(array.shape, dtype)
    np.copyto(table.rows.numpy(), array)
    return table
