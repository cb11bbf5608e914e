"""Sums over rows and losses in parts: a number for each row, and then all of them in turn."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from penstock.graph.splitting._forms import (
    LOSS,
    NO_REDUCTION,
    SUM,
    ByRows,
    RowForm,
    item_bytes,
    views_in,
)
from penstock.graph.step_graph import Operator, StepGraph, Storage, TensorView

_SUM_REDUCTION, _MEAN_REDUCTION = 2, 1  # torch's numbers


class Writer(Protocol):
    """A graph that is being written, as `_row_parts.py` does.

    Attributes:
        graph: The graph that it is made from.
        forms: For each operator that is taken by rows its form.
        storages: Of the graph that is written.
        storage_of_value: Likewise.
    """

    graph: StepGraph
    forms: dict[int, RowForm]
    storages: list[Storage]
    storage_of_value: list[int]

    def new_value(self, storage: int) -> int:
        """Add a value to a storage."""
        ...

    def new_storage(self, name: str, num_bytes: int) -> int:
        """Add a storage of the step's own."""
        ...

    def add(self, operator: Operator) -> None:
        """Write an operator behind the others."""
        ...

    def taken(self, item: Any, part: int, rows: tuple[int, int]) -> Any:
        """An argument or result of a part."""
        ...

    def part(
        self,
        index: int,
        part: int,
        *,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[TensorView | None, ...],
    ) -> Operator:
        """One part of an operator."""
        ...


