"""Steps in a form that runs as planned: results have addresses, and workspace covers the rest.

A result goes straight to its address where torch has an operator that writes there (`out=`). Where
that only pretends to (it allocates and copies, `torch.Tag.generated`) or does not exist, the result
is made elsewhere and copied, and its memory counts as workspace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from penstock.compat.dispatch import OpOverload
from penstock.graph._alignment import EXECUTABLE_MARK, TENSOR_ALIGNMENT_BYTES
from penstock.graph.encoding import OWN_TARGETS, resolve
from penstock.graph.fsdp.collectives import TO_PLACES
from penstock.graph.step_graph import Operator, Phase, StepGraph, TensorView

COPIES = ("aten.clone.default", "aten._to_copy.default")
"""Operators whose result is their operand, perhaps in another dtype or layout."""

_WRONG_FOR_ALL = ("aten.max_unpool2d.default", "aten.max_unpool3d.default")
_WRONG_UNLESS_DENSE = (
    *("aten.log_sigmoid_forward.default", "aten.native_batch_norm.default"),
    *("aten._native_batch_norm_legit.default", "aten._batch_norm_with_update.default"),
)
"""Operators whose `out=` variants are wrong, or lay the result out anew: for all operands, or where
the operand is not dense in one of torch's memory formats; `tests/executor/test_op_db.py` finds
them."""


def make_executable(graph: StepGraph) -> StepGraph:
    """Return a step in the form that is planned and executed.

    Operators whose results are copied to their addresses have workspace for these results, so that
    a budget holds for all that a step allocates. No parameter is updated before the loss is known,
    so that a step whose loss is NaN can be undone. And storages take whole multiples of 64 bytes
    (512 on a GPU), so that addresses are such as torch gives, however small the step is.
    """
    loss = None if graph.loss is None else graph.producers[graph.loss.value]
    operators = []
    for index, operator in enumerate(graph.operators):
        after = operator.after
        is_update = operator.phase is Phase.OPTIMIZER and operator.mutates
        if is_update and loss is not None and loss < index and loss not in after:
            after = (*after, loss)
        num_bytes = operator.workspace_bytes + unplaced_bytes(graph, operator)
        if after != operator.after or num_bytes != operator.workspace_bytes:
            operator = dataclasses.replace(operator, after=after, workspace_bytes=num_bytes)
        operators.append(operator)
    unit = TENSOR_ALIGNMENT_BYTES[graph.device]
    storages = tuple(
        dataclasses.replace(storage, num_bytes=storage.num_bytes + -storage.num_bytes % unit)
        if storage.num_bytes % unit
        else storage
        for storage in graph.storages
    )
    return dataclasses.replace(
        graph,
        operators=tuple(operators),
        storages=storages,
        metadata={**graph.metadata, EXECUTABLE_MARK: True},
    )


def is_executable(graph: StepGraph) -> bool:
    """Return whether a graph has the form that `capture` gives it; older files have not."""
    return EXECUTABLE_MARK in graph.metadata


def is_on_host(graph: StepGraph, view: TensorView) -> bool:
    """Return whether a view's elements are where every plan leaves them, in host memory."""
    return view.end > 0 and not graph.num_bytes(view.value)


def find_last_uses(graph: StepGraph, operators: Iterable[Operator]) -> dict[int, list[int]]:
    """Return, by the index among operators of a graph, the storages without a use after each."""
    last: dict[int, int] = {}
    for index, operator in enumerate(operators):
        last |= {graph.storage_of_value[value]: index for value in operator.needs + operator.makes}
    dying: dict[int, list[int]] = {}
    for storage, index in last.items():
        dying.setdefault(index, []).append(storage)
    return dying


@functools.cache
def writes_in_place(target: str) -> bool:
    """Return whether results of an operator need no memory but their addresses.

    Example:
        >>> writes_in_place("aten.add.Tensor"), writes_in_place("aten.native_layer_norm.default")
        (True, False)
    """
    has_place = target in OWN_TARGETS or target in COPIES or target in TO_PLACES
    return has_place or out_variant(target) is not None


def copies_results(operator: Operator) -> bool:
    """Return whether an operator's results are made elsewhere and copied to their addresses."""
    in_place = writes_in_place(operator.target) and not has_wrong_out_variant(operator)
    return bool(operator.creates) and not in_place


def has_wrong_out_variant(operator: Operator) -> bool:
    """Return whether the `out=` variant gives other results on the operands of this call."""
    if operator.target not in _WRONG_UNLESS_DENSE:
        return operator.target in _WRONG_FOR_ALL
    view = operator.args[0]
    return view.stride not in _dense_strides(view.shape)


def _dense_strides(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the strides of a shape in each memory format."""
    formats = [torch.contiguous_format]
    if len(shape) in (4, 5):
        formats.append(torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    empty = torch.empty(shape, dtype=torch.uint8, device="meta")
    return [empty.to(memory_format=each).stride() for each in formats]


@functools.cache
def out_variant(target: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the operator that writes the same results to given memory, and the names of its
    arguments that take them; None if there is none.
    """
    function = resolve(target)
    if _sums_in_result(function):
        return None
    wanted = [(each.name, str(each.type)) for each in function._schema.arguments]
    packet = function._overloadpacket
    for name in packet.overloads():
        variant = getattr(packet, name)
        arguments = variant._schema.arguments
        outs = [each for each in arguments if each.is_out]
        rest = [(each.name, str(each.type)) for each in arguments if not each.is_out]
        if (
            outs
            and rest == wanted
            and len(outs) == len(function._schema.returns)
            and all(str(each.type) == "Tensor" for each in outs)
            and torch.Tag.generated not in variant.tags
        ):
            prefix = target.rpartition(".")[0]
            return f"{prefix}.{name}", tuple(each.name for each in outs)
    return None


def _sums_in_result(function: OpOverload) -> bool:
    """Return whether an operator may keep all terms of a sum in its result, as losses do."""
    arguments = function._schema.arguments
    name = function._schema.name
    return any(each.name == "reduction" for each in arguments) and not name.endswith("_backward")


def unplaced_bytes(graph: StepGraph, operator: Operator) -> int:
    """Return the bytes of an operator's results if they are not all written to their addresses."""
    created = [view for view in operator.outputs if view is not None]
    is_complete = len(created) == len(operator.outputs) or operator.target in OWN_TARGETS
    if is_complete and not copies_results(operator):
        return 0
    return sum(map(graph.num_bytes, operator.creates))
