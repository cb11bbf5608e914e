"""Copies of rows that a key chooses for which PyTorch has views: changing them in place raises.

`weight[2].zero_()` writes to a plain tensor, and to a table in memory. Rows of a table in a file,
or of one whose gradients are recorded, are gathered: the write would be lost. PyTorch refuses it
where gradients are recorded, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from penstock.compat.dispatch import without_torch_function


class RowCopy(torch.Tensor):
    """Rows of a table, to read; what is computed from them are plain tensors.

    The views of them are as they are.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            if torch.compiler.is_dynamo_compiling():  # traced: versions are not numbers there
                return func(*args, **(kwargs or {}))
            kwargs = kwargs or {}
            copies = _find_copies((*args, *kwargs.values()))
            versions = [each._version for each in copies]
            out = func(*args, **kwargs)
            if [each._version for each in copies] != versions:
                raise RuntimeError(
                    f"{func.__name__} changes rows in place, but they are a copy of those of the "
                    "table: write u[key] = rows, or clone() the rows to change them alone"
                )
            return _mark_views(out, copies)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return self.as_subclass(torch.Tensor).__repr__(tensor_contents=tensor_contents)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _find_copies(values: tuple[Any, ...]) -> list[RowCopy]:
    """Return the copies among arguments, also within lists of tensors."""
    found = [each for each in values if isinstance(each, RowCopy)]
    for each in values:
        if isinstance(each, list | tuple):
            found += [inner for inner in each if isinstance(inner, RowCopy)]
    return found


def _mark_views(out: Any, copies: list[RowCopy]) -> Any:
    """Return a function's result, as copies of rows where it is a view of these."""
    if isinstance(out, list | tuple) and type(out) in (list, tuple):
        return type(out)(_mark_views(each, copies) for each in out)
    if type(out) is not torch.Tensor or out.layout != torch.strided:
        return out
    place = out.untyped_storage()._cdata
    for each in copies:
        if each.untyped_storage()._cdata == place and out is not each._base:
            return out.as_subclass(RowCopy)
    return out


def _change_clone(name: str) -> Callable[[RowCopy, Any], torch.Tensor]:
    change = getattr(torch.Tensor, name)

    def method(self: RowCopy, other: Any) -> torch.Tensor:
        return change(self.as_subclass(torch.Tensor).clone(), other)

    return method


# `u[2] += 1` writes the sum by `u[2] = ...` afterwards.
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    setattr(RowCopy, f"__i{_name}__", _change_clone(f"__i{_name}__"))


def _share(rows: RowCopy) -> Any:
    return reduce_tensor(rows.as_subclass(torch.Tensor))


ForkingPickler.register(RowCopy, _share)
