"""Views among an operator's arguments that it writes into.

A value may be among them twice, as where one gate of a recurrent cell is multiplied by another of
the same product: values alone do not tell what is written from what is only read.
"""

from __future__ import annotations

from penstock.graph.capturing.schemas import schema_of
from penstock.graph.encoding import OWN_TARGETS, resolve
from penstock.graph.step_graph import Operator, TensorView, views_in


def mark_writes(operator: Operator) -> list[tuple[TensorView, bool]]:
    """Return the views among an operator's arguments in order, and whether it writes each.

    Example:
        >>> here, there = (TensorView(0, "float32", (4,), (1,), offset) for offset in (0, 4))
        >>> product = Operator(
        ...     name="mul_", target="aten.mul_.Tensor", args=(here, there), mutates=((0, 1),)
        ... )
        >>> [is_written for _, is_written in mark_writes(product)]
        [True, False]
    """
    changed = {old for old, _ in operator.mutates}
    arguments = [*enumerate(operator.args), *operator.kwargs.items()]
    written = _find_written(operator.target) if changed else set()
    return [
        (view, view.value in changed and (key in written or not written))
        for key, argument in arguments
        for view in views_in(argument)
    ]


def _find_written(target: str) -> set[int | str]:
    """Return positions and names of arguments that are written; none where nothing tells."""
    if target in OWN_TARGETS:
        return set()
    try:
        schema = schema_of(resolve(target))
    except ValueError:  # this torch has not all operators of a graph that was loaded
        return set()
    return {*schema.written, *schema.written_names}
