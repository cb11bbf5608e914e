"""Numbers that change from step to step, compiled: what a learning rate makes of an argument.

A call with such an argument becomes a function of generated source, which holds nothing but
operators, indices, names of torch's arguments and this file's names. Numbers of tensors are read
once, where they are needed first: a value never changes, so the number read then holds for the
whole step.
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


class Live(NamedTuple):
    """Numbers among the arguments of a call that are calculated anew in each step.

    Attributes:
        reads: Places in the step's numbers, and the functions that read a tensor's number.
        places: Argument lists or dictionaries, places in them, and what stands there as source.
    """

    reads: list[tuple[int, Callable[[], Any]]]
    places: list[tuple[Any, Any, str]]

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Put some number at each place, as long as arguments have to look like arguments."""
        for holder, place, _ in self.places:
            holder[place] = 0.5
        yield
        for holder, place, _ in self.places:
            holder[place] = None


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

    def source(
        self, expression: Any, tensor: Callable[[TensorView], torch.Tensor]
    ) -> tuple[str, list[tuple[int, Callable[[], Any]]]]:
        """Return an expression as source text for `call`.

        Args:
            expression: As `{"scalar": expression}` holds it.
            tensor: Returns the tensor that a view of a number is read from.

        Returns:
            The text; and what has to be read before it is calculated for the first time in a step,
            as slots and the functions that read them.
        """
        reads: list[tuple[int, TensorView]] = []
        text = self._source(expression, reads)
        return text, [(slot, tensor(view).item) for slot, view in reads]

    def call(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], live: Live
    ) -> Callable[[], object]:
        """Return a call in which numbers are calculated anew each time.

        Args:
            function: What is called.
            args: Its arguments; at the places of `live` anything.
            kwargs: Its keyword arguments, likewise.
            live: The numbers.
        """
        names: dict[str, Any] = {"N": self.now, "C": self._constants, "function": function}
        names |= {"__builtins__": {}, "min": min, "max": max, "abs": abs, "float": float}
        sources = {(id(holder), place): source for holder, place, source in live.places}
        holders = {id(holder) for holder, _, _ in live.places}

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
        for slot, read in live.reads:
            names[f"read{slot}"] = read
            lines.append(f"    N[{slot}] = read{slot}()")
        lines.append(f"    function({', '.join(given)})")
        exec("\n".join(lines), names)  # our own text: see the module
        return names["run"]

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
