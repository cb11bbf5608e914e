"""What is different about a table, operation by operation: one list for code, docs and tests.

Everything that is not in the list runs as on any tensor over the same memory (`_operands.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn import functional

from penstock.unified._devices import GPU
from penstock.unified._operands import Operation, run
from penstock.unified._row_operations import (
    embedding,
    embedding_bag,
    getitem,
    index_add,
    index_copy,
    index_select,
    setitem,
)
from penstock.unified._table_tensor import copies_everything
from penstock.unified._tables import FileTable, HostTable
from penstock.unified._tensor import HANDLERS, FileTensor, UnifiedTensor, tensor_over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens when one of `operations` meets a table."""

    operations: tuple[str, ...]
    """As a user writes them, `u` being the table."""
    result: str
    """What comes out, and what moves."""
    handlers: dict[Operation, Operation]
    """PyTorch's function to ours, which gets PyTorch's as its first argument."""


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


def _set_data(func: Operation, tensor: Any, data: Any) -> None:
    if isinstance(tensor, UnifiedTensor):
        if isinstance(data, UnifiedTensor) and data._table is tensor._table:
            return  # as a module's `to` does with parameters that are there already
        raise TypeError(
            "u.data = x: a table keeps its memory or its file. Write rows of it, u[index] = rows, "
            "or make another one: penstock.unify(x)"
        )
    func(tensor, data)


def _copy(func: Operation, input: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a table in a file onto itself, as where a module loads the state that it had."""
    if isinstance(input, FileTensor) and isinstance(source, FileTensor):
        target, origin = input._table, source._table
        assert isinstance(target, FileTable) and isinstance(origin, FileTable)
        if target.layout.is_same_table(origin.layout):
            return input
    return run(func, input, source, *args, **kwargs)


def _to_python(func: Operation, table: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(table, FileTensor):
        raise copies_everything(table, f"{func.__name__}()", "gather rows of it")
    return run(func, table, *args, **kwargs)


def _type(func: Operation, table: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(dtype, torch.dtype):  # a question, or the name of a legacy type
        return run(func, table, dtype, *args, **kwargs)
    _refuse_dtype(table, dtype)
    return table


def _type_as(func: Operation, table: Any, other: torch.Tensor) -> Any:
    return _to(func, table, other) if isinstance(table, UnifiedTensor) else run(func, table, other)


def _new_beside(func: Operation, table: UnifiedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a tensor with the table's dtype; those in files have no memory to make it like."""
    like = torch.empty(0, dtype=table.dtype, device=table.output_device)
    return func(like, *args, **kwargs)


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
_NEW = (_T.new, _T.new_tensor, _T.new_empty, _T.new_empty_strided, _T.new_full, _T.new_ones)
_NEW += (_T.new_zeros,)

RULES = (
    Rule(
        operations=("u[index]", "u[mask]", "u[list]"),
        result="rows, copied by Penstock; sparse gradient",
        handlers={_T.__getitem__: getitem},
    ),
    Rule(
        operations=("torch.index_select(u, 0, index)", "u.index_select(0, index)"),
        result="rows, copied by Penstock; sparse gradient",
        handlers={_INDEX_SELECT: index_select, _T.index_select: index_select},
    ),
    Rule(
        operations=("F.embedding(index, u)", "nn.Embedding.from_pretrained(u)"),
        result="rows, copied by Penstock; sparse gradient, whatever `sparse` says; `max_norm` and "
        "`scale_grad_by_freq` row by row",
        handlers={functional.embedding: embedding},
    ),
    Rule(
        operations=("F.embedding_bag(index, u)",),
        result="of a table in a file, or one that requires a gradient: its rows are gathered, each "
        "once; sparse gradient, whatever `sparse` says",
        handlers={functional.embedding_bag: embedding_bag},
    ),
    Rule(
        operations=("u[index] = rows", "u.index_copy_(0, index, rows)"),
        result="rows written in place; of several for one row the last one stays",
        handlers={_T.__setitem__: setitem, _T.index_copy_: index_copy},
    ),
    Rule(
        operations=("u.index_add_(0, index, rows)",),
        result="rows added in place, in the order of `index`",
        handlers={_T.index_add_: index_add},
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
        operations=("u.numpy()", "u.tolist()"),
        result="of the same memory; WholeTableError if the table is in a file",
        handlers={_T.numpy: _to_python, _T.tolist: _to_python, _T.__array__: _to_python},
    ),
    Rule(
        operations=("u.copy_(x)",),
        result="as on any tensor; a table in a file takes only itself, else WholeTableError",
        handlers={_T.copy_: _copy},
    ),
    Rule(
        operations=("u.data = x",),
        result="TypeError; and `x.data = u` of a table in a file is a RuntimeError of PyTorch's",
        handlers={_T.data.__set__: _set_data},  # type: ignore[attr-defined]
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
        operations=("u.new(...)", "u.new_zeros(size)", "u.new_tensor(data)"),
        result="a plain tensor of the table's dtype, where its rows go",
        handlers=dict.fromkeys(_NEW, _new_beside),
    ),
    Rule(
        operations=("u[5]", "u[2:7]", "u[index, 1:3]"),
        result="of a table in a file, or one that requires a gradient, parts of gathered rows; "
        "sparse gradient. Else as on any tensor: the first two are views",
        handlers={},
    ),
    Rule(
        operations=("u + x", "u @ x", "torch.where(mask, u, x)", "u.scatter_(0, index, x)"),
        result="with `x` or another operand on a GPU, there, through an alias of the same memory; "
        "WholeTableError if `u` needs a gradient or CUDA refused its memory",
        handlers={},
    ),
    Rule(
        operations=("u.to(dtype)", "u.type(dtype)", "u.half()", "u.float()", "u.long()"),
        result="WholeTableError if it would copy the whole table, else u itself",
        handlers={
            _T.half: _converted(torch.float16),
            _T.float: _converted(torch.float32),
            _T.double: _converted(torch.float64),
            _T.bfloat16: _converted(torch.bfloat16),
            _T.long: _converted(torch.int64),
            _T.int: _converted(torch.int32),
            _T.short: _converted(torch.int16),
            _T.char: _converted(torch.int8),
            _T.byte: _converted(torch.uint8),
            _T.bool: _converted(torch.bool),
            _T.type: _type,
            _T.type_as: _type_as,
        },
    ),
)

for _rule in RULES:
    HANDLERS.update(_rule.handlers)


def placement_table() -> str:
    """The rules as a table in Markdown, as the documentation shows them."""
    lines = ["| operation | result |", "|---|---|"]
    for rule in RULES:
        lines.append(f"| {', '.join(f'`{each}`' for each in rule.operations)} | {rule.result} |")
    lines.append("| everything else | as on any tensor over the same memory |")
    return "\n".join(lines)
