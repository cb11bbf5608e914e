"""Writes a step graph anew with some operators taken by rows: parts, pieces, and what joins them.

Operators by rows that follow each other become one group: for each piece of rows all of them in
turn, so that a piece is gone before the next one comes. What has to be whole afterwards is written
piece by piece into its place; that is the place of a whole operand if nobody needs this any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from penstock.graph.splitting._choice import Choice, dies_at, fills_storage
from penstock.graph.splitting._forms import (
    LOSS_BACKWARD,
    ByRows,
    RowForm,
    item_bytes,
    views_in,
)
from penstock.graph.splitting._reductions import Reduction
from penstock.graph.step_graph import Kind, Operator, StepGraph, Storage, TensorView

_MAX_HOISTED = 16  # operators that a group lets pass
_INTO = {  # what writes its result to a given place, and under which name it takes that
    "aten._softmax.default": ("aten._softmax.out", "out"),
    "aten._log_softmax.default": ("aten._log_softmax.out", "out"),
    "aten._softmax_backward_data.default": ("aten._softmax_backward_data.out", "grad_input"),
    "aten._log_softmax_backward_data.default": ("aten._log_softmax_backward_data.out", "out"),
    LOSS_BACKWARD: ("aten.nll_loss_backward.grad_input", "grad_input"),
    "aten.mul.Tensor": ("aten.mul.out", "out"),
    "aten.add.Tensor": ("aten.add.out", "out"),
    "aten.sub.Tensor": ("aten.sub.out", "out"),
    "aten.div.Tensor": ("aten.div.out", "out"),
    "aten.neg.default": ("aten.neg.out", "out"),
    "aten.where.self": ("aten.where.self_out", "out"),
}
_COPIES = ("aten._to_copy.default", "aten.clone.default")


def taken_by_rows(graph: StepGraph, choice: Choice) -> StepGraph:
    """Return the graph in which the chosen operators are parts.

    Args:
        graph: The step.
        choice: What is taken by rows.
    """
    return Writer(graph, choice).run()


class Writer:
    """Keeps all values and storages that stay; new ones come behind them.

    Args:
        graph: The step.
        choice: What is taken by rows.
    """

    def __init__(self, graph: StepGraph, choice: Choice) -> None:
        self.graph = graph
        self.forms = choice.forms
        self.pieces = choice.pieces
        self.num_pieces = choice.num_pieces
        self.storages: list[Storage] = list(graph.storages)
        self.storage_of_value: list[int] = list(graph.storage_of_value)
        self.operators: list[Operator] = []
        self.last: dict[int, int] = {}  # for each old operator its last part
        self.parts_of: dict[int, list[int]] = {}  # for each value in pieces their values
        self.current: dict[int, int] = {}  # whole value -> its version by now
        self.gone: set[int] = set()  # storages whose values lie in another one now
        for storage in sorted(choice.pieces):
            self._make_pieces(storage)

    def run(self) -> StepGraph:
        """Write the graph."""
        group: list[int] = []
        passed = 0
        for index in range(len(self.graph.operators)):
            before = self.graph.predecessors[index]
            form = self.forms.get(index)
            if group and (passed >= _MAX_HOISTED or not self._goes_on(group, before, form)):
                self._write_group(group)
                group, passed = [], 0
            if form is not None:
                group.append(index)
            else:
                passed += bool(group)
                self._copy(index)
        self._write_group(group)
        return self._graph()

    def _goes_on(self, group: list[int], before: tuple[int, ...], form: RowForm | None) -> bool:
        """Whether a group may stay open: the next operator belongs to it, or goes before it."""
        needed = set(group).intersection(before)
        if form is None:
            return not needed
        if form.num_rows != self.forms[group[0]].num_rows:
            return False
        return not any(self.forms[index].reduces for index in needed)

    def _graph(self) -> StepGraph:
        kept = [index for index in range(len(self.storages)) if index not in self.gone]
        new = {old: index for index, old in enumerate(kept)}
        return dataclasses.replace(
            self.graph,
            storages=tuple(self.storages[index] for index in kept),
            storage_of_value=tuple(new[storage] for storage in self.storage_of_value),
            operators=tuple(self.operators),
        )

    # Values.

    def new_value(self, storage: int) -> int:
        """Add a value to a storage."""
        self.storage_of_value.append(storage)
        return len(self.storage_of_value) - 1

    def new_storage(self, name: str, num_bytes: int, kind: Kind = Kind.ACTIVATION) -> int:
        """Add a storage of the step's own."""
        self.storages.append(Storage(name=name, num_bytes=num_bytes, kind=kind))
        return len(self.storages) - 1

    def _make_pieces(self, index: int) -> None:
        storage = self.storages[index]
        value = self.graph.storage_of_value.index(index)
        users = (*self.graph.consumers[value], self.graph.producers[value])
        form = next(self.forms[user] for user in users if user in self.forms)
        row_bytes = self._num_row_bytes(form, index)
        values = []
        for part, (begin, end) in enumerate(self._cuts(form)):
            piece = dataclasses.replace(
                storage, name=f"{storage.name}[{part}]", num_bytes=row_bytes * (end - begin)
            )
            if part:
                self.storages.append(piece)
                values.append(self.new_value(len(self.storages) - 1))
            else:
                self.storages[index] = piece
                values.append(value)
        self.parts_of[value] = values

    def _num_row_bytes(self, form: RowForm, storage: int) -> int:
        of = self.graph.storage_of_value
        here = [each for each in form.by_rows() if of[each.view.value] == storage]
        return here[0].num_bytes // form.num_rows

    def _cuts(self, form: RowForm) -> list[tuple[int, int]]:
        rows, count = form.num_rows, self.num_pieces[form.num_rows]
        return [(rows * i // count, rows * (i + 1) // count) for i in range(count)]

    # Operators.

    def _copy(self, index: int) -> None:
        operator = self.graph.operators[index]
        after = tuple(self.last[earlier] for earlier in operator.after)
        self.add(
            operator if after == operator.after else dataclasses.replace(operator, after=after)
        )
        self.last[index] = len(self.operators) - 1

    def add(self, operator: Operator) -> None:
        """Write an operator behind the others."""
        self.operators.append(operator)

    def _write_group(self, group: list[int]) -> None:
        if not group:
            return
        columns = {}
        for index in group:
            self._prepare(group, index)
            if self.forms[index].reduces:
                columns[index] = Reduction(self, index)
        for part, rows in enumerate(self._cuts(self.forms[group[0]])):
            for index in group:
                if index in columns:
                    columns[index].write_part(part, rows)
                else:
                    self._write_part(index, part, rows)
        for column in columns.values():
            column.write_end()
        self.last.update(dict.fromkeys(group, len(self.operators) - 1))

    def _prepare(self, group: list[int], index: int) -> None:
        """Find a place for results that are whole: a whole operand's, or new memory."""
        operator, form = self.graph.operators[index], self.forms[index]
        for result in form.outputs if not form.reduces else ():
            value = result.view.value
            if value in self.parts_of:
                continue
            old = self._dying_twin(group, index, result)
            if old is not None:
                storage = self.storage_of_value[old]
                self.gone.add(self.storage_of_value[value])
                self.storage_of_value[value] = storage
                self.current[old] = self.current[value] = old
                continue
            place = self.new_value(self.storage_of_value[value])
            self.current[value] = place
            view = result.view._replace(value=place)
            self.add(
                Operator(
                    name=f"{operator.name}.rows",
                    target="penstock.empty",
                    outputs=(view,),
                    creates=(place,),
                    phase=operator.phase,
                    module=operator.module,
                )
            )

    def _dying_twin(self, group: list[int], index: int, result: ByRows) -> int | None:
        """Find a whole operand of this group with the result's form, of no use afterwards."""
        operator = self.graph.operators[index]
        for member in group[: group.index(index) + 1]:
            for rows in self.forms[member].by_rows():
                value = rows.view.value
                twin = rows.view._replace(value=result.view.value) == result.view
                if not twin or value in self.parts_of or value in self.current:
                    continue
                if self.graph.producers[value] in group or not rows.covers:
                    continue
                last = self.graph.consumers[value][-1]
                if (
                    not fills_storage(self.graph, rows)
                    or last > index
                    or not dies_at(self.graph, value, last)
                ):
                    continue
                if last == index and (value, result.view.value) not in operator.may_overwrite:
                    continue
                if all(self._looks_by(user, value, rows) for user in self._users(group, value)):
                    return value
        return None

    def _users(self, group: list[int], value: int) -> Iterator[int]:
        yield from (index for index in self.graph.consumers[value] if index in group)

    def _looks_by(self, index: int, value: int, rows: ByRows) -> bool:
        """Whether an operator looks at a value by just these rows."""
        views = [view for view in views_in((*self.forms[index].args,)) if view.value == value]
        by_rows = [each for each in self.forms[index].by_rows() if each.view.value == value]
        return len(views) == len(by_rows) and all(each == rows for each in by_rows)

    def taken(self, item: Any, part: int, rows: tuple[int, int]) -> Any:
        """An argument or result of a part."""
        if not isinstance(item, ByRows):
            return item
        value = item.view.value
        if value in self.parts_of:
            width = item.view.shape[1]
            shape = (rows[1] - rows[0], width)
            return TensorView(self.parts_of[value][part], item.view.dtype, shape, (width, 1), 0)
        return item.part(*rows)._replace(value=self.current.get(value, value))

    def _write_part(self, index: int, part: int, rows: tuple[int, int]) -> None:
        operator, form = self.graph.operators[index], self.forms[index]
        args = tuple(self.taken(item, part, rows) for item in form.args)
        kwargs = {name: self.taken(item, part, rows) for name, item in form.kwargs.items()}
        (result,) = form.outputs
        output = self.taken(result, part, rows)
        if result.view.value in self.parts_of:
            self.add(self.part(index, part, args=args, kwargs=kwargs, outputs=(output,)))
            return
        if operator.target in _COPIES:
            self._write_into(index, part, "aten.copy_.default", (output, args[0]), {}, output)
        elif operator.target in _INTO:
            target, name = _INTO[operator.target]
            self._write_into(index, part, target, args, {**kwargs, name: output}, output)
        else:
            width = output.shape[1]
            num_bytes = output.shape[0] * width * item_bytes(output.dtype)
            made = self.new_value(self.new_storage(f"{operator.name}[{part}]", num_bytes))
            piece = TensorView(made, output.dtype, output.shape, (width, 1), 0)
            self.add(self.part(index, part, args=args, kwargs=kwargs, outputs=(piece,)))
            self._write_into(index, part, "aten.copy_.default", (output, piece), {}, output, ".put")

    def _write_into(
        self,
        index: int,
        part: int,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: TensorView,
        suffix: str = "",
    ) -> None:
        """Write rows of a whole value: it goes on to its next version."""
        (result,) = self.forms[index].outputs
        value, old = result.view.value, place.value
        is_last = part + 1 == self.num_pieces[self.forms[index].num_rows]
        new = value if is_last else self.new_value(self.storage_of_value[value])
        for each in [known for known, now in self.current.items() if now == old]:
            self.current[each] = new
        written = self.part(
            *(index, part),
            args=args,
            kwargs=kwargs,
            outputs=(place._replace(value=new),),
            mutates=((old, new),),
            suffix=suffix,
        )
        if suffix:
            moved = place.shape[0] * place.shape[1] * item_bytes(place.dtype)
            written = dataclasses.replace(
                written, flops=0, bytes_read=moved, bytes_written=moved, workspace_bytes=0
            )
        self.add(dataclasses.replace(written, target=target))

    def part(
        self,
        index: int,
        part: int,
        *,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[TensorView | None, ...],
        mutates: tuple[tuple[int, int], ...] = (),
        suffix: str = "",
    ) -> Operator:
        """One part of an operator: what it reads and makes follows from its arguments."""
        operator = self.graph.operators[index]
        form = self.forms[index]
        count = self.num_pieces[form.num_rows]
        begin, end = self._cuts(form)[part]
        written = {value for pair in mutates for value in pair}
        reads = dict.fromkeys(view.value for view in views_in((args, kwargs)))
        made = dict.fromkeys(view.value for view in outputs if view is not None)
        reads = tuple(value for value in reads if value not in written)
        creates = tuple(value for value in made if value not in written)
        return dataclasses.replace(
            operator,
            name=f"{operator.name}{suffix}[{part}]",
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            reads=reads,
            creates=creates,
            mutates=mutates,
            may_overwrite=tuple(
                (self.parts_of[read][part], self.parts_of[created][part])
                for read, created in operator.may_overwrite
                if read in self.parts_of and created in self.parts_of
            ),
            flops=share(operator.flops, part, count),
            bytes_read=share(operator.bytes_read, part, count),
            bytes_written=share(operator.bytes_written, part, count),
            workspace_bytes=-(-operator.workspace_bytes * (end - begin) // form.num_rows),
            seconds=None if operator.seconds is None else operator.seconds / count,
        )


def share(count: int, place: int, num_parts: int) -> int:
    """Divide a count without losing a unit."""
    return count * (place + 1) // num_parts - count * place // num_parts
