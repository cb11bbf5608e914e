"""Scalars: numbers that change from step to step, such as arguments that follow a learning rate.

A call with such an argument becomes a function of generated source, which holds nothing but
operators, indices, names of torch's arguments and this file's names. A number in a tensor is read
once, at its first use: a value never changes, so the number holds for the whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from penstock.graph import TensorView

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"and": "&", "or": "|"},
}
_FUNCTIONS = {"min": "min", "max": "max", "neg": "-", "abs": "abs", "not": "not ", "float": "float"}


@dataclass(frozen=True)
class ScalarExpression:
    """An argument that is calculated anew in each step."""

    source: str
    """Its source text."""
    reads: list[tuple[int, Callable[[], Any]]]
    """Slots, each with the function that reads its number before the first use in a step."""


class Scalars:
    """The scalars of a step."""

    def __init__(self) -> None:
        self._slot_of_value: dict[int, int] = {}
        self.numbers: list[Any] = []  # of the current step, by slot
        self._constants: list[Any] = []
        self._index_of_constant: dict[tuple[type, str], int] = {}

    def slot_of(self, value: int) -> int:
        """Return the slot of a value's number."""
        if value not in self._slot_of_value:
            self._slot_of_value[value] = len(self.numbers)
            self.numbers.append(None)
        return self._slot_of_value[value]

    def assign(self, numbers: Mapping[int, float]) -> None:
        """Set the numbers that the caller gives for a step, by value."""
        for value, number in numbers.items():
            if value in self._slot_of_value:
                self.numbers[self._slot_of_value[value]] = number

    def compile_expression(
        self, expression: Any, tensor: Callable[[TensorView], torch.Tensor]
    ) -> ScalarExpression:
        """Compile the expression of an argument `{"scalar": expression}`; `tensor` returns the
        tensor that a view of a number is read from.
        """
        reads: list[tuple[int, TensorView]] = []
        text = self._format(expression, reads)
        return ScalarExpression(text, [(slot, tensor(view).item) for slot, view in reads])

    def compile_call(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Callable[[], object]:
        """Return a call that calculates the scalar expressions among its arguments each time."""
        names: dict[str, Any] = {"N": self.numbers, "C": self._constants, "function": function}
        names |= {"__builtins__": {}, "min": min, "max": max, "abs": abs, "float": float}
        reads: list[tuple[int, Callable[[], Any]]] = []

        def text(value: Any) -> str:
            if isinstance(value, ScalarExpression):
                reads.extend(value.reads)
                return value.source
            if isinstance(value, list) and has_scalars(value):
                return f"[{', '.join(map(text, value))}]"
            name = f"a{len(names)}"
            names[name] = value
            return name

        given = [text(value) for value in args]
        for key, value in kwargs.items():
            assert key.isidentifier()
            given.append(f"{key}={text(value)}")
        lines = ["def run():"]
        for slot, read in reads:
            names[f"read{slot}"] = read
            lines.append(f"    N[{slot}] = read{slot}()")
        lines.append(f"    function({', '.join(given)})")
        exec(_compile("\n".join(lines)), names)  # our own text: see the module
        return names["run"]

    def _format(self, expression: Any, reads: list[tuple[int, TensorView]]) -> str:
        if isinstance(expression, TensorView):
            if expression.value not in self._slot_of_value:  # a tensor has the number
                reads.append((self.slot_of(expression.value), expression))
            return f"N[{self.slot_of(expression.value)}]"
        if isinstance(expression, tuple):
            name, *operands = expression
            sources = [self._format(operand, reads) for operand in operands]
            if name in _INFIX:
                left, right = sources
                return f"({left} {_INFIX[name]} {right})"
            return f"({_FUNCTIONS[name]}({', '.join(sources)}))"
        # The updates of parameters have the same constants, and then the same text.
        key = type(expression), repr(expression)  # zeros of both signs are equal
        if key not in self._index_of_constant:
            self._index_of_constant[key] = len(self._constants)
            self._constants.append(expression)
        return f"C[{self._index_of_constant[key]}]"


@functools.lru_cache(4096)
def _compile(text: str) -> CodeType:
    """Compile a function's text: steps have few texts, as many as their updates have operators."""
    return compile(text, "<scalars of a step>", "exec")


def has_scalars(arguments: Any) -> bool:
    """Return whether there are scalar expressions among arguments."""
    if isinstance(arguments, list | tuple):
        return any(map(has_scalars, arguments))
    if isinstance(arguments, dict):
        return any(map(has_scalars, arguments.values()))
    return isinstance(arguments, ScalarExpression)


def fill_in_scalars(arguments: Any) -> Any:
    """Return arguments with a number in the place of each expression, for a trial call."""
    if isinstance(arguments, ScalarExpression):
        return 0.5
    if type(arguments) in (list, tuple):
        return type(arguments)(map(fill_in_scalars, arguments))
    if isinstance(arguments, dict):
        return {name: fill_in_scalars(each) for name, each in arguments.items()}
    return arguments
