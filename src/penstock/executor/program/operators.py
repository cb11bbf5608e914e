"""Operators of a step graph as calls with all arguments in place, made again in each step.

A result goes straight to its place if torch has an operator that writes there (`out=`); else it is
copied there, and its memory is workspace (`penstock.graph.executable`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.errors import PenstockError
from penstock.executor.device.base import Device
from penstock.executor.program._entry_points import find_entry_point
from penstock.executor.program.scalars import Scalars, fill_in_scalars, has_scalars
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
from penstock.graph.fsdp.collectives import TO_PLACES

Call = Callable[[], object]

ALIGNMENT_BYTES = TENSOR_ALIGNMENT_BYTES["cpu"]  # at least, on any device


@functools.cache
def reads_storages(target: str) -> bool:
    """Return whether an operator may read its operands' storages beyond the views of them.

    Example:
        >>> reads_storages("aten.as_strided_copy.default"), reads_storages("aten.add.Tensor")
        (True, False)
    """
    if target in OWN_TARGETS:
        return False
    names = [each.name for each in resolve(target)._schema.arguments]
    return "storage_offset" in names or not target.startswith("aten.")


class Bindings(NamedTuple):
    """The arguments and results of an operator at one position, as tensors in their places."""

    args: list[Any]
    kwargs: dict[str, Any]
    results: dict[int, torch.Tensor]  # by output; only those in memory of their own


def make_call(
    operator: Operator, bindings: Bindings, scalars: Scalars, scalar_slot: int | None
) -> Call | None:
    """Return a call that runs an operator; None if there is nothing to do. A `SCALAR` operator
    writes to `scalar_slot`.
    """
    args, kwargs, results = bindings
    target = operator.target
    if target in OWN_TARGETS and target != FULL:
        return _make_own_call(target, args, results, scalars.numbers, scalar_slot)
    if target == FULL:
        function = results[0].fill_
    elif target in TO_PLACES:
        function = functools.partial(TO_PLACES[target], *results.values())
    elif target in COPIES and results:
        function = results[0].copy_
        del args[1:]
        kwargs.clear()
    else:
        complete = len(results) == len(operator.outputs) and not has_wrong_out_variant(operator)
        variant = out_variant(target) if complete else None
        if results and variant is not None:
            target, names = variant
            kwargs.update(zip(names, results.values(), strict=True))
        trial_args, trial_kwargs = fill_in_scalars((args, kwargs))
        function = find_entry_point(target, trial_args, trial_kwargs)
        # The entry point's names, as of `out`, with the scalar expressions.
        scalar_kwargs = {name: value for name, value in kwargs.items() if has_scalars(value)}
        kwargs = trial_kwargs | scalar_kwargs
        if results and variant is None:
            function = _copy_results(operator, function, results)
    if not has_scalars((args, kwargs)):
        return functools.partial(function, *args, **kwargs)
    return scalars.compile_call(function, args, kwargs)


def _copy_results(
    operator: Operator, function: Callable[..., Any], results: dict[int, torch.Tensor]
) -> Callable[..., None]:
    """Return a function that copies the results of another one to their places."""
    if len(operator.outputs) == 1:
        place = results[0]

        def copy_one(*args: Any, **kwargs: Any) -> None:
            made = function(*args, **kwargs)
            if not isinstance(made, torch.Tensor):  # a list of one, of a `foreach` taken apart
                (made,) = made
            if not _is_like(made, place):
                raise _make_promise_error(operator, 0, made)
            place.copy_(made)

        return copy_one

    def copy_all(*args: Any, **kwargs: Any) -> None:
        made = flat_results(function(*args, **kwargs))
        for index, place in results.items():
            each = made[index]
            if not _is_like(each, place):
                raise _make_promise_error(operator, index, each)
            place.copy_(each)

    return copy_all


def _is_like(made: torch.Tensor, place: torch.Tensor) -> bool:
    return (made.shape, made.dtype, made.device) == (place.shape, place.dtype, place.device)


def _make_promise_error(operator: Operator, index: int, made: torch.Tensor) -> PenstockError:
    view = operator.outputs[index]
    assert view is not None
    return PenstockError(
        f"{operator.target} ({operator.name}) gave {made.dtype} of shape {tuple(made.shape)} and "
        f"strides {made.stride()} on {made.device}, and its fake kernel had promised {view.dtype} "
        f"of {view.shape} and {view.stride}, or another device: this operator cannot be planned "
        "with this torch"
    )


def _make_own_call(
    target: str,
    args: list[Any],
    results: dict[int, torch.Tensor],
    numbers: list[Any],
    scalar_slot: int | None,
) -> Call | None:
    if target == EMPTY:
        return None
    if target == CONSTANT:
        place = results[0]
        if not place.numel():
            return None
        constant = torch.frombuffer(args[0], dtype=place.dtype).view(place.shape)
        return functools.partial(place.copy_, constant)
    if target == GET_RNG_STATE:
        place = results[0]
        return lambda: place.copy_(random_state(*args))
    if target == SET_RNG_STATE:
        return functools.partial(set_random_state, *args)
    assert target == SCALAR and scalar_slot is not None
    tensor, slot = args[0], scalar_slot

    def keep() -> None:
        numbers[slot] = tensor.item()

    return keep


def make_random_calls(call: Call, state: list[torch.Tensor], device: Device) -> tuple[Call, Call]:
    """Return the calls of a random operator's first run, before which the generator's state is
    kept, and of its recomputation.
    """

    def first() -> None:
        state[:] = [device.get_random_state()]
        call()

    def again() -> None:
        now = device.get_random_state()
        device.set_random_state(state[0])
        call()
        device.set_random_state(now)

    return first, again


def check_results(operator: Operator, call: Call, results: dict[int, torch.Tensor]) -> Call:
    """Return a call that also compares its results with the fake kernel's, for the first run.

    A kernel whose result is larger than its fake kernel's would write over other values.
    """

    def run() -> None:
        call()
        for index, place in results.items():
            view = operator.outputs[index]
            assert view is not None
            if (tuple(place.shape), place.stride()) != (view.shape, view.stride):
                raise _make_promise_error(operator, index, place)

    return run
