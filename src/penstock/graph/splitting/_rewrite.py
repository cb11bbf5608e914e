"""Rewriting of a step graph with some operators in slices, and operators that join these.

Operators in slices that follow each other become one group: for each slice all of them in turn, so
that a piece is gone before the next one comes. A result that has to be whole afterwards is written
slice by slice into its place; this is the place of a whole operand whose live range ends there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.graph.executable import COPIES, out_variant
from penstock.graph.splitting._choice import SliceChoice, ends_at, fills_storage
from penstock.graph.splitting._forms import SlicedView, SliceForm, item_bytes
from penstock.graph.splitting._reductions import Reduction
from penstock.graph.splitting._writer import GraphWriter
from penstock.graph.step_graph import Operator, StepGraph, TensorView, views_in

_MAX_HOISTED = 16  # operators that pass an open group


def rewrite_in_slices(graph: StepGraph, choice: SliceChoice) -> StepGraph:
    """Return the graph in which the chosen operators run in slices."""
    return _SliceWriter(graph, choice).run()


class _SliceWriter(GraphWriter):
    def __init__(self, graph: StepGraph, choice: SliceChoice) -> None:
        super().__init__(graph, choice)
        self._last: dict[int, int] = {}  # for each old operator its last slice
        self._gone: set[int] = set()  # storages whose values lie in another one now

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
        return not any(self.forms[index].reduces for index in needed)

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
            value = result.view.value
            if value in self.pieces_of:
                continue
            old = self._find_reusable(group, index, result)
            if old is not None:
                storage = self.storage_of_value[old]
                self._gone.add(self.storage_of_value[value])
                self.storage_of_value[value] = storage
                self.current[old] = self.current[value] = old
                continue
            place = self.add_value(self.storage_of_value[value])
            self.current[value] = place
            view = result.view._replace(value=place)
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
        kwargs = {name: self.slice(item, number, vectors) for name, item in form.kwargs.items()}
        (result,) = form.outputs
        output = self.slice(result, number, vectors)
        if result.view.value in self.pieces_of:
            self.operators.append(
                self.make_slice(index, number, args=args, kwargs=kwargs, outputs=(output,))
            )
            return
        if operator.target in COPIES:
            self._write_into(index, number, "aten.copy_.default", (output, args[0]), {}, output)
        elif variant := out_variant(operator.target):
            target, (name,) = variant
            self._write_into(index, number, target, args, {**kwargs, name: output}, output)
        else:
            piece = self.add_view(f"{operator.name}[{number}]", output.dtype, output.shape)
            self.operators.append(
                self.make_slice(index, number, args=args, kwargs=kwargs, outputs=(piece,))
            )
            copied = (output, piece)
            self._write_into(index, number, "aten.copy_.default", copied, {}, output, ".put")

    def _write_into(
        self,
        index: int,
        number: int,
        target: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: TensorView,
        suffix: str = "",
    ) -> None:
        """Write a slice of a whole value, which begins the value's next version."""
        (result,) = self.forms[index].outputs
        value, old = result.view.value, place.value
        is_last = number + 1 == self.num_slices(self.forms[index])
        new = value if is_last else self.add_value(self.storage_of_value[value])
        for each in [known for known, now in self.current.items() if now == old]:
            self.current[each] = new
        written = self.make_slice(
            index,
            number,
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
        self.operators.append(dataclasses.replace(written, target=target))
