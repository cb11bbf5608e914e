"""Splitting of operators that need more memory at once than a budget allows.

A fused optimizer updates all parameters in one operator, which needs every parameter, gradient and
state at once; an operator for each parameter does the same arithmetic, bit for bit. Softmaxes,
cross-entropy and their gradients run in slices. Inputs that operators view in parts become these.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from penstock.graph.splitting._choice import choose_slices, working_set_bytes
from penstock.graph.splitting._forms import share_costs
from penstock.graph.splitting._rewrite import rewrite_in_slices
from penstock.graph.splitting.input_pieces import divide_inputs
from penstock.graph.step_graph import Operator, StepGraph, TensorView, views_in

_LISTS = ("aten._foreach_", "aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad")


def split(graph: StepGraph, max_bytes: int, *, products: bool = False) -> StepGraph:
    """Split the operators whose operands and results are more than so many bytes.

    Example:
        >>> split(StepGraph(storages=(), storage_of_value=(), operators=()), 2**30).operators
        ()

    Operators that work on lists of tensors (fused and `foreach` optimizers) become one operator
    for each tensor. Operators that work on the last dimension (softmax, cross-entropy, arithmetic
    between them, and their gradients) become one for each slice of the other dimensions, and
    storages that only they view become a storage for each slice. No operator is split below the
    bytes that another one needs anyway. Inputs that operators view in parts (time steps,
    micro-batches) become those parts, unless they are far smaller than `max_bytes`.

    Args:
        graph: The step.
        max_bytes: Bytes that an operator may need at once.
        products: Whether products of matrices run in slices too, so that the logits of a large
            vocabulary are never whole. The order in which they add is another one then.

    Returns:
        A graph with the same parameters, states, inputs and loss, whose execution gives the same
        bits, but for `products`; the same graph if nothing is split. It is made once for each
        `max_bytes`.
    """
    known, key = graph.derived, (max_bytes, products)
    if key not in known:
        parts = divide_inputs(_split_lists(graph, max_bytes), max_bytes)
        choice = choose_slices(parts, max_bytes, products=products)
        known[key] = rewrite_in_slices(parts, choice) if choice.forms else parts
    return known[key]


def _split_lists(graph: StepGraph, max_bytes: int) -> StepGraph:
    parts = [
        _parts(operator)
        if working_set_bytes(graph, operator) > max_bytes and _can_split(graph, operator)
        else (operator,)
        for operator in graph.operators
    ]
    if len(parts) == sum(map(len, parts)):
        return graph
    last = [end - 1 for end in itertools.accumulate(map(len, parts))]  # part of each old operator
    operators = tuple(
        dataclasses.replace(part, after=tuple(last[earlier] for earlier in part.after))
        for each in parts
        for part in each
    )
    return dataclasses.replace(graph, operators=operators)


def _can_split(graph: StepGraph, operator: Operator) -> bool:
    if not operator.target.startswith(_LISTS) or _num_parts(operator) < 2:
        return False
    # Two tensors of one storage would be two versions of it, which one operator does not have.
    of = graph.storage_of_value
    changed = {of[old] for old, _ in operator.mutates}
    needed = [{of[value] for value in part.needs} & changed for part in _parts(operator)]
    return sum(map(len, needed)) == len(set().union(*needed)) and not operator.random


def _num_parts(operator: Operator) -> int:
    first = operator.args[0] if operator.args else None
    return len(first) if isinstance(first, tuple) else 0


def _parts(operator: Operator) -> tuple[Operator, ...]:
    return tuple(_part(operator, place) for place in range(_num_parts(operator)))


def _part(operator: Operator, place: int) -> Operator:
    num_parts = _num_parts(operator)

    def one(value: Any) -> Any:
        if isinstance(value, tuple) and not isinstance(value, TensorView):
            return (value[place],) if len(value) == num_parts else value
        return value

    args = tuple(map(one, operator.args))
    kwargs = {name: one(value) for name, value in operator.kwargs.items()}
    values = {view.value for view in views_in((args, kwargs))}
    outputs = one(operator.outputs)
    made = {view.value for view in outputs if view is not None}
    return dataclasses.replace(
        operator,
        name=f"{operator.name}[{place}]",
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        reads=tuple(value for value in operator.reads if value in values),
        creates=tuple(value for value in operator.creates if value in made),
        mutates=tuple((old, new) for old, new in operator.mutates if old in values),
        may_overwrite=tuple(
            (read, new) for read, new in operator.may_overwrite if read in values and new in made
        ),
        workspace_bytes=operator.workspace_bytes // num_parts,
        **share_costs(operator, place, num_parts),
    )
