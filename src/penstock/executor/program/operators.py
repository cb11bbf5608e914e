"""Operators of a step graph as calls with all arguments in place, made again in each step.

A result goes straight to its place if torch has an operator that writes there (`out=`). If that
operator allocates and copies (`torch.Tag.generated`), or there is none, the result is copied there
and its memory is workspace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.compat.dispatch import OpOverload
from penstock.errors import PenstockError
from penstock.executor.device.base import Device
from penstock.executor.program._entry_points import find_entry_point
from penstock.executor.program.scalars import Scalars, fill_in_scalars, has_scalars
from penstock.graph import TENSOR_ALIGNMENT_BYTES, Operator, Phase, StepGraph
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

Call = Callable[[], object]

ALIGNMENT_BYTES = TENSOR_ALIGNMENT_BYTES["cpu"]  # at least, on any device

_COPIES = ("aten.clone.default", "aten._to_copy.default")
"""Operators whose result is their operand, perhaps in another dtype or layout."""


_MISLED_BY_LAYOUTS = (
    "aten.log_sigmoid_forward.default",
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten._batch_norm_with_update.default",
    "aten.max_unpool2d.default",
    "aten.max_unpool3d.default",
)
"""Operators whose `out=` variants are wrong, or lay the result out anew, if the operand is not
dense in one of torch's memory formats; `tests/executor/test_op_db.py` finds them."""


_ALWAYS_MISLED = _MISLED_BY_LAYOUTS[-2:]
"""Those that are so for all operands."""


_WORKSPACE_MARK = "workspace_holds_results"  # in the metadata of graphs that `executable` made


class Result(NamedTuple):
    """A result with its place.

    Attributes:
        number: The index of the operator's output.
        tensor: The place.
    """

    number: int
    tensor: torch.Tensor


@functools.cache
def writes_in_place(target: str) -> bool:
    """Return whether results of an operator need no memory but their place.

    Example:
        >>> writes_in_place("aten.add.Tensor"), writes_in_place("aten.native_layer_norm.default")
        (True, False)
    """
    return target in OWN_TARGETS or target in _COPIES or _out_variant(target) is not None


def copies_results(operator: Operator) -> bool:
    """Return whether an operator's results are made elsewhere and copied to their places."""
    return bool(operator.creates) and not (
        writes_in_place(operator.target) and not _is_misled(operator)
    )


def _is_misled(operator: Operator) -> bool:
    if operator.target not in _MISLED_BY_LAYOUTS:
        return False
    view = operator.args[0]
    is_dense = (view.shape, view.stride) in _dense_layouts(view.shape)
    return not is_dense or operator.target in _ALWAYS_MISLED


