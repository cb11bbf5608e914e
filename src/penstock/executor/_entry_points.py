"""The shortest way from Python to an operator.

An operator of the registry (`torch.ops.aten.mul.out`) reads its schema at every call; torch's own
functions (`torch.mul`) have their arguments compiled in and take about a microsecond less. Which
operator such a function ends at is not guessed: both are called with the very arguments, and what
torch is about to run is caught before it runs. Only where that is the same is the function taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.encoding import resolve

Function = Callable[..., Any]


class Entry(NamedTuple):
    """A function with its positional and keyword arguments."""

    function: Function
    args: list[Any]
    kwargs: dict[str, Any]


def entry_point(target: str, args: list[Any], kwargs: dict[str, Any]) -> Function:
    """Return the quickest way to run an operator with these arguments.

    Example:
        >>> ones = torch.ones(2)
        >>> entry_point("aten.add_.Tensor", [ones, 2], {})(ones, 2)
        tensor([3., 3.])

    Args:
        target: The operator.
        args: Its positional arguments; numbers may change afterwards, tensors not.
        kwargs: Its keyword arguments; places of results are renamed to `out` where the function
            wants that.

    Returns:
        A function that runs just this operator.
    """
    registered = Entry(resolve(target)._op, args, dict(kwargs))
    wanted = _about_to_run(registered)
    if wanted is None:
        return registered.function
    for candidate in _candidates(target, args, dict(kwargs)):
        found = _about_to_run(candidate)
        if found is not None and _same(found, wanted):
            kwargs.clear()
            kwargs.update(candidate.kwargs)
            return candidate.function
    return registered.function


def _candidates(target: str, args: list[Any], kwargs: dict[str, Any]) -> Iterator[Entry]:
    """Functions of torch that have the operator's name."""
    namespace, name, _ = target.split(".")
    if namespace != "aten":
        return
    outs = [each.name for each in resolve(target)._schema.arguments if each.is_out]
    if outs and all(each in kwargs for each in outs) and not name.endswith("_"):
        places = [kwargs[each] for each in outs]
        rest = {key: value for key, value in kwargs.items() if key not in outs}
        kwargs = {**rest, "out": tuple(places) if len(places) > 1 else places[0]}
    homes = ("TensorBase",) if name.endswith("_") else ("_VariableFunctions", "_nn")
    for home in homes:
        function = getattr(getattr(torch._C, home), name, None)
        if function is not None:
            yield Entry(function, args, kwargs)


class _Caught(Exception):
    """Ends a call before anything runs."""


class _Catcher(TorchDispatchMode):
    """Notes what is about to run, and stops it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.call = (func, args, kwargs or {})
        raise _Caught


def _about_to_run(entry: Entry) -> tuple[Any, Any, Any] | None:
    """What torch would run first, with which arguments; None if it refuses."""
    catcher = _Catcher()
    # A refusal is an answer, whatever torch's parsers and kernels raise.
    with contextlib.suppress(Exception), torch._C._AutoDispatchBelowAutograd(), catcher:
        entry.function(*entry.args, **entry.kwargs)
    return getattr(catcher, "call", None)


def _same(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    if one[0] is not other[0]:
        return False
    schema = one[0]._schema
    ours, theirs = (_by_name(schema, args, kwargs) for _, args, kwargs in (one, other))
    return ours.keys() == theirs.keys() and all(_alike(ours[key], theirs[key]) for key in ours)


def _by_name(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    found = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    found.update(zip((each.name for each in schema.arguments), args, strict=False))
    return found | kwargs


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other or (_is_number(one) and _is_number(other) and _number(one, other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and one == other


def _is_number(value: Any) -> bool:
    """Whether it is a Python number that torch has wrapped in a tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _number(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.item() == other.item()
