"""Rewriting of a step graph with some operators in slices, and operators that join these.

Operators in slices that follow each other become one group: for each slice all of them in turn, so
that a piece is gone before the next one comes. A result that has to be whole afterwards is written
slice by slice into its place; this is the place of a whole operand whose live range ends there.
Sums over vectors and losses give a number for each vector in slices, then add up all in turn.
A sum of products or of vectors is that of the first slice, to which those of the others add.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from penstock.graph.executable import COPIES, out_variant
from penstock.graph.splitting._choice import SliceChoice, ends_at, fills_storage
from penstock.graph.splitting._forms import (
    ADD,
    ADDED_PRODUCT,
    LOSS,
    NO_REDUCTION,
    SUM,
    SlicedView,
    SliceForm,
    item_bytes,
    share_costs,
)
from penstock.graph.step_graph import Kind, Operator, StepGraph, Storage, TensorView, views_in

_MAX_HOISTED = 16  # operators that pass an open group
_SUM_REDUCTION, _MEAN_REDUCTION = 2, 1  # torch's numbers


def rewrite_in_slices(graph: StepGraph, choice: SliceChoice) -> StepGraph:
    """Return the graph in which the chosen operators run in slices."""
    return SliceWriter(graph, choice).run()


class SliceWriter:
    """Keeps all values and storages that stay; new ones come behind them."""

    def __init__(self, graph: StepGraph, choice: SliceChoice) -> None:
        self.graph = graph
        self.forms = choice.forms
        self.storages: list[Storage] = list(graph.storages)
        self.storage_of_value: list[int] = list(graph.storage_of_value)
        self.operators: list[Operator] = []
        self.pieces_of: dict[int, list[int]] = {}  # values, by value
        self.current: dict[int, int] = {}  # versions of whole values that are written in slices
        self._num_slices = choice.num_slices
        self._last: dict[int, int] = {}  # for each old operator its last slice
        self._gone: set[int] = set()  # storages whose values lie in another one now
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
            value = self.pieces_of[value][number]
            return item.turn(TensorView(value, item.view.dtype, shape, (width, 1), 0))
        return item.slice(*vectors)._replace(value=self.current.get(value, value))

    def add_slice(
        self,
        index: int,
        number: int,
        target: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: tuple[TensorView | None, ...],
        mutates: tuple[tuple[int, int], ...] = (),
        suffix: str = "",
    ) -> None:
        """Add one slice of an operator; its values follow from its arguments."""
        operator, form = self.graph.operators[index], self.forms[index]
        count = self.num_slices(form)
        begin, end = self.ranges(form)[number]
        written = {value for pair in mutates for value in pair}
        reads = dict.fromkeys(view.value for view in views_in((args, kwargs)))
        made = dict.fromkeys(view.value for view in outputs if view is not None)
        part = dataclasses.replace(
            operator,
            name=f"{operator.name}{suffix}[{number}]",
            target=target,
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
        self.operators.append(part)

    def run(self) -> StepGraph:
        group: list[int] = []
        num_passed = 0
        for index in range(len(self.graph.operators)):
            before = self.graph.predecessors[index]
            form = self.forms.get(index)
            if group and (num_passed >= _MAX_HOISTED or not self._stays_open(group, before, form)):
                self._write_group(group)
                group, num_passed = [], 0
            if form is not None:
                group.append(index)
            else:
                num_passed += bool(group)
                self._copy(index)
        self._write_group(group)
        return self._build()

    def _stays_open(
        self, group: list[int], before: tuple[int, ...], form: SliceForm | None
    ) -> bool:
        """Return whether a group stays open: the next operator belongs to it, or passes it."""
        needed = set(group).intersection(before)
        if form is None:
            return not needed
        if form.num_vectors != self.forms[group[0]].num_vectors:
            return False
        return not any(self.forms[index].reduces or self.forms[index].adds for index in needed)

    def _build(self) -> StepGraph:
        kept = [index for index in range(len(self.storages)) if index not in self._gone]
        new = {old: index for index, old in enumerate(kept)}
        return dataclasses.replace(
            self.graph,
            storages=tuple(self.storages[index] for index in kept),
            storage_of_value=tuple(new[storage] for storage in self.storage_of_value),
            operators=tuple(self.operators),
        )

    def _copy(self, index: int) -> None:
        operator = self.graph.operators[index]
        after = tuple(self._last[earlier] for earlier in operator.after)
        self.operators.append(
            operator if after == operator.after else dataclasses.replace(operator, after=after)
        )
        self._last[index] = len(self.operators) - 1

    def _write_group(self, group: list[int]) -> None:
        if not group:
            return
        reductions = {}
        for index in group:
            self._place_results(group, index)
            if self.forms[index].reduces:
                reductions[index] = Reduction(self, index)
        for number, vectors in enumerate(self.ranges(self.forms[group[0]])):
            for index in group:
                if index in reductions:
                    reductions[index].write_slice(number, vectors)
                else:
                    self._write_slice(index, number, vectors)
        for reduction in reductions.values():
            reduction.write_end()
        self._last.update(dict.fromkeys(group, len(self.operators) - 1))

    def _place_results(self, group: list[int], index: int) -> None:
        """Find a place for results that stay whole: a whole operand's, or new memory."""
        operator, form = self.graph.operators[index], self.forms[index]
        for result in form.outputs if not form.reduces else ():
            whole = result if form.adds else result.view
            value = whole.value
            if value in self.pieces_of:
                continue
            old = None if form.adds else self._find_reusable(group, index, result)
            if old is not None:
                storage = self.storage_of_value[old]
                self._gone.add(self.storage_of_value[value])
                self.storage_of_value[value] = storage
                self.current[old] = self.current[value] = old
                continue
            place = self.add_value(self.storage_of_value[value])
            self.current[value] = place
            view = whole._replace(value=place)
            self.operators.append(
                Operator(
                    name=f"{operator.name}.rows",
                    target="penstock.empty",
                    outputs=(view,),
                    creates=(place,),
                    phase=operator.phase,
                    module=operator.module,
                )
            )

    def _find_reusable(self, group: list[int], index: int, result: SlicedView) -> int | None:
        """Find a whole operand of the result's form whose live range ends in this group."""
        operator = self.graph.operators[index]
        for member in group[: group.index(index) + 1]:
            for vectors in self.forms[member].sliced_views():
                value = vectors.view.value
                has_form = vectors.view._replace(value=result.view.value) == result.view
                if not has_form or value in self.pieces_of or value in self.current:
                    continue
                if self.graph.producers[value] in group or not vectors.is_dense:
                    continue
                last = self.graph.consumers[value][-1]
                if last > index or not fills_storage(self.graph, vectors):
                    continue
                if not ends_at(self.graph, value, last):
                    continue
                if last == index and (value, result.view.value) not in operator.may_overwrite:
                    continue
                users = (user for user in self.graph.consumers[value] if user in group)
                if all(self._views_only(user, vectors) for user in users):
                    return value
        return None

    def _views_only(self, index: int, vectors: SlicedView) -> bool:
        """Return whether an operator views a value by just these vectors."""
        form, value = self.forms[index], vectors.view.value
        whole = [view for view in views_in(form.args) if view.value == value]
        sliced = [each for each in form.sliced_views() if each.view.value == value]
        return len(whole) == len(sliced) and all(each == vectors for each in sliced)

    def _write_slice(self, index: int, number: int, vectors: tuple[int, int]) -> None:
        operator, form = self.graph.operators[index], self.forms[index]
        args = tuple(self.slice(item, number, vectors) for item in form.args)
        (result,) = form.outputs
        target, kwargs = operator.target, operator.kwargs
        if form.adds:
            self._add_to_sum(index, number, args)
            return
        output = self.slice(result, number, vectors)
        if result.view.value in self.pieces_of:
            self.add_slice(index, number, target, args, kwargs, (output,))
        elif target in COPIES:
            self._write_into(index, number, "aten.copy_.default", (output, args[0]), {}, output)
        elif variant := out_variant(target):
            target, (name,) = variant
            self._write_into(index, number, target, args, {**kwargs, name: output}, output)
        else:
            piece = self.add_view(f"{operator.name}[{number}]", output.dtype, output.shape)
            self.add_slice(index, number, target, args, kwargs, (piece,))
            copied = (output, piece)
            self._write_into(index, number, "aten.copy_.default", copied, {}, output, ".put")

    def _add_to_sum(self, index: int, number: int, args: tuple[Any, ...]) -> None:
        """Write the first slice of a sum of products or of vectors, or add the next one."""
        (result,), operator = self.forms[index].outputs, self.graph.operators[index]
        output = result._replace(value=self.current[result.value])
        if number and operator.target == SUM:
            piece = self.add_view(f"{operator.name}[{number}]", output.dtype, output.shape)
            self.add_slice(index, number, SUM, args, {}, (piece,))
            self._write_into(index, number, ADD, (output, piece), {}, output, ".put")
            return
        if number:
            self._write_into(index, number, ADDED_PRODUCT, (output, *args), {}, output)
            return
        variant = out_variant(operator.target)
        assert variant is not None
        target, (name,) = variant
        self._write_into(index, number, target, args, {name: output}, output)

    def _write_into(
        self,
        index: int,
        number: int,
        target: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        place: TensorView,
        suffix: str = "",
    ) -> None:
        """Write a slice of a whole value, which begins the value's next version."""
        (result,) = self.forms[index].outputs
        value = result.view.value if isinstance(result, SlicedView) else result.value
        old = place.value
        is_last = number + 1 == self.num_slices(self.forms[index])
        new = value if is_last else self.add_value(self.storage_of_value[value])
        for each in [known for known, now in self.current.items() if now == old]:
            self.current[each] = new
        outputs, mutates = (place._replace(value=new),), ((old, new),)
        self.add_slice(index, number, target, args, kwargs, outputs, mutates, suffix)
        if suffix:  # it only moves the result
            moved = math.prod(place.shape) * item_bytes(place.dtype)
            self.operators[-1] = dataclasses.replace(
                self.operators[-1],
                flops=0,
                bytes_read=moved,
                bytes_written=moved,
                workspace_bytes=0,
            )


