"""Operators of a step graph as calls with all arguments in place, which every step makes again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.errors import PenstockError
from penstock.executor._device import Device
from penstock.executor._entry_points import entry_point
from penstock.executor._numbers import Live, Numbers
from penstock.graph import TENSOR_ALIGNMENT_BYTES, Operator
from penstock.graph.encoding import (
    CONSTANT,
    EMPTY,
    FULL,
    GET_RNG_STATE,
    OWN_TARGETS,
    SCALAR,
    SET_RNG_STATE,
    flat_results,
    random_state,
    resolve,
    set_random_state,
)
from penstock.graph.executable import COPIES, has_wrong_out_variant, out_variant

Call = Callable[[], object]

ALIGNMENT_BYTES = TENSOR_ALIGNMENT_BYTES["cpu"]  # at least, on any device


class Result(NamedTuple):
    """A result that has a place.

    Attributes:
        number: Which of the operator's outputs.
        tensor: Where it goes.
    """

    number: int
    tensor: torch.Tensor


@functools.cache
def looks_at_storages(target: str) -> bool:
    """Whether an operator may look at the storages of its operands past the views of them.

    Example:
        >>> looks_at_storages("aten.as_strided_copy.default"), looks_at_storages("aten.add.Tensor")
        (True, False)
    """
    if target in OWN_TARGETS:
        return False
    names = [each.name for each in resolve(target)._schema.arguments]
    return "storage_offset" in names or not target.startswith("aten.")


def call_of(
    operator: Operator,
    target: str,
    args: list[Any],
    kwargs: dict[str, Any],
    results: list[Result],
    live: Live,
    numbers: Numbers,
    scalar_slot: int | None,
) -> Call | None:
    """Return what runs an operator.

    Args:
        operator: The operator.
        target: What runs: its target, or what it runs as when it runs again.
        args: Its arguments, with tensors in their places.
        kwargs: Its keyword arguments, likewise.
        results: The results that it makes in memory of their own.
        live: Numbers that change from step to step.
        numbers: The step's numbers, also those that `SCALAR` reads.
        scalar_slot: Where they have this one, for `SCALAR`.

    Returns:
        A call without arguments; None where nothing has to be done.
    """
    if target in OWN_TARGETS and target != FULL:
        return _own_call(target, args, results, numbers.now, scalar_slot)
    if target == FULL:
        function = results[0].tensor.fill_
    elif target in COPIES and results:
        function = results[0].tensor.copy_
        del args[1:]
        kwargs.clear()
    else:
        complete = len(results) == len(operator.outputs) and not has_wrong_out_variant(operator)
        variant = out_variant(target) if complete else None
        if results and variant is not None:
            target, names = variant
            kwargs.update(zip(names, (result.tensor for result in results), strict=True))
        with live.filled():
            function = entry_point(target, args, kwargs)
        if results and variant is None:
            function = _copying(operator, function, results)
    if not (live.reads or live.places):
        return functools.partial(function, *args, **kwargs)
    return numbers.call(function, args, kwargs, live)


def _copying(
    operator: Operator, function: Callable[..., Any], results: list[Result]
) -> Callable[..., None]:
    """Return a function that copies what another one makes to the places of the results."""
    if len(operator.outputs) == 1:
        place = results[0].tensor

        def copy_one(*args: Any, **kwargs: Any) -> None:
            made = function(*args, **kwargs)
            if not isinstance(made, torch.Tensor):  # a list of one, of a `foreach` taken apart
                (made,) = made
            if made.shape != place.shape or made.dtype != place.dtype:
                raise _broken_promise(operator, 0, made)
            place.copy_(made)

        return copy_one

    def copy_all(*args: Any, **kwargs: Any) -> None:
        made = flat_results(function(*args, **kwargs))
        for index, place in results:
            each = made[index]
            if each.shape != place.shape or each.dtype != place.dtype:
                raise _broken_promise(operator, index, each)
            place.copy_(each)

    return copy_all


def _broken_promise(operator: Operator, index: int, made: torch.Tensor) -> PenstockError:
    view = operator.outputs[index]
    assert view is not None
    return PenstockError(
        f"{operator.target} ({operator.name}) gave {made.dtype} of shape {tuple(made.shape)} and "
        f"strides {made.stride()}, and its fake kernel had promised {view.dtype} of {view.shape} "
        f"and {view.stride}: this operator cannot be planned with this torch"
    )


def _own_call(
    target: str,
    args: list[Any],
    results: list[Result],
    numbers: list[Any],
    scalar_slot: int | None,
) -> Call | None:
    if target == EMPTY:
        return None
    if target == CONSTANT:
        place = results[0].tensor
        if not place.numel():
            return None
        constant = torch.frombuffer(args[0], dtype=place.dtype).view(place.shape)
        return functools.partial(place.copy_, constant)
    if target == GET_RNG_STATE:
        place = results[0].tensor
        return lambda: place.copy_(random_state(*args))
    if target == SET_RNG_STATE:
        return functools.partial(set_random_state, *args)
    assert target == SCALAR and scalar_slot is not None
    tensor, slot = args[0], scalar_slot

    def keep() -> None:
        numbers[slot] = tensor.item()

    return keep


def random_again(call: Call, state: list[torch.Tensor], device: Device) -> tuple[Call, Call]:
    """Return an operator that draws random numbers as it runs first, and as it runs again.

    Args:
        call: What runs it.
        state: Empty; holds the generator's state of the first run.
        device: Whose generator.
    """

    def first() -> None:
        state[:] = [device.random_state()]
        call()

    def again() -> None:
        now = device.random_state()
        device.set_random_state(state[0])
        call()
        device.set_random_state(now)

    return first, again


def checked(operator: Operator, call: Call, results: list[Result]) -> Call:
    """Return a call that also compares what comes with what was promised, for the first run.

    A kernel that makes more than its fake twin has said would write over its neighbours.
    """

    def run() -> None:
        call()
        for index, place in results:
            view = operator.outputs[index]
            assert view is not None
            if (tuple(place.shape), place.stride()) != (view.shape, view.stride):
                raise _broken_promise(operator, index, place)

    return run
