"""Numbers that change from step to step, compiled: what a learning rate makes of an argument.

An expression of a step graph becomes a function of generated source, which holds nothing but
operators, indices and this file's names. Numbers of tensors are read once, where they are needed
first: a value never changes, so the number read then holds for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.graph import TensorView

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"and": "&", "or": "|"},
}
_FUNCTIONS = {"min": "min", "max": "max", "neg": "-", "abs": "abs", "not": "not ", "float": "float"}


class Numbers:
    """The numbers of one step, by slot.

    Attributes:
        now: The numbers.
    """

    def __init__(self) -> None:
        self._slot_of_value: dict[int, int] = {}
        self._given: dict[int, int] = {}  # value: slot, of numbers that the caller gives
        self.now: list[Any] = []
        self._constants: list[Any] = []

    def slot(self, value: int) -> int:
        """The place in `now` where a value's number stands; for numbers that no tensor has."""
        if value not in self._given:
            self._given[value] = len(self.now)
            self.now.append(None)
        return self._given[value]

    def give(self, numbers: Mapping[int, float]) -> None:
        """Set the numbers of a step that the caller gives, by value."""
        for value, number in numbers.items():
            slot = self._given.get(value)
            if slot is not None:
                self.now[slot] = number

    def compiled(
        self, expression: Any, tensor: Callable[[TensorView], torch.Tensor]
    ) -> tuple[Callable[[], Any], list[tuple[int, Callable[[], Any]]]]:
        """Compile an expression.

        Args:
            expression: As `{"scalar": expression}` holds it.
            tensor: Returns the tensor that a view of a number is read from.

        Returns:
            A function without arguments; and what has to be read before it is called for the first
            time in a step, as slots and the functions that read them.
        """
        reads: list[tuple[int, TensorView]] = []
        source = self._source(expression, reads)
        names = {"N": self.now, "C": self._constants, "__builtins__": {}}
        names |= {"min": min, "max": max, "abs": abs, "float": float}
        made = eval(f"lambda: {source}", names)  # our own text: see the module
        return made, [(slot, tensor(view).item) for slot, view in reads]

    def _source(self, expression: Any, reads: list[tuple[int, TensorView]]) -> str:
        if isinstance(expression, TensorView):
            return f"N[{self._slot_of(expression, reads)}]"
        if isinstance(expression, tuple):
            name, *operands = expression
            sources = [self._source(operand, reads) for operand in operands]
            if name in _INFIX:
                left, right = sources
                return f"({left} {_INFIX[name]} {right})"
            return f"({_FUNCTIONS[name]}({', '.join(sources)}))"
        self._constants.append(expression)
        return f"C[{len(self._constants) - 1}]"

    def _slot_of(self, view: TensorView, reads: list[tuple[int, TensorView]]) -> int:
        if view.value in self._given:
            return self._given[view.value]
        if view.value not in self._slot_of_value:
            self._slot_of_value[view.value] = len(self.now)
            self.now.append(None)
            reads.append((self._slot_of_value[view.value], view))
        return self._slot_of_value[view.value]
