"""Accesses of torch's operators, for functions on the CPU that declare none of their own.

Each operator is taken to read its operands and to write its results once and in step, as long
loops over memory do; views move nothing. Values have the addresses that the allocator gave them, so
that memory that is freed and taken again is in the caches. Products are counted in operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.compat.dispatch import TorchDispatchMode, tree_leaves
from penstock.iomodel._access import AccessTrace

_aten = torch.ops.aten
_ALLOCATIONS = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted),
    *(_aten.new_empty, _aten.new_empty_strided),
}  # they write nothing


class OperatorTrace(TorchDispatchMode):
    """Collects the accesses of the operators that run under it."""

    def __init__(self, trace: AccessTrace) -> None:
        super().__init__()
        self.trace = trace
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add what it reads and writes."""
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        written, outputs = _find_written(func, args, kwargs)
        operands = _find_tensors((args, {k: v for k, v in kwargs.items() if k not in outputs}))
        storages = {_storage(each) for each in [*operands, *written]}
        written += [each for each in _find_tensors(results) if _storage(each) not in storages]
        if written and func._overloadpacket not in _ALLOCATIONS:  # and no view
            self.trace.stream(_distinct(operands), _distinct(written))
            self.num_operators += 1
        return results


def trace_operators(function: Callable[[], object]) -> tuple[AccessTrace, int, int]:
    """Run a function and return its operators' accesses, their number, and its operations.

    Args:
        function: Takes nothing; what runs in C++ outside of torch's operators is not seen.
    """
    trace = AccessTrace()
    with FlopCounterMode(display=False) as flops, OperatorTrace(trace) as operators:
        result = function()
    if inspect.isgenerator(result) or inspect.iscoroutine(result):
        raise TypeError(
            f"the function returned a {type(result).__name__}, whose code has not run; pass a "
            "function that runs it to its end"
        )
    return trace, operators.num_operators, flops.get_total_flops()


def _find_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors that have memory; those of a sparse tensor are its indices and values."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return [part for each in tensors for part in _find_parts(each)]


def _find_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    match tensor.layout:
        case torch.strided:
            return [tensor]
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    raise TypeError(
        f"the function uses a tensor of the layout {tensor.layout}, whose bytes are not known; use "
        "a dense or a sparse one, or declare the function's accesses with declare_access"
    )


def _find_written(
    func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], set[str]]:
    """Return the operands that an operator writes to, and the names of those it does not read."""
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    written = [
        each for each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    tensors = _find_tensors([given[each.name] for each in written if each.name in given])
    return tensors, {each.name for each in written if each.is_out}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without those that begin at the same address with the same shape."""
    seen = {(each.data_ptr(), each.shape, each.stride()): each for each in tensors}
    return list(seen.values())
