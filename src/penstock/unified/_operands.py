"""Operations that are the same for a table as for any tensor: they run where their operands are.

On the CPU, or, with an operand on a GPU, there, where an alias stands for the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from penstock.unified._devices import gpu_among
from penstock.unified._table_tensor import TableTensor, copies_everything
from penstock.unified._tables import HostTable

Operation = Callable[..., Any]

# What asks only for a table's properties, or sets them: it runs at once, whatever a GPU is doing.
_ABOUT = frozenset(
    {"__get__", "__set__", "__delete__", "__len__", "__hash__", "__format__"}
    | {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "type"}
    | {"storage_offset", "data_ptr", "untyped_storage", "is_contiguous", "get_device", "is_shared"}
    | {"is_floating_point", "is_complex", "is_signed", "is_pinned", "requires_grad_", "backward"}
    | {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_inference"}
)


def run(func: Operation, *args: Any, **kwargs: Any) -> Any:
    """An operation as PyTorch does it, on the GPU if an operand is on one."""
    if not torch.cuda.is_initialized():
        return func(*args, **kwargs)
    return _run_where_operands_are(func, args, kwargs)


def _run_where_operands_are(func: Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    if getattr(func, "__name__", "") in _ABOUT:
        return func(*args, **kwargs)
    found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, TableTensor)]
    # Those in files have no memory; their own dispatch refuses whatever reaches it.
    tables: list[Any] = [each for each in found if isinstance(each._table, HostTable)]
    device = gpu_among((*args, *kwargs.values()))
    if device is None or not tables:
        for table in tables:
            table._table.use.settle(to_write=True)
        return func(*args, **kwargs)
    aliases = {id(table): _alias(table, device, func) for table in tables}
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(table._table.on(device).using_alias(aliases[id(table)]))
        args, kwargs = tree_map(lambda each: aliases.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    for table in tables:
        if result is aliases[id(table)]:  # it was changed in place
            return table
    return result


def _alias(table: Any, device: torch.device, func: Operation) -> torch.Tensor:
    name = getattr(func, "__name__", str(func))
    if torch.is_grad_enabled() and table.requires_grad:
        raise copies_everything(
            table,
            f"the gradient of {name} on {device}",
            "gather rows, or use u.detach()",
        )
    alias = table._table.on(device).alias()
    if alias is None:
        raise copies_everything(
            table,
            f"{name} on {device}, for which CUDA refused to register the memory,",
            "gather rows, or allow more locked memory (ulimit -l)",
        )
    return alias
