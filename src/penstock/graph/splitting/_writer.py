"""A step graph that is written anew, with storages in pieces."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from penstock.graph.splitting._choice import SliceChoice
from penstock.graph.splitting._forms import SlicedView, SliceForm, item_bytes
from penstock.graph.step_graph import Kind, Operator, StepGraph, Storage, TensorView, views_in


class GraphWriter:
    """Keeps all values and storages that stay; new ones come behind them.

    Attributes:
        storages: Of the new graph.
        storage_of_value: Of the new graph.
        pieces_of: For each value in pieces the values of these.
        current: The current version of each whole value that is written in slices.
    """

    def __init__(self, graph: StepGraph, choice: SliceChoice) -> None:
        self.graph = graph
        self.forms = choice.forms
        self.storages: list[Storage] = list(graph.storages)
        self.storage_of_value: list[int] = list(graph.storage_of_value)
        self.operators: list[Operator] = []
        self.pieces_of: dict[int, list[int]] = {}
        self.current: dict[int, int] = {}
        self._num_slices = choice.num_slices
        for storage in sorted(choice.pieces):
            self._divide(storage)

    def add_value(self, storage: int) -> int:
        """Add a value to a storage."""
        self.storage_of_value.append(storage)
        return len(self.storage_of_value) - 1

    def add_view(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorView:
        """Add a storage of the step's own; return the contiguous view of it."""
        num_bytes = math.prod(shape) * item_bytes(dtype)
        self.storages.append(Storage(name=name, num_bytes=num_bytes, kind=Kind.ACTIVATION))
        stride = (shape[-1], 1) if len(shape) == 2 else (1,) * len(shape)
        return TensorView(self.add_value(len(self.storages) - 1), dtype, shape, stride, 0)

    def _divide(self, index: int) -> None:
        storage, of = self.storages[index], self.graph.storage_of_value
        value = of.index(index)
        users = (*self.graph.consumers[value], self.graph.producers[value])
        form = next(self.forms[user] for user in users if user in self.forms)
        whole = next(each for each in form.sliced_views() if of[each.view.value] == index)
        vector_bytes = whole.num_bytes // form.num_vectors
        values = []
        for number, (begin, end) in enumerate(self.ranges(form)):
            piece = dataclasses.replace(
                storage, name=f"{storage.name}[{number}]", num_bytes=vector_bytes * (end - begin)
            )
            if number:
                self.storages.append(piece)
                values.append(self.add_value(len(self.storages) - 1))
            else:
                self.storages[index] = piece
                values.append(value)
        self.pieces_of[value] = values

    def ranges(self, form: SliceForm) -> list[tuple[int, int]]:
        """Return the vectors of each slice, from the first to the end."""
        total, count = form.num_vectors, self.num_slices(form)
        return [(total * i // count, total * (i + 1) // count) for i in range(count)]

    def num_slices(self, form: SliceForm) -> int:
        """Return the number of slices of an operator."""
        return self._num_slices[form.num_vectors]

    def slice(self, item: Any, number: int, vectors: tuple[int, int]) -> Any:
        """Return an argument or result of a slice."""
        if not isinstance(item, SlicedView):
            return item
        value = item.view.value
        if value in self.pieces_of:
            width = item.view.shape[1]
            shape = (vectors[1] - vectors[0], width)
            return TensorView(self.pieces_of[value][number], item.view.dtype, shape, (width, 1), 0)
        return item.slice(*vectors)._replace(value=self.current.get(value, value))

    def make_slice(
        self,
        index: int,
        number: int,
        *,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[TensorView | None, ...],
        mutates: tuple[tuple[int, int], ...] = (),
        suffix: str = "",
    ) -> Operator:
        """Return one slice of an operator; its values follow from its arguments."""
        operator, form = self.graph.operators[index], self.forms[index]
        count = self.num_slices(form)
        begin, end = self.ranges(form)[number]
        written = {value for pair in mutates for value in pair}
        reads = dict.fromkeys(view.value for view in views_in((args, kwargs)))
        made = dict.fromkeys(view.value for view in outputs if view is not None)
        return dataclasses.replace(
            operator,
            name=f"{operator.name}{suffix}[{number}]",
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            reads=tuple(value for value in reads if value not in written),
            creates=tuple(value for value in made if value not in written),
            mutates=mutates,
            may_overwrite=tuple(
                (self.pieces_of[read][number], self.pieces_of[created][number])
                for read, created in operator.may_overwrite
                if read in self.pieces_of and created in self.pieces_of
            ),
            workspace_bytes=-(-operator.workspace_bytes * (end - begin) // form.num_vectors),
            **share_costs(operator, number, count),
        )


def share_costs(operator: Operator, number: int, num_parts: int) -> dict[str, Any]:
    """Return the costs of one part of an operator as fields; its counts add up to the whole."""
    shares: dict[str, Any] = {
        name: count * (number + 1) // num_parts - count * number // num_parts
        for name in ("flops", "bytes_read", "bytes_written")
        for count in [getattr(operator, name)]
    }
    seconds = operator.seconds
    return shares | {"seconds": None if seconds is None else seconds / num_parts}
