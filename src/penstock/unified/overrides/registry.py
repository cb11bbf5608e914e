"""The registry of overrides, and the default for all other functions of PyTorch.

`@implements(torch.Tensor.__getitem__)` registers what runs in place of a function; docs/unified.md
has a table of them. A function without an override runs where its operands are: on the CPU, or,
with an operand on a GPU, there, where an alias stands for the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from penstock.compat.dispatch import tree_leaves, tree_map, without_torch_function
from penstock.errors import WholeTableError
from penstock.unified._devices import gpu_of
from penstock.unified.file.table import FileTable
from penstock.unified.host.table import HostTable
from penstock.units import format_bytes

Operation = Callable[..., Any]


class TableTensor(torch.Tensor):
    """A tensor whose rows are those of a table."""

    _table: HostTable | FileTable


def whole_table_error(table: torch.Tensor, operation: str, remedy: str) -> WholeTableError:
    """Return the error of an operation that would silently copy a whole table."""
    return WholeTableError(
        f"{operation} would copy the whole table of {format_size(table)}: {remedy}."
    )


def format_size(table: torch.Tensor) -> str:
    """Return the bytes of a table, for messages."""
    return format_bytes(table.numel() * table.element_size())


OVERRIDES: dict[Operation, Operation] = {}
"""By function of PyTorch the function that runs instead; it gets PyTorch's as first argument."""

# Functions that only ask for a table's properties, or set them: they do not wait for a GPU.
_PROPERTIES = frozenset(
    {"__get__", "__set__", "__delete__", "__len__", "__hash__", "__format__"}
    | {"size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "type"}
    | {"storage_offset", "data_ptr", "untyped_storage", "is_contiguous", "get_device", "is_shared"}
    | {"is_floating_point", "is_complex", "is_signed", "is_pinned", "requires_grad_", "backward"}
    | {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_inference"}
)


def implements(*functions: Operation) -> Callable[[Operation], Operation]:
    """Register the decorated function for some functions of PyTorch."""

    def register(override: Operation) -> Operation:
        OVERRIDES.update(dict.fromkeys(functions, override))
        return override

    return register


def dispatch(func: Operation, args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Call the override of a function, or the function where its operands are."""
    override = OVERRIDES.get(func, run)
    with without_torch_function():
        return override(func, *args, **(kwargs or {}))


def run(func: Operation, *args: Any, **kwargs: Any) -> Any:
    """Call a function of PyTorch, on the GPU if an operand is on one."""
    if not torch.cuda.is_initialized() or getattr(func, "__name__", "") in _PROPERTIES:
        return func(*args, **kwargs)
    found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, TableTensor)]
    # Those in files have no memory; their own dispatch refuses whatever reaches it.
    tables: list[Any] = [each for each in found if isinstance(each._table, HostTable)]
    device = gpu_of(*args, *kwargs.values())
    if device is None or not tables:
        for table in tables:
            table._table.use.synchronize(to_write=True)
        return func(*args, **kwargs)
    aliases = {id(table): _alias(table, device, func) for table in tables}
    with contextlib.ExitStack() as stack:
        for table in tables:
            on_device = table._table.device_table(device)
            stack.enter_context(on_device.alias_access(aliases[id(table)]))
        args, kwargs = tree_map(lambda each: aliases.get(id(each), each), (args, kwargs))
        result = func(*args, **kwargs)
    for table in tables:
        if result is aliases[id(table)]:  # it was changed in place
            return table
    return result


def _alias(table: Any, device: torch.device, func: Operation) -> torch.Tensor:
    name = getattr(func, "__name__", str(func))
    if torch.is_grad_enabled() and table.requires_grad:
        operation = f"the gradient of {name} on {device}"
        raise whole_table_error(table, operation, "gather rows, or use u.detach()")
    alias = table._table.device_table(device).alias()
    if alias is None:
        raise whole_table_error(
            table,
            f"{name} on {device}, for which CUDA refused to register the memory,",
            "gather rows, or allow more locked memory (ulimit -l)",
        )
    return alias