class Reduction:
    """A sum over rows or a loss: a number for each row from its parts, then all of them in turn.

    A loss adds the scores of the rows' own classes, all in one call: the order in which a kernel
    adds stays what it was. With one column, each row's class is the first one.

    Args:
        writer: Of the graph.
        index: The operator.
    """

    def __init__(self, writer: Writer, index: int) -> None:
        self.writer = writer
        self.index = index
        self.operator = writer.graph.operators[index]
        self.form = writer.forms[index]
        self.columns: list[TensorView] = []
        if self.picks:
            self._find_classes()

    @property
    def picks(self) -> bool:
        """Whether scores are picked first and added later."""
        return self.operator.target == LOSS and self.form.args[3] != NO_REDUCTION

    def write_part(self, part: int, rows: tuple[int, int]) -> None:
        """Write the numbers of some rows, a column."""
        writer, form = self.writer, self.form
        args = tuple(writer.taken(item, part, rows) for item in form.args)
        kwargs, target = dict(form.kwargs), self.operator.target
        outputs: tuple[TensorView | None, ...]
        if self.picks:
            scores = args[0]
            target, kwargs = "aten.gather.default", {"sparse_grad": False}
            chosen = ByRows(self.chosen).part(*rows)
            column = self._column(part, (rows[1] - rows[0], 1), scores.dtype)
            args, outputs = (scores, 1, chosen), (column,)
        else:
            output = self.operator.outputs[0]
            assert output is not None
            kept = target == SUM and len(args) > 2 and bool(args[2])
            shape = (rows[1] - rows[0], 1) if kept else (rows[1] - rows[0],)
            column = self._column(part, shape, output.dtype)
            outputs = (column,)
            if target == LOSS:
                outputs = (column, self.operator.outputs[1] if not part else None)
        self.columns.append(column)
        made = writer.part(self.index, part, args=args, kwargs=kwargs, outputs=outputs)
        writer.add(dataclasses.replace(made, target=target))

    def write_end(self) -> None:
        """Join the columns; add up what was picked."""
        output = self.operator.outputs[0]
        assert output is not None
        rest = self.columns[0].shape[1:]
        shape, stride = (self.form.num_rows, *rest), (1,) * (1 + len(rest))
        if not self.picks:
            joined = output._replace(shape=shape, stride=stride, offset=0)
            self._emit("join", "aten.cat.default", (tuple(self.columns), 0), joined)
            return
        picked = self._new("picked", "aten.cat.default", (tuple(self.columns), 0), shape)
        weights, reduction = self.form.args[2:4]
        total = self.operator.outputs[1]
        if weights is None:
            args = (picked, self.marks, None, reduction, self.mark)
            self._emit("loss", LOSS, args, output, total)
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
        """With weights of classes: the sum of the weighted, over that of the weights."""
        rows = (self.form.num_rows,)
        flat = self.chosen._replace(shape=rows, stride=(1,))
        chosen = self._new("weights", "aten.index_select.default", (weights, 0, flat), rows)
        column = chosen._replace(shape=(*rows, 1), stride=(1, 1))
        weighted = self._new("weighted", "aten.mul.Tensor", (picked, column), column.shape)
        negative = self._new("negative", "aten.neg.default", (column,), column.shape)
        rest = (self.marks, None, _SUM_REDUCTION, self.mark)
        if total is None:
            total = self._view("total", (), output.dtype)
        self._emit("total", LOSS, (negative, *rest), total, None)
        if not is_mean:
            self._emit("loss", LOSS, (weighted, *rest), output, None)
            return
        added = self._view("sum", (), output.dtype)
        self._emit("sum", LOSS, (weighted, *rest), added, None)
        self._emit("loss", "aten.div.Tensor", (added, total), output)

    def _find_classes(self) -> None:
        """Which score each row picks, and which rows do not count.

        Marks are 0 where a row counts; a class that does not exist is still refused by the loss.
        """
        classes: TensorView = self.form.args[1].view
        ignored: int = self.form.args[4]
        width: int = self.form.args[0].view.shape[1]
        shape = classes.shape
        nearest = (classes, 0, width - 1)
        chosen = self._new("chosen", "aten.clamp.default", nearest, shape, "int64")
        self.chosen = chosen._replace(shape=(*shape, 1), stride=(1, 1))
        self.marks = self._new("marks", "aten.sub.Tensor", (classes, chosen), shape, "int64")
        self.mark = ignored - min(max(ignored, 0), width - 1)
        if not self.mark:
            self.mark = -(2**62)
            same = self._new("ignored", "aten.eq.Scalar", (classes, ignored), shape, "bool")
            args = (self.marks, same, self.mark)
            self.marks = self._new("marked", "aten.masked_fill.Scalar", args, shape, "int64")

    def _view(self, what: str, shape: tuple[int, ...], dtype: str) -> TensorView:
        num = 1
        for extent in shape:
            num *= extent
        storage = self.writer.new_storage(f"{self.operator.name}.{what}", num * item_bytes(dtype))
        value = self.writer.new_value(storage)
        return TensorView(value, dtype, shape, (1,) * len(shape), 0)

    def _column(self, part: int, shape: tuple[int, ...], dtype: str) -> TensorView:
        return self._view(f"column[{part}]", shape, dtype)

    def _new(
        self,
        what: str,
        target: str,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: str | None = None,
    ) -> TensorView:
        view = self._view(what, shape, dtype or self.form.args[0].view.dtype)
        self._emit(what, target, args, view)
        return view

    def _emit(
        self, what: str, target: str, args: tuple[Any, ...], *outputs: TensorView | None
    ) -> None:
        views = [*views_in(args)]
        made = [view for view in outputs if view is not None]
        self.writer.add(
            Operator(
                name=f"{self.operator.name}.{what}",
                target=target,
                args=args,
                outputs=outputs,
                reads=tuple(dict.fromkeys(view.value for view in views)),
                creates=tuple(view.value for view in made),
                phase=self.operator.phase,
                module=self.operator.module,
                flops=self.form.num_rows if target == LOSS else 0,
                bytes_read=sum(self._num_bytes(view.value) for view in views),
                bytes_written=sum(self._num_bytes(view.value) for view in made),
                recomputable=self.operator.recomputable,
            )
        )

    def _num_bytes(self, value: int) -> int:
        return self.writer.storages[self.writer.storage_of_value[value]].num_bytes
