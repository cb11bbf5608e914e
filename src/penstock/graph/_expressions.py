"""Numbers of a step graph that change from step to step, as expressions of Python's operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from penstock.graph.step_graph import TensorView

Expression = float | int | bool | TensorView | tuple[Any, ...]
"""A number, a 0-dimensional view whose number is meant, or `(operator, operand, ...)`."""

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "min": min,
    "max": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": operator.neg,
    "abs": operator.abs,
    "not": operator.not_,
    "float": float,
}


def evaluate(expression: Expression, read: Callable[[TensorView], float | int]) -> Any:
    """Calculate an expression with Python's own numbers.

    Example:
        >>> evaluate(("sub", 1.0, ("pow", 0.5, 2.0)), lambda view: 0.0)
        0.75

    Args:
        expression: The content of a mapping `{"scalar": ...}` among the arguments of an operator.
        read: Returns the number of a 0-dimensional view.

    Returns:
        The number.
    """
    if isinstance(expression, TensorView):
        return read(expression)
    if not isinstance(expression, tuple):
        return expression
    name, *operands = expression
    numbers = [evaluate(operand, read) for operand in operands]
    return _UNARY[name](*numbers) if name in _UNARY else _BINARY[name](*numbers)
