"""Entry points: torch's own functions in the place of the registry's operators, which are slower.

An operator of the registry (`torch.ops.aten.mul.out`) reads its schema at every call; torch's own
functions (`torch.mul`) have their arguments compiled in. Measured with 8 x 8 floats they take 0.4
to 1.3 microseconds less of 1.4 to 3.0 (mul, sqrt, addmm, addcdiv; sum 3.5 less, lerp nothing): a
tenth of a step of the smallest tensors. That both run the same operator is tried, not guessed: both
are called with the very arguments, and the call that torch is about to make is caught before it is
made. Only if the two are the same is the function used. What was found is remembered for arguments
of the same forms, as repeated layers have them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from penstock.compat.autograd import below_autograd
from penstock.compat.dispatch import (
    TensorBase,
    TorchDispatchMode,
    functions,
    nn_functions,
    tree_leaves,
)
from penstock.graph.encoding import resolve

Function = Callable[..., Any]
_MOST_KNOWN = 4096
# By operator and forms of its arguments; None for the registry's, which may be registered anew.
_known: dict[Any, Function | None] = {}


def find_entry_point(target: str, args: list[Any], kwargs: dict[str, Any]) -> Function:
    """Return the quickest function that runs an operator with these arguments.

    Example:
        >>> ones = torch.ones(2)
        >>> find_entry_point("aten.add_.Tensor", [ones, 2], {})(ones, 2)
        tensor([3., 3.])

    Args:
        target: The operator.
        args: Its positional arguments; numbers may change afterwards, tensors not.
        kwargs: Its keyword arguments; places of results are renamed to `out` if the function has
            that argument.
    """
    key = target, _form_of(args), _form_of(list(kwargs.items()))
    function = _known.get(key)
    if function is None and key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        function = _known[key] = _find_function(target, args, kwargs)
    if function is None:
        return resolve(target)._op
    renamed = _rename_places(target, kwargs)
    if renamed is not kwargs:
        kwargs.clear()
        kwargs.update(renamed)
    return function


def _find_function(target: str, args: list[Any], kwargs: dict[str, Any]) -> Function | None:
    """Return torch's function that runs the operator; None if there is none."""
    expected = _catch_call(functools.partial(resolve(target)._op, *args, **kwargs))
    if expected is not None:
        for candidate in _find_candidates(target, args, kwargs):
            found = _catch_call(candidate)
            if found is not None and _is_same_call(found, expected):
                return candidate.func
    return None


def _form_of(value: Any) -> Any:
    """Return what tells apart arguments that torch may treat otherwise; equal for equal ones."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, value.layout, tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(_form_of(each) for each in value)
    return type(value), value


def _find_candidates(
    target: str, args: list[Any], kwargs: dict[str, Any]
) -> Iterator[functools.partial[Any]]:
    """Yield torch's functions of the operator's name."""
    namespace, name, _ = target.split(".")
    if namespace != "aten":
        return
    kwargs = _rename_places(target, kwargs)
    homes = (TensorBase,) if name.endswith("_") else (functions, nn_functions)
    for home in homes:
        function = getattr(home, name, None)
        if function is not None:
            yield functools.partial(function, *args, **kwargs)


def _rename_places(target: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as torch's functions have them: with the places in `out`."""
    outs = _names_of_places(target)
    if not outs or any(each not in kwargs for each in outs):
        return kwargs
    places = [kwargs[each] for each in outs]
    rest = {key: value for key, value in kwargs.items() if key not in outs}
    return {**rest, "out": tuple(places) if len(places) > 1 else places[0]}


@functools.cache
def _names_of_places(target: str) -> tuple[str, ...]:
    """Return the names of arguments for places of results, where torch's function has `out`."""
    arguments = resolve(target)._schema.arguments
    is_in_place = target.split(".")[1].endswith("_")
    return () if is_in_place else tuple(each.name for each in arguments if each.is_out)


class _Caught(Exception):
    """The end of a call before anything runs."""


class _Catcher(TorchDispatchMode):
    """A mode that notes the first call of an operator, and stops it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.call = (func, args, kwargs or {})
        raise _Caught


def _catch_call(candidate: Function) -> tuple[Any, Any, Any] | None:
    """Return the first operator that torch would run, and its arguments; None if it refuses."""
    catcher = _Catcher()
    # A refusal is an answer, whatever torch's parsers and kernels raise.
    with contextlib.suppress(Exception), below_autograd(), catcher:
        candidate()
    return getattr(catcher, "call", None)


def _is_same_call(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    if one[0] is not other[0]:
        return False
    ours, theirs = (_list_arguments(*each) for each in (one, other))
    return len(ours) == len(theirs) and all(map(_is_same_argument, ours, theirs))


def _list_arguments(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return names and arguments in the order of the schema; lists and tuples taken apart."""
    arguments = operator._schema.arguments
    found = {each.name: each.default_value for each in arguments if each.has_default_value()}
    found |= dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return tree_leaves([(each.name, found.get(each.name)) for each in arguments])


def _is_same_argument(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and one == other
    if one is other:
        return True
    # Python numbers that torch has wrapped in tensors.
    are_numbers = one.dim() == 0 and other.dim() == 0
    return are_numbers and one.dtype == other.dtype and one.item() == other.item()
