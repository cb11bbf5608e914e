"""Numbers that change from step to step, traced as expressions: learning rates, step counts.

An optimizer calculates with Python floats (`lr / (1 - beta1 ** step)`). During a capture they are
`torch.SymFloat`s around a `ScalarNode`, which records the operations in the order in which Python
would run them: evaluated later with Python floats the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.graph.capturing._drafts import StorageTable
from penstock.graph.capturing._program_lines import error_here
from penstock.graph.encoding import Expression, evaluate
from penstock.graph.step_graph import views_in

_METHODS = {  # of a symbolic node, and the operators of their expressions
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


class NumberTracer:
    """Answers questions of the program about the traced numbers of a step.

    Attributes:
        guards: Comparisons that the program has made, and their outcomes.
    """

    def __init__(self, storages: StorageTable) -> None:
        self.guards: list[tuple[Expression, bool]] = []
        self._storages = storages
        self._plain: dict[float, ScalarNode] = {}  # Python numbers that stand for traced ones

    def trace(self, expression: Expression, hint: float) -> torch.SymFloat:
        """Return a float that records the operations on it."""
        return torch.SymFloat(ScalarNode(expression, hint, self))

    def decide(self, node: ScalarNode) -> bool:
        """Take a branch on a hyper-parameter, and note that it has to stay the same.

        Raises:
            CaptureError: The number is another one at every step.
        """
        for view in views_in(node.expression):
            if self._storages.of_value(view.value).initial != view.value:
                raise error_here(
                    "the optimizer branches on a step count or another number of its state, so "
                    "that its steps differ; use an optimizer whose steps are alike, as SGD, Adam, "
                    "AdamW, Adagrad"
                )
        self.guards.append((node.expression, bool(node.hint)))
        return bool(node.hint)

    def make_plain(self, node: ScalarNode) -> float:
        """Return a float that no other number has, to find the node among the next arguments.

        Operators such as the fused optimizers take a `float`, through which nothing can be traced.
        """
        value = float(node.hint)
        while value in self._plain or value == node.hint:
            value = math.nextafter(value, math.inf)
        self._plain[value] = node
        return value

    def take_plain(self, value: float) -> ScalarNode | None:
        """Return the node that a Python number stands for, once; None if it is just a number."""
        return self._plain.pop(value, None) if self._plain else None

    def check_all_taken(self) -> None:
        """Raise if a number has become a Python number that no operator has taken."""
        if self._plain:
            self._plain.clear()
            raise error_here(
                "a learning rate or step count becomes a plain Python number (float(), "
                "math.sqrt()), so that a change of it would go unnoticed; calculate with "
                "+ - * / ** only"
            )


@dataclass(eq=False, repr=False)
class ScalarNode:
    """A traced number, with the interface of `torch.SymFloat.node`."""

    expression: Expression
    hint: float | int | bool  # of the capture, for shape propagation, which does not depend on it
    tracer: NumberTracer  # asked when the program branches on the number

    constant = None

    def _wrap(self, number: float | int | bool) -> ScalarNode:
        return ScalarNode(number, number, self.tracer)

    wrap_int = wrap_float = wrap_bool = _wrap

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_symbolic(self) -> bool:
        return True

    def _return_false(self) -> bool:
        return False

    is_constant = is_nested_int = has_hint = _return_false

    def clone(self) -> ScalarNode:
        return self

    def str(self) -> str:
        return f"number({self.hint})"

    __repr__ = _graph_repr = str

    def bool_(self) -> bool:
        return self.tracer.decide(self)

    def guard_bool(self, file: object, line: object) -> bool:
        return self.tracer.decide(self)

    def expect_true(self, file: object, line: object) -> bool:
        return True  # torch._check, as that no root of a negative number is taken

    def guard_float(self, file: object, line: object) -> float:
        return self.tracer.make_plain(self)

    def guard_int(self, file: object, line: object) -> int:
        return int(self.tracer.make_plain(self))


def _make_method(name: str) -> Callable[..., ScalarNode]:
    def method(self: ScalarNode, *others: ScalarNode) -> ScalarNode:
        nodes = (self, *others)
        try:
            hint = evaluate((name, *(node.hint for node in nodes)), lambda _: 0.0)
        except ArithmeticError:
            hint = 1.0
        if isinstance(hint, complex):
            hint = 1.0
        return ScalarNode((name, *(node.expression for node in nodes)), hint, self.tracer)

    return method


for _name, _operator in _METHODS.items():
    setattr(ScalarNode, _name, _make_method(_operator))
