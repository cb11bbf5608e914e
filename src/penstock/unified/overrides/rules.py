"""Overrides that return a table itself, a plain tensor, or the error of a whole copy.

Importing this module registers the overrides of all modules beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.compat.dispatch import parse_to
from penstock.unified._devices import GPU
from penstock.unified._tensor import FileTensor, UnifiedTensor, tensor_over
from penstock.unified.file.table import FileTable
from penstock.unified.host.table import HostTable
from penstock.unified.overrides import _indexing, _rows  # noqa: F401 (registered)
from penstock.unified.overrides.registry import Operation, implements, run, whole_table_error

_T = torch.Tensor


@implements(_T.detach)
def _detach(func: Operation, table: Any) -> Any:
    return tensor_over(table._table) if isinstance(table, UnifiedTensor) else func(table)


@implements(_T.cpu)
def _cpu(func: Operation, table: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(table, FileTensor):
        raise whole_table_error(table, "cpu()", "gather rows of it")
    table._table.use.synchronize()
    return table.view_as(table)


@implements(_T.numpy, _T.tolist, _T.__array__)
def _to_python(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(table, FileTensor):
        raise whole_table_error(table, f"{func.__name__}()", "gather rows of it")
    return run(func, table, *args, **kwargs)


@implements(_T.copy_)
def _copy(func: Operation, input: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(input, FileTensor) and isinstance(source, FileTensor):
        target, origin = input._table, source._table
        assert isinstance(target, FileTable) and isinstance(origin, FileTable)
        if target.file is origin.file and target.layout.offset == origin.layout.offset:
            return input  # as where a module loads the state that it had
    return run(func, input, source, *args, **kwargs)


@implements(_T.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Operation, tensor: Any, data: Any) -> None:
    if isinstance(tensor, UnifiedTensor):
        if isinstance(data, UnifiedTensor) and data._table is tensor._table:
            return  # as a module's `to` does with parameters that are there already
        raise TypeError(
            "u.data = x: a table keeps its memory or its file. Write rows of it, u[index] = rows, "
            "or make another one: penstock.unify(x)"
        )
    func(tensor, data)


@implements(_T.contiguous, _T.pin_memory)
def _return_table(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    return table


@implements(_T.share_memory_)
def _share_memory(func: Operation, table: Any) -> Any:
    if isinstance(table._table, HostTable):
        table._table.use.synchronize(to_write=True)
        table._table.memory.share()
    return table


@implements(_T.is_shared)
def _is_shared(func: Operation, table: Any) -> bool:
    return isinstance(table._table, FileTable) or table._table.memory.descriptor is not None


@implements(_T.clone, torch.clone)
def _clone(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    raise whole_table_error(table, f"{func.__name__}()", "gather rows, or unify(u.cpu())")


@implements(_T.to)
def _to(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    copies = kwargs.pop("copy", False)
    device, dtype, _, _ = parse_to(*args, **kwargs)
    _refuse_dtype(table, dtype)
    there = table._table.device  # to which gathered rows go anyway
    if (
        device is not None
        and device.type != table.device.type
        and (device.type != there.type or device.index not in (None, there.index))
    ):
        raise whole_table_error(
            table, f"to({str(device)!r})", f"gather rows there: unify(u, device={str(device)!r})"
        )
    if copies:
        return _clone(func, table)
    return table


@implements(_T.cuda)
def _cuda(func: Operation, table: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _to(func, table, torch.device(GPU, device) if isinstance(device, int) else device or GPU)


@implements(
    *(_T.new, _T.new_tensor, _T.new_empty, _T.new_empty_strided),
    *(_T.new_full, _T.new_ones, _T.new_zeros),
)
def _new(func: Operation, table: UnifiedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Tables in files have no memory to make it like.
    like = torch.empty(0, dtype=table.dtype, device=table.output_device)
    return func(like, *args, **kwargs)


@implements(_T.type)
def _type(func: Operation, table: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(dtype, torch.dtype):  # a question, or the name of a legacy type
        return run(func, table, dtype, *args, **kwargs)
    _refuse_dtype(table, dtype)
    return table


@implements(_T.type_as)
def _type_as(func: Operation, table: Any, other: torch.Tensor) -> Any:
    return _to(func, table, other) if isinstance(table, UnifiedTensor) else run(func, table, other)


_DTYPE_OF = {
    getattr(_T, name): getattr(torch, name)
    for name in ("half", "float", "double", "bfloat16", "long", "int", "short", "bool")
} | {_T.char: torch.int8, _T.byte: torch.uint8}


@implements(*_DTYPE_OF)
def _convert(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_dtype(table, _DTYPE_OF[func])
    return table


def _refuse_dtype(table: Any, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype != table.dtype:
        raise whole_table_error(
            table, f"converting it to {dtype}", "convert it before unify, or convert gathered rows"
        )
