"""Scalars: numbers that change from step to step, such as arguments that follow a learning rate.

A call with such an argument becomes a function of generated source, which holds nothing but
operators, indices, names of torch's arguments and this file's names. A number in a tensor is read
once, at its first use: a value never changes, so the number holds for the whole step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from penstock.graph import TensorView

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"pow": "**", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    **{"and": "&", "or": "|"},
}
_FUNCTIONS = {"min": "min", "max": "max", "neg": "-", "abs": "abs", "not": "not ", "float": "float"}


class ScalarArguments(NamedTuple):
    """The arguments of a call that are calculated anew in each step.

    Attributes:
        reads: Slots of the step's scalars, and the functions that read a tensor's number.
        places: Argument lists or dictionaries, keys in them, and the source text of the arguments.
    """

    reads: list[tuple[int, Callable[[], Any]]]
    places: list[tuple[Any, Any, str]]

    @contextlib.contextmanager
    def fill_in(self) -> Iterator[None]:
        """Put a number at each place, for a trial call with these arguments."""
        for holder, place, _ in self.places:
            holder[place] = 0.5
        yield
        for holder, place, _ in self.places:
            holder[place] = None


class Scalars:
    """The scalars of a step.

    Attributes:
        numbers: The numbers of the current step, by slot.
    """

    def __init__(self) -> None:
        self._slot_of_value: dict[int, int] = {}
        self._slot_of_input: dict[int, int] = {}  # by value; of numbers that the caller gives
        self.numbers: list[Any] = []
        self._constants: list[Any] = []

    def slot_of(self, value: int) -> int:
        """Return the slot of a value's number, for numbers that no tensor has."""
        if value not in self._slot_of_input:
            self._slot_of_input[value] = len(self.numbers)
            self.numbers.append(None)
        return self._slot_of_input[value]

    def assign(self, numbers: Mapping[int, float]) -> None:
        """Set the numbers that the caller gives for a step, by value."""
        for value, number in numbers.items():
            slot = self._slot_of_input.get(value)
            if slot is not None:
                self.numbers[slot] = number

    def compile_expression(
        self, expression: Any, tensor: Callable[[TensorView], torch.Tensor]
    ) -> tuple[str, list[tuple[int, Callable[[], Any]]]]:
        """Return an expression as source text, and the reads that precede its first use in a step.

        Args:
            expression: The expression of an argument `{"scalar": expression}`.
            tensor: Returns the tensor that a view of a number is read from.

        Returns:
            The text; and slots, each with the function that reads its number.
        """
        reads: list[tuple[int, TensorView]] = []
        text = self._format(expression, reads)
        return text, [(slot, tensor(view).item) for slot, view in reads]

    def compile_call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        scalar_arguments: ScalarArguments,
    ) -> Callable[[], object]:
        """Return a call that calculates its scalar arguments anew each time."""
        names: dict[str, Any] = {"N": self.numbers, "C": self._constants, "function": function}
        names |= {"__builtins__": {}, "min": min, "max": max, "abs": abs, "float": float}
        sources = {(id(holder), place): source for holder, place, source in scalar_arguments.places}
        holders = {id(holder) for holder, _, _ in scalar_arguments.places}

        def text(value: Any, holder: Any, place: Any) -> str:
            if (id(holder), place) in sources:
                return sources[id(holder), place]
            if id(value) in holders:
                return f"[{', '.join(text(item, value, i) for i, item in enumerate(value))}]"
            name = f"a{len(names)}"
            names[name] = value
            return name

        given = [text(value, args, place) for place, value in enumerate(args)]
        for key, value in kwargs.items():
            assert key.isidentifier()
            given.append(f"{key}={text(value, kwargs, key)}")
        lines = ["def run():"]
        for slot, read in scalar_arguments.reads:
            names[f"read{slot}"] = read
            lines.append(f"    N[{slot}] = read{slot}()")
        lines.append(f"    function({', '.join(given)})")
        exec("\n".join(lines), names)  # our own text: see the module
        return names["run"]

    def _format(self, expression: Any, reads: list[tuple[int, TensorView]]) -> str:
        if isinstance(expression, TensorView):
            return f"N[{self._slot_of_view(expression, reads)}]"
        if isinstance(expression, tuple):
            name, *operands = expression
            sources = [self._format(operand, reads) for operand in operands]
            if name in _INFIX:
                left, right = sources
                return f"({left} {_INFIX[name]} {right})"
            return f"({_FUNCTIONS[name]}({', '.join(sources)}))"
        self._constants.append(expression)
        return f"C[{len(self._constants) - 1}]"

    def _slot_of_view(self, view: TensorView, reads: list[tuple[int, TensorView]]) -> int:
        if view.value in self._slot_of_input:
            return self._slot_of_input[view.value]
        if view.value not in self._slot_of_value:
            self._slot_of_value[view.value] = len(self.numbers)
            self.numbers.append(None)
            reads.append((self._slot_of_value[view.value], view))
        return self._slot_of_value[view.value]
