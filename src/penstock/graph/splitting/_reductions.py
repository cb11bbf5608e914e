"""Sums over vectors and losses in slices: a number for each vector, then all of these in turn."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.graph.splitting._forms import LOSS, NO_REDUCTION, SUM, SlicedView
from penstock.graph.splitting._writer import GraphWriter
from penstock.graph.step_graph import Operator, TensorView, views_in

_SUM_REDUCTION, _MEAN_REDUCTION = 2, 1  # torch's numbers


class Reduction:
    """A sum over vectors or a loss: each slice gives a column, a number for each of its vectors.

    A loss adds the scores of the vectors' own classes, all in one call: the order in which a kernel
    adds stays what it was. With one column, each vector's class is the first one.
    """

    def __init__(self, writer: GraphWriter, index: int) -> None:
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
        kwargs = dict(self._form.kwargs)
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
        made = writer.make_slice(self._index, number, args=args, kwargs=kwargs, outputs=outputs)
        writer.operators.append(dataclasses.replace(made, target=target))

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
