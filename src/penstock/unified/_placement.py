"""What is different about a table, operation by operation: one list for code, docs and tests.

Everything that is not in the list runs as on any tensor over the same memory: on the CPU, or, with
an operand on a GPU, there, where an alias stands for the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from penstock.unified._devices import GPU, gpu_among
from penstock.unified._gather import INTEGERS, check_index, gather
from penstock.unified._tables import FileTable, HostTable
from penstock.unified._tensor import (
    FileTensor,
    UnifiedTensor,
    copies_everything,
    tensor_over,
)

Operation = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens when one of `operations` meets a table."""

    operations: tuple[str, ...]
    """As a user writes them, `u` being the table."""
    result: str
    """What comes out, and what moves."""
    handlers: dict[Operation, Operation]
    """PyTorch's function to ours, which gets PyTorch's as its first argument."""


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
    leaves = tree_leaves((args, kwargs))
    # Those in files have no memory; their own dispatch refuses whatever reaches it.
    tables: list[Any] = [each for each in leaves if type(each) is UnifiedTensor]
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


def _alias(table: UnifiedTensor, device: torch.device, func: Operation) -> torch.Tensor:
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


# ------------------------------------------------------------------------ rows


def _getitem(func: Operation, table: Any, key: Any) -> Any:
    if isinstance(table, FileTensor) and isinstance(key, int | slice):
        return _some_rows(table, key)
    index = _row_index(table, key)
    return run(func, table, key) if index is None else gather(table, index, negative=True)


def _some_rows(table: FileTensor, key: int | slice) -> torch.Tensor:
    """One row, or some in a regular distance; of a table in memory that is a view."""
    if isinstance(key, int):
        return gather(table, torch.tensor([key]), negative=True)[0]
    wanted = range(*key.indices(len(table)))
    if len(wanted) == len(table) > 0:
        raise copies_everything(table, "a slice of all rows", "gather those that are needed")
    return gather(table, torch.arange(wanted.start, wanted.stop, wanted.step))


def _row_index(table: Any, key: Any) -> torch.Tensor | None:
    """The integers that choose whole rows of a table; None if `key` does something else."""
    if not isinstance(table, UnifiedTensor):
        return None
    if isinstance(key, list) and key and all(type(each) is int for each in key):
        key = torch.tensor(key)
    elif isinstance(key, np.ndarray) and key.ndim and key.dtype.kind in "iu":
        key = torch.from_numpy(key)
    if not isinstance(key, torch.Tensor) or key.dim() == 0:
        return None
    if key.dtype == torch.bool:
        return key.nonzero().flatten() if key.shape == table.shape[:1] else None
    if key.dtype == torch.uint8:  # PyTorch's mask of old
        return None
    return key if key.dtype in INTEGERS else None


def _index_select(
    func: Operation, input: Any, dim: int, index: Any, *, out: torch.Tensor | None = None
) -> Any:
    if isinstance(input, UnifiedTensor) and dim in (0, -input.dim()) and index.dim() <= 1:
        if out is not None and not torch.is_grad_enabled():
            out.resize_((index.numel(), *input.shape[1:]))
        return gather(input, index.reshape(-1), out=out)
    return run(func, input, dim, index, **({} if out is None else {"out": out}))