def _dense_layouts(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return a shape with its strides in each memory format."""
    formats = [torch.contiguous_format]
    if len(shape) in (4, 5):
        formats.append(torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    made = (torch.empty(shape, device="meta").to(memory_format=each) for each in formats)
    return [(shape, tensor.stride()) for tensor in made]


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


def executable(graph: StepGraph) -> StepGraph:
    """Return a step as this executor runs it best: plan this one.

    Operators whose results are copied to their places have workspace for these results, so that a
    budget holds for all that a step allocates. No parameter is updated before the loss is known, so
    that a step whose loss is NaN can be undone. And storages take whole multiples of 64 bytes (512
    on a GPU), so that addresses are such as torch gives, however small the step is.

    Example:
        >>> graph = executable(penstock.capture(model, optimizer, batch))  # doctest: +SKIP
        >>> plan = penstock.plan(graph, device_memory="4GiB", store="/mnt/nvme")  # doctest: +SKIP

    Args:
        graph: A captured step.

    Returns:
        The same operators and values; of such a graph itself, an equal one.
    """
    loss = None if graph.loss is None else graph.producers[graph.loss.value]
    operators = []
    for index, operator in enumerate(graph.operators):
        after = operator.after
        if operator.phase is Phase.OPTIMIZER and operator.mutates and loss is not None:
            after = after if loss in after or loss >= index else (*after, loss)
        mark = _WORKSPACE_MARK in graph.metadata
        operators.append(
            dataclasses.replace(
                operator,
                after=after,
                workspace_bytes=operator.workspace_bytes
                if mark
                else workspace_bytes(graph, operator),
            )
        )
    metadata = {**graph.metadata, _WORKSPACE_MARK: True}
    unit = TENSOR_ALIGNMENT_BYTES[graph.device]
    storages = tuple(
        dataclasses.replace(storage, num_bytes=-(-storage.num_bytes // unit) * unit)
        for storage in graph.storages
    )
    return dataclasses.replace(
        graph, operators=tuple(operators), storages=storages, metadata=metadata
    )


def workspace_bytes(graph: StepGraph, operator: Operator) -> int:
    """Return what an operator needs beyond its operands and its results' places."""
    if not operator.creates or _has_places_for_all(operator):
        return operator.workspace_bytes
    return operator.workspace_bytes + sum(map(graph.num_bytes, operator.creates))


def declared_workspace_bytes(graph: StepGraph) -> int:
    """Return what a step may take beyond the arena: the most that one of its operators needs."""
    if _WORKSPACE_MARK in graph.metadata:
        return max((operator.workspace_bytes for operator in graph.operators), default=0)
    return max((workspace_bytes(graph, operator) for operator in graph.operators), default=0)


def _has_places_for_all(operator: Operator) -> bool:
    created = [view for view in operator.outputs if view is not None]
    complete = len(created) == len(operator.outputs)
    return not copies_results(operator) and (complete or operator.target in OWN_TARGETS)


class Bindings(NamedTuple):
    """The arguments and results of an operator at one position, as tensors in their places.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        results: The results that it makes in memory of their own.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    results: list[Result]


def make_call(
    operator: Operator,
    target: str,
    bindings: Bindings,
    scalars: Scalars,
    scalar_slot: int | None,
) -> Call | None:
    """Return a call that runs an operator by its target, or by that of its recomputation; None if
    there is nothing to do. A `SCALAR` operator writes to `scalar_slot`.
    """
    args, kwargs, results = bindings
    if target in OWN_TARGETS and target != FULL:
        return _make_own_call(target, args, results, scalars.numbers, scalar_slot)
    if target == FULL:
        function = results[0].tensor.fill_
    elif target in _COPIES and results:
        function = results[0].tensor.copy_
        del args[1:]
        kwargs.clear()
    else:
        complete = len(results) == len(operator.outputs) and not _is_misled(operator)
        variant = _out_variant(target) if complete else None
        if results and variant is not None:
            target, names = variant
            kwargs.update(zip(names, (result.tensor for result in results), strict=True))
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
    operator: Operator, function: Callable[..., Any], results: list[Result]
) -> Callable[..., None]:
    """Return a function that copies the results of another one to their places."""
    if len(operator.outputs) == 1:
        place = results[0].tensor

        def copy_one(*args: Any, **kwargs: Any) -> None:
            made = function(*args, **kwargs)
            if not isinstance(made, torch.Tensor):  # a list of one, of a `foreach` taken apart
                (made,) = made
            if made.shape != place.shape or made.dtype != place.dtype:
                raise _make_promise_error(operator, 0, made)
            place.copy_(made)

        return copy_one

    def copy_all(*args: Any, **kwargs: Any) -> None:
        made = flat_results(function(*args, **kwargs))
        for index, place in results:
            each = made[index]
            if each.shape != place.shape or each.dtype != place.dtype:
                raise _make_promise_error(operator, index, each)
            place.copy_(each)

    return copy_all


def _make_promise_error(operator: Operator, index: int, made: torch.Tensor) -> PenstockError:
    view = operator.outputs[index]
    assert view is not None
    return PenstockError(
        f"{operator.target} ({operator.name}) gave {made.dtype} of shape {tuple(made.shape)} and "
        f"strides {made.stride()}, and its fake kernel had promised {view.dtype} of {view.shape} "
        f"and {view.stride}: this operator cannot be planned with this torch"
    )


def _make_own_call(
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


def check_results(operator: Operator, call: Call, results: list[Result]) -> Call:
    """Return a call that also compares its results with the fake kernel's, for the first run.

    A kernel whose result is larger than its fake kernel's would write over other values.
    """

    def run() -> None:
        call()
        for index, place in results:
            view = operator.outputs[index]
            assert view is not None
            if (tuple(place.shape), place.stride()) != (view.shape, view.stride):
                raise _make_promise_error(operator, index, place)

    return run


def _adds_up_in_place(function: OpOverload) -> bool:
    """Return whether the operator may store summands in the place of their sum, as losses do."""
    arguments = function._schema.arguments
    name = function._schema.name
    return any(each.name == "reduction" for each in arguments) and not name.endswith("_backward")


@functools.cache
def _out_variant(target: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the same operator with given places, and the names of these arguments."""
    function = resolve(target)
    if _adds_up_in_place(function):
        return None
    inputs = [(each.name, str(each.type)) for each in function._schema.arguments]
    packet = function._overloadpacket
    for name in packet.overloads():
        variant = getattr(packet, name)
        outs = [each for each in variant._schema.arguments if each.is_out]
        rest = [
            (each.name, str(each.type)) for each in variant._schema.arguments if not each.is_out
        ]
        if (
            outs
            and rest == inputs
            and len(outs) == len(function._schema.returns)
            and all(str(each.type) == "Tensor" for each in outs)
            and torch.Tag.generated not in variant.tags
        ):
            prefix = target.rpartition(".")[0]
            return f"{prefix}.{name}", tuple(each.name for each in outs)
    return None
