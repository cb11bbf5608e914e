"""Making tables: from a tensor, an array or a file, or empty."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.compat.fake_tensors import FakeTensor
from penstock.unified._devices import resolve_device
from penstock.unified._tensor import UnifiedTensor, tensor_over
from penstock.unified.device.hot_rows import HotRows, parse_cache
from penstock.unified.file.layout import join_source, split_source, torch_dtype
from penstock.unified.file.table import FileTable, create_table
from penstock.unified.host.table import HostTable

logger = logging.getLogger(__name__)

_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@torch.inference_mode(mode=False)  # or nothing could be written to the table elsewhere
def unify(
    source: Any,
    *,
    device: torch.device | str | int | None = None,
    cache: int | str | HotRows | None = None,
    requires_grad: bool = False,
) -> UnifiedTensor:
    """Return a table whose rows are gathered from where they lie.

    Example:
        >>> features = unify(torch.rand(1000, 16))
        >>> features[torch.tensor([3, 1, 3])].shape
        torch.Size([3, 16])

    Args:
        source: A dense tensor on the CPU or a NumPy array, of shape (num_rows, *row) and any
            strides; it is left untouched. Or the path of a table in a file, which is read row by
            row: "x.npy", "file.safetensors#name", or a file that `empty(path=...)` has made.
            A `UnifiedTensor` gives another one over the same table.
        device: Device of gathered rows: "cpu", or a CUDA device, which reads them where they lie.
            By default the current CUDA device where there is one, else the CPU (and for a
            `UnifiedTensor` as before). The table itself stays where it is.
        cache: Bytes for hot rows on that device, such as "2GiB", or a `HotRows`. On the CPU only a
            table in a file has a cache, in memory. With None nothing is kept on a GPU, and a table
            in a file is copied to memory as a whole once that pays and where it takes no more than
            a quarter of what is free; with 0 nothing is kept.
        requires_grad: Whether gradients are recorded; those of gathered rows are sparse.

    Returns:
        The table, contiguous, of the same shape and dtype.

    Raises:
        TypeError: `source` is something else.
        ValueError: `source` has no dimension of rows, `cache` makes no sense, or `device` is not
            there.
        CapacityError: There is not enough memory.
        StoreError: The file cannot be used; the message says why.
    """
    _refuse_fake(source)
    place, hot_rows = resolve_device(device), parse_cache(cache)
    if isinstance(source, str | os.PathLike):
        path, key = split_source(os.fspath(source))
        name = join_source(os.path.realpath(path), key)
        table = FileTable(name, device=place, hot_rows=hot_rows, may_copy=cache is None)
    elif isinstance(source, UnifiedTensor):
        table = source._table
        if isinstance(table, FileTable):
            if device is not None or cache is not None:
                may_copy = cache is None and table.may_copy
                table = FileTable(table.source, device=place, hot_rows=hot_rows, may_copy=may_copy)
        elif (device is not None and place != table.device) or hot_rows is not None:
            table = table.view_from(place if device is not None else table.device, hot_rows)
    else:
        table = _copy_source(source).view_from(place, hot_rows)
    _check_cache(table)
    return tensor_over(table, requires_grad=requires_grad)


def _copy_source(source: Any) -> HostTable:
    """Return a table in memory with the content of `source`."""
    if not isinstance(source, torch.Tensor | np.ndarray):
        raise TypeError(
            f"source: expected a tensor, a NumPy array or a path, got {type(source).__name__}"
        )
    if isinstance(source, torch.Tensor):
        _check_dense(source)
    if source.ndim == 0:
        raise ValueError("source: expected a table of shape (num_rows, *row), got a scalar")
    if isinstance(source, np.ma.MaskedArray):
        raise TypeError("source: a masked array has no numbers at some places; fill them first")
    if isinstance(source, np.ndarray):  # of any strides and byte order
        try:
            table = HostTable.empty(source.shape, torch_dtype(source.dtype))
        except TypeError as error:
            raise TypeError(f"source: {error}") from error
        np.copyto(table.rows.numpy(), source)
        return table
    table = HostTable.empty(tuple(source.shape), source.dtype)
    table.rows.copy_(source.detach())
    return table


def _check_dense(source: torch.Tensor) -> None:
    found, remedy = f"{source.layout} on {source.device}", "source.cpu() or source.to_dense()"
    if source.is_nested:
        found, remedy = "a nested one", "torch.nested.to_padded_tensor(source, 0.0)"
    elif source.is_quantized:
        found, remedy = f"{source.dtype}", "source.dequantize() or source.int_repr()"
    elif source.device.type == "cpu" and source.layout == torch.strided:
        return
    raise TypeError(f"source: expected a dense tensor on the CPU, got {found}; call {remedy} first")


def _refuse_fake(source: Any = None) -> None:
    """Refuse to make a table of fake tensors, or where all tensors are fake."""
    new = torch.empty(0, dtype=torch.uint8, device="cpu")  # fake within such a mode
    if isinstance(source, FakeTensor) or isinstance(new, FakeTensor):
        raise RuntimeError(
            "a table has memory or a file, and fake tensors have neither: make it outside of a "
            "FakeTensorMode, and before a captured step (penstock.capture, penstock.fit)"
        )


def _check_cache(table: HostTable | FileTable) -> None:
    """Adapt the cache of a script that was written for a machine with a GPU, or without."""
    hot_rows = table.hot_rows
    if hot_rows is None:
        return
    scores, num_rows = hot_rows.scores, table.shape[0]
    if scores is not None and len(scores) != num_rows:
        raise ValueError(
            f"scores: expected one for each of the table's {num_rows} rows, got {len(scores)}"
        )
    if table.device.type != "cpu":
        return
    if isinstance(table, HostTable):
        table.hot_rows = None
        logger.info("cache: a table in memory needs none where its rows go to the CPU")
    elif scores is not None:
        logger.info("cache: on the CPU the rows of a file are kept as they are used, not by scores")


@torch.inference_mode(mode=False)
def empty(
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | int | None = None,
    path: str | os.PathLike[str] | None = None,
    requires_grad: bool = False,
) -> UnifiedTensor:
    """Return a table of zeroes.

    Example:
        >>> empty((1000, 16), torch.float16).shape
        torch.Size([1000, 16])

    Args:
        shape: Lengths (num_rows, *row).
        dtype: Dtype of the elements; by default PyTorch's.
        device: Device of gathered rows: "cpu" or a CUDA device; by default the current CUDA device
            where there is one, else the CPU.
        path: Path of a new file that holds the table: in NumPy's format if it ends in ".npy", else
            in Penstock's, whose random rows take fewer reads. By default it lies in memory.
        requires_grad: Whether gradients are recorded; those of gathered rows are sparse.

    Raises:
        TypeError: `shape` is no sequence of integers, `dtype` is not torch's, or `path` is no path.
        ValueError: `shape` is empty or has a negative length, `device` is not there, or a file at
            `path` would be of a format that cannot hold the table.
        CapacityError: There is not enough memory.
        StoreError: The file cannot be made.
    """
    _refuse_fake()
    lengths = _parse_shape(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected one of torch, such as torch.float32")
    if dtype in _QUANTIZED:
        raise TypeError(f"dtype={dtype}: numbers without their scales; give the integers' dtype")
    if path is not None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path={path!r}: expected a string, or a path of pathlib")
        file = create_table(path, lengths, dtype).path
        return unify(file, device=device, requires_grad=requires_grad)
    table = HostTable.empty(lengths, dtype, device=resolve_device(device))
    return tensor_over(table, requires_grad=requires_grad)


def _parse_shape(shape: Sequence[int]) -> tuple[int, ...]:
    given: tuple[Any, ...] = tuple(shape) if isinstance(shape, Iterable) else (None,)
    if not all(isinstance(each, int | np.integer) for each in given):
        raise TypeError(f"shape={shape!r}: expected integers (num_rows, *row)")
    lengths = tuple(int(length) for length in given)
    if not lengths or min(lengths) < 0:
        raise ValueError(f"shape={lengths}: expected (num_rows, *row), none of them negative")
    return lengths