def _embedding(
    func: Operation,
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if not isinstance(weight, UnifiedTensor) or max_norm is not None or scale_grad_by_freq:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return run(func, input, weight, *options)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return gather(weight, input, padding_index=padding_idx)


# ---------------------------------------------------------------------- writes


def _is_plain_write(table: Any, source: Any) -> bool:
    """Whether autograd has no interest: else PyTorch does what it does, or raises."""
    if not isinstance(table, UnifiedTensor) or not isinstance(source, torch.Tensor):
        return False
    if source.device.type not in ("cpu", GPU) or source.layout != torch.strided:
        return False
    return not (torch.is_grad_enabled() and (table.requires_grad or source.requires_grad))


def _as_stored(table: UnifiedTensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows as bytes that can be copied: contiguous, conjugated in fact, not in the table."""
    rows = rows.contiguous().resolve_conj().resolve_neg()
    return rows.clone() if table._table.holds(rows) else rows


def _wrote(table: Any) -> Any:
    if isinstance(table, FileTensor):  # tables in memory count their versions themselves
        torch.autograd.graph.increment_version(table)
    return table


def _setitem(func: Operation, table: Any, key: Any, value: Any) -> None:
    index = _row_index(table, key)
    source = value if isinstance(value, torch.Tensor) else None
    if index is None or source is None or not _is_plain_write(table, source):
        run(func, table, key, value)
        return
    rows = source.to(table.dtype).expand(*index.shape, *table.shape[1:])
    _put(table, index, rows, negative=True)


def _put(table: UnifiedTensor, index: torch.Tensor, rows: torch.Tensor, *, negative: bool) -> Any:
    rows = _as_stored(table, rows.reshape(index.numel(), *table.shape[1:]))
    check_index(index)
    table._table.put(index.reshape(-1), rows, negative=negative)
    return _wrote(table)


def _index_copy(func: Operation, input: Any, dim: int, index: Any, source: Any) -> Any:
    if _is_plain_row_write(input, dim, index, source):
        return _put(input, index, source, negative=False)
    return run(func, input, dim, index, source)


def _index_add(
    func: Operation, input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1
) -> Any:
    if _is_plain_row_write(input, dim, index, source):
        rows = _as_stored(input, source)
        input._table.add(check_index(index).reshape(-1), rows, alpha=alpha, negative=False)
        return _wrote(input)
    return run(func, input, dim, index, source, alpha=alpha)


def _is_plain_row_write(table: Any, dim: int, index: torch.Tensor, source: Any) -> bool:
    """Whether rows are written whole; what is wrong in shape or dtype is for PyTorch to refuse."""
    return (
        _is_plain_write(table, source)
        and dim in (0, -table.dim())
        and index.dim() == 1
        and source.dtype == table.dtype
        and source.shape == (index.numel(), *table.shape[1:])
    )


# ------------------------------------------------------------------ whole tables


def _same(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    return table


def _share(func: Operation, table: Any) -> Any:
    if isinstance(table._table, HostTable):
        table._table.use.settle(to_write=True)
        table._table.memory.share()
    return table


def _is_shared(func: Operation, table: Any) -> bool:
    return isinstance(table._table, FileTable) or table._table.memory.descriptor is not None


def _detach(func: Operation, table: Any) -> Any:
    return tensor_over(table._table) if isinstance(table, UnifiedTensor) else func(table)


def _plain(func: Operation, table: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    if isinstance(table, FileTensor):
        raise copies_everything(table, "cpu()", "gather rows of it")
    table._table.use.settle()
    return table.view_as(table)


def _cuda(func: Operation, table: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _to(func, table, torch.device(GPU, device) if isinstance(device, int) else device or GPU)


def _clone(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    raise copies_everything(table, f"{func.__name__}()", "gather rows, or unify(u.cpu())")


def _to(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    copies = kwargs.pop("copy", False)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    _refuse_dtype(table, dtype)
    if device is not None and device.type != table.device.type and not _yields_on(table, device):
        raise copies_everything(
            table, f"to({str(device)!r})", f"gather rows there: unify(u, device={str(device)!r})"
        )
    if copies:
        return _clone(func, table)
    return table


def _yields_on(table: UnifiedTensor, device: torch.device) -> bool:
    """Whether gathered rows go to `device` anyway."""
    there = table._table.device
    return device.type == there.type and device.index in (None, there.index)


def _refuse_dtype(table: Any, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype != table.dtype:
        raise copies_everything(
            table, f"converting it to {dtype}", "convert it before unify, or convert gathered rows"
        )


def _converted(dtype: torch.dtype) -> Operation:
    def convert(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_dtype(table, dtype)
        return table

    return convert


_T = torch.Tensor
# Not `torch.index_select`, which PyTorch Geometric replaces with a function of its own that calls
# this one: imported after it, we would not see the calls.
_INDEX_SELECT: Operation = torch._C._VariableFunctions.index_select  # type: ignore[attr-defined]
RULES = (
    Rule(
        operations=("u[index]", "u[mask]", "u[list]"),
        result="rows, copied by Penstock; sparse gradient",
        handlers={_T.__getitem__: _getitem},
    ),
    Rule(
        operations=("torch.index_select(u, 0, index)", "u.index_select(0, index)"),
        result="rows, copied by Penstock; sparse gradient",
        handlers={_INDEX_SELECT: _index_select, _T.index_select: _index_select},
    ),
    Rule(
        operations=("F.embedding(index, u)", "nn.Embedding.from_pretrained(u)"),
        result="rows, copied by Penstock; sparse gradient, whatever `sparse` says",
        handlers={functional.embedding: _embedding},
    ),
    Rule(
        operations=("u[index] = rows", "u.index_copy_(0, index, rows)"),
        result="rows written in place; of several for one row the last one stays",
        handlers={_T.__setitem__: _setitem, _T.index_copy_: _index_copy},
    ),
    Rule(
        operations=("u.index_add_(0, index, rows)",),
        result="rows added in place, in the order of `index`",
        handlers={_T.index_add_: _index_add},
    ),
    Rule(
        operations=("u.detach()",),
        result="another name for the same table, without gradient",
        handlers={_T.detach: _detach},
    ),
    Rule(
        operations=("u.cpu()",),
        result="a plain tensor over the same memory",
        handlers={_T.cpu: _plain},
    ),
    Rule(
        operations=("u.contiguous()", "u.pin_memory()"),
        result="u itself: it is that already",
        handlers={_T.contiguous: _same, _T.pin_memory: _same},
    ),
    Rule(
        operations=("u.share_memory_()", "u.is_shared()"),
        result="u itself, moved to where other processes see what is written; whether it was",
        handlers={_T.share_memory_: _share, _T.is_shared: _is_shared},
    ),
    Rule(
        operations=("u.clone()", "copy.deepcopy(u)"),
        result="WholeTableError: it would copy the whole table",
        handlers={_T.clone: _clone, torch.clone: _clone},
    ),
    Rule(
        operations=("u.to(device)", "u.cuda()"),
        result="u itself on the CPU or if its rows go to that device, else WholeTableError",
        handlers={_T.to: _to, _T.cuda: _cuda},
    ),
    Rule(
        operations=("u[5]", "u[2:7]"),
        result="of a table in memory a view on the CPU, of one in a file the rows",
        handlers={},
    ),
    Rule(
        operations=("u + x", "u @ x", "torch.where(mask, u, x)", "u.scatter_(0, index, x)"),
        result="with `x` or another operand on a GPU, there, through an alias of the same memory; "
        "WholeTableError if `u` needs a gradient or CUDA refused its memory",
        handlers={},
    ),
    Rule(
        operations=("u.to(dtype)", "u.half()", "u.float()", "u.double()", "u.bfloat16()"),
        result="WholeTableError if it would copy the whole table, else u itself",
        handlers={
            _T.half: _converted(torch.float16),
            _T.float: _converted(torch.float32),
            _T.double: _converted(torch.float64),
            _T.bfloat16: _converted(torch.bfloat16),
        },
    ),
)

HANDLERS: dict[Operation, Operation] = {
    function: handler for rule in RULES for function, handler in rule.handlers.items()
}


def placement_table() -> str:
    """The rules as a table in Markdown, as the documentation shows them."""
    lines = ["| operation | result |", "|---|---|"]
    for rule in RULES:
        lines.append(f"| {', '.join(f'`{each}`' for each in rule.operations)} | {rule.result} |")
    lines.append("| everything else | as on any tensor over the same memory |")
    return "\n".join(lines)
