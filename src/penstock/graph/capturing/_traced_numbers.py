"""Numbers that change from step to step, traced as expressions: learning rates, step counts.

An optimizer calculates with Python floats (`lr / (1 - beta1 ** step)`). During a capture they are
`torch.SymFloat`s around a `ScalarNode`, which writes down what is calculated, operator by operator,
in the order in which Python would do it: evaluated later with Python floats the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from penstock.graph._expressions import Expression, evaluate

_METHODS = {  # of a symbolic node, and what they calculate
    **{name: name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs")},
    "float_truediv": "truediv",
    "int_truediv": "truediv",
    "int_floordiv": "floordiv",
    "float_pow": "pow",
    "pow_by_natural": "pow",
    "sym_min": "min",
    "sym_max": "max",
    "and_": "and",
    "or_": "or",
    "sym_not": "not",
    "sym_float": "float",
}


class Judge(Protocol):
    """Who decides what happens when the program wants to know a traced number."""

    def decide(self, node: ScalarNode) -> bool:
        """Return the branch that a comparison takes, or raise."""
        ...

    def concrete(self, node: ScalarNode) -> float:
        """Return a float that stands for the number, or raise."""
        ...


class ScalarNode:
    """What `torch.SymFloat.node` has to be, writing down instead of calculating.

    Args:
        expression: How the number comes about.
        hint: Its value during the capture, for shape propagation, which does not depend on it.
        judge: Asked when the program branches on the number.
    """

    constant = None

    def __init__(self, expression: Expression, hint: float | int | bool, judge: Judge) -> None:
        self.expression = expression
        self.hint = hint
        self.judge = judge

    def _wrap(self, number: float | int | bool) -> ScalarNode:
        return ScalarNode(number, number, self.judge)

    wrap_int = wrap_float = wrap_bool = _wrap

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return False

    def clone(self) -> ScalarNode:
        return self

    def str(self) -> str:
        return f"number({self.hint})"

    __repr__ = _graph_repr = str

    def bool_(self) -> bool:
        return self.judge.decide(self)

    def guard_bool(self, file: object, line: object) -> bool:
        return self.judge.decide(self)

    def expect_true(self, file: object, line: object) -> bool:
        return True  # torch._check, as that no root of a negative number is taken

    def guard_float(self, file: object, line: object) -> float:
        return self.judge.concrete(self)

    def guard_int(self, file: object, line: object) -> int:
        return int(self.judge.concrete(self))


def traced_float(expression: Expression, hint: float, judge: Judge) -> torch.SymFloat:
    """Return a float that writes down what is calculated with it."""
    return torch.SymFloat(ScalarNode(expression, hint, judge))


def _method(name: str) -> Callable[..., ScalarNode]:
    def method(self: ScalarNode, *others: ScalarNode) -> ScalarNode:
        nodes = (self, *others)
        try:
            hint = evaluate((name, *(node.hint for node in nodes)), lambda _: 0.0)
        except ArithmeticError:
            hint = 1.0
        if isinstance(hint, complex):
            hint = 1.0
        return ScalarNode((name, *(node.expression for node in nodes)), hint, self.judge)

    return method


for _name, _operator in _METHODS.items():
    setattr(ScalarNode, _name, _method(_operator))