class Reduction:
    """A sum over vectors or a loss: each slice gives a column, a number for each of its vectors.

    A loss adds the scores of the vectors' own classes, all in one call: the order in which a kernel
    adds stays what it was. With one column, each vector's class is the first one.
    """

    def __init__(self, writer: SliceWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._operator = writer.graph.operators[index]
        self._form = writer.forms[index]
        self._columns: list[TensorView] = []
        if self._picks:
            self._find_classes()

    @property
    def _picks(self) -> bool:
        """True if slices only pick scores, which are added afterwards."""
        return self._operator.target == LOSS and self._form.args[3] != NO_REDUCTION

    def write_slice(self, number: int, vectors: tuple[int, int]) -> None:
        """Write the column of a slice."""
        writer, target = self._writer, self._operator.target
        args = tuple(writer.slice(item, number, vectors) for item in self._form.args)
        kwargs = self._operator.kwargs
        outputs: tuple[TensorView | None, ...]
        count = vectors[1] - vectors[0]
        if self._picks:
            scores = args[0]
            target, kwargs = "aten.gather.default", {"sparse_grad": False}
            chosen = SlicedView(self._chosen).slice(*vectors)
            column = self._add_view(f"column[{number}]", (count, 1), scores.dtype)
            args, outputs = (scores, 1, chosen), (column,)
        else:
            output = self._operator.outputs[0]
            assert output is not None
            keeps_dim = target == SUM and len(args) > 2 and bool(args[2])
            shape = (count, 1) if keeps_dim else (count,)
            column = self._add_view(f"column[{number}]", shape, output.dtype)
            outputs = (column,)
            if target == LOSS:
                outputs = (column, self._operator.outputs[1] if not number else None)
        self._columns.append(column)
        writer.add_slice(self._index, number, target, args, kwargs, outputs)

    def write_end(self) -> None:
        """Join the columns, and add up the picked scores."""
        output = self._operator.outputs[0]
        assert output is not None
        columns = (tuple(self._columns), 0)
        shape = (self._form.num_vectors, *self._columns[0].shape[1:])
        if not self._picks:
            joined = output._replace(shape=shape, stride=(1,) * len(shape), offset=0)
            self._add("join", "aten.cat.default", columns, joined)
            return
        picked = self._add_result("picked", "aten.cat.default", columns, shape)
        weights, reduction = self._form.args[2:4]
        total = self._operator.outputs[1]
        if weights is None:
            args = (picked, self._marks, None, reduction, self._mark)
            self._add("loss", LOSS, args, output, total)
            return
        self._add_weighted(picked, weights, reduction == _MEAN_REDUCTION, output, total)

    def _add_weighted(
        self,
        picked: TensorView,
        weights: TensorView,
        is_mean: bool,
        output: TensorView,
        total: TensorView | None,
    ) -> None:
        """Add up weighted scores, and for a mean divide them by the sum of the weights."""
        size = (self._form.num_vectors,)
        flat = self._chosen._replace(shape=size, stride=(1,))
        chosen = self._add_result("weights", "aten.index_select.default", (weights, 0, flat), size)
        column = chosen._replace(shape=(*size, 1), stride=(1, 1))
        weighted = self._add_result("weighted", "aten.mul.Tensor", (picked, column), column.shape)
        negative = self._add_result("negative", "aten.neg.default", (column,), column.shape)
        rest = (self._marks, None, _SUM_REDUCTION, self._mark)
        if total is None:
            total = self._add_view("total", (), output.dtype)
        self._add("total", LOSS, (negative, *rest), total, None)
        if not is_mean:
            self._add("loss", LOSS, (weighted, *rest), output, None)
            return
        added = self._add_view("sum", (), output.dtype)
        self._add("sum", LOSS, (weighted, *rest), added, None)
        self._add("loss", "aten.div.Tensor", (added, total), output)

    def _find_classes(self) -> None:
        """Find the class whose score each vector gives, and mark the vectors that do not count.

        Marks are 0 where a vector counts; a class that does not exist is still refused by the loss.
        """
        classes: TensorView = self._form.args[1].view
        ignored: int = self._form.args[4]
        width: int = self._form.args[0].view.shape[1]
        shape = classes.shape
        nearest = (classes, 0, width - 1)
        chosen = self._add_result("chosen", "aten.clamp.default", nearest, shape, "int64")
        self._chosen = chosen._replace(shape=(*shape, 1), stride=(1, 1))
        difference = (classes, chosen)
        self._marks = self._add_result("marks", "aten.sub.Tensor", difference, shape, "int64")
        self._mark = ignored - min(max(ignored, 0), width - 1)
        if not self._mark:
            self._mark = -(2**62)
            compared = (classes, ignored)
            same = self._add_result("ignored", "aten.eq.Scalar", compared, shape, "bool")
            args = (self._marks, same, self._mark)
            target = "aten.masked_fill.Scalar"
            self._marks = self._add_result("marked", target, args, shape, "int64")

    def _add_view(self, suffix: str, shape: tuple[int, ...], dtype: str) -> TensorView:
        return self._writer.add_view(f"{self._operator.name}.{suffix}", dtype, shape)

    def _add_result(
        self,
        suffix: str,
        target: str,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: str | None = None,
    ) -> TensorView:
        """Add an operator with one result of its own; return this."""
        view = self._add_view(suffix, shape, dtype or self._form.args[0].view.dtype)
        self._add(suffix, target, args, view)
        return view

    def _add(
        self, suffix: str, target: str, args: tuple[Any, ...], *outputs: TensorView | None
    ) -> None:
        views = [*views_in(args)]
        made = [view for view in outputs if view is not None]
        self._writer.operators.append(
            Operator(
                name=f"{self._operator.name}.{suffix}",
                target=target,
                args=args,
                outputs=outputs,
                reads=tuple(dict.fromkeys(view.value for view in views)),
                creates=tuple(view.value for view in made),
                phase=self._operator.phase,
                module=self._operator.module,
                flops=self._form.num_vectors if target == LOSS else 0,
                bytes_read=sum(self._num_bytes(view.value) for view in views),
                bytes_written=sum(self._num_bytes(view.value) for view in made),
                recomputable=self._operator.recomputable,
            )
        )

    def _num_bytes(self, value: int) -> int:
        return self._writer.storages[self._writer.storage_of_value[value]].num_bytes
