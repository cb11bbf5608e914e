"""Which operators work row by row, and how one call of them looks at its operands by rows.

A row is all of the last dimension; the other dimensions together count rows. Only operators are
listed here whose rows have the same bits however many of them one call has: softmaxes and their
gradients, the loss of given classes, sums over a row, and arithmetic that is rounded exactly.
Products of matrices are not among them: how a kernel sums depends on how many rows it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.graph.step_graph import Operator, StepGraph, TensorView

LOSS = "aten.nll_loss_forward.default"
LOSS_BACKWARD = "aten.nll_loss_backward.default"
SUM = "aten.sum.dim_IntList"
NO_REDUCTION = 0  # torch's number for reduction="none"

_SOFTMAXES = {"aten._softmax.default": 1, "aten._log_softmax.default": 1}  # place of `dim`
_SOFTMAX_GRADIENTS = {
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
}
_ARITHMETIC = {
    *("aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor"),
    *("aten.mul.Scalar", "aten.add.Scalar", "aten.sub.Scalar", "aten.div.Scalar"),
    *("aten.neg.default", "aten._to_copy.default", "aten.clone.default", "aten.where.self"),
    *("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"),
}
_HARMLESS_OPTIONS = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}
_PLAIN_FORMATS = ("contiguous_format", "preserve_format")


class ByRows(NamedTuple):
    """An operand or result of which one call may take some rows.

    Attributes:
        view: The whole of it, with one dimension (a number for each row) or two.
    """

    view: TensorView

    def part(self, begin: int, end: int) -> TensorView:
        """Rows from `begin` to `end`, exclusive."""
        view = self.view
        shape = (end - begin, *view.shape[1:])
        return view._replace(shape=shape, offset=view.offset + begin * view.stride[0])

    @property
    def covers(self) -> int:
        """Elements if the rows lie one after the other from the storage's start, else 0."""
        view = self.view
        dense = len(view.shape) == 2 and view.stride == (view.shape[1], 1) and not view.offset
        return math.prod(view.shape) if dense else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return self.covers * item_bytes(self.view.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """An operator, taken by rows.

    Attributes:
        num_rows: Rows of the whole.
        args: Its arguments, with `ByRows` where a part of it takes some rows.
        kwargs: Its keyword arguments, likewise.
        outputs: Its results: `ByRows`; of a reduction its results as they are.
        reduces: Whether what it gives is put together of what its parts give.
    """

    num_rows: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Any, ...]
    reduces: bool = False

    def by_rows(self) -> Iterator[ByRows]:
        """Operands and results that are taken by rows."""
        for item in (*self.args, *self.kwargs.values(), *self.outputs):
            if isinstance(item, ByRows):
                yield item


def row_form(graph: StepGraph, operator: Operator) -> RowForm | None:
    """Return how an operator is taken by rows; None if it cannot be.

    Args:
        graph: Its graph.
        operator: The operator.
    """
    if operator.mutates or operator.after or operator.random or operator.recompute_target:
        return None
    form = _form(operator)
    if form is None or form.num_rows < 2:
        return None
    views = {view.value for view in views_in((operator.args, operator.kwargs))}
    made = {view.value for view in operator.outputs if view is not None}
    created = {graph.storage_of_value[value] for value in operator.creates}
    plain = views == set(operator.reads) and made == set(operator.creates)
    return form if plain and len(created) == len(operator.creates) else None


def _form(operator: Operator) -> RowForm | None:
    target, args = operator.target, operator.args
    if target in _SOFTMAXES:
        return _softmax_form(operator, _SOFTMAXES[target], 1)
    if target in _SOFTMAX_GRADIENTS:
        return _softmax_form(operator, _SOFTMAX_GRADIENTS[target], 2)
    if target in _ARITHMETIC:
        return _arithmetic_form(operator)
    if target in (LOSS, LOSS_BACKWARD):
        return _loss_form(operator)
    if target == SUM and isinstance(args[0], TensorView):
        rows = as_rows(args[0])
        dims = args[1] if isinstance(args[1], tuple) else ()
        last = tuple(dim % len(args[0].shape) for dim in dims) == (len(args[0].shape) - 1,)
        if rows is not None and last and rows.covers:
            return RowForm(
                num_rows=rows.view.shape[0],
                args=(rows, (1,), *args[2:]),
                kwargs=operator.kwargs,
                outputs=operator.outputs,
                reduces=True,
            )
    return None


def _softmax_form(operator: Operator, place_of_dim: int, num_tensors: int) -> RowForm | None:
    """(operands, dim, what it takes them for): the last dimension is the row."""
    args, output = operator.args, operator.outputs[0]
    if output is None or args[place_of_dim] % len(output.shape) != len(output.shape) - 1:
        return None
    rows = [as_rows(view) for view in args[:num_tensors]]
    result = as_rows(output)
    if result is None or None in rows or not result.covers:
        return None
    return RowForm(
        num_rows=result.view.shape[0],
        args=(*rows, 1, *args[place_of_dim + 1 :]),
        kwargs=operator.kwargs,
        outputs=(result,),
    )


def _arithmetic_form(operator: Operator) -> RowForm | None:
    output = operator.outputs[0]
    result = None if output is None else as_rows(output)
    if output is None or result is None or not result.covers:
        return None
    if not _harmless(operator.kwargs):
        return None
    args = []
    for item in operator.args:
        if isinstance(item, TensorView) and item.shape:
            taken = _broadcast_rows(item, output.shape)
            if taken is None:
                return None
            args.append(taken)
        elif isinstance(item, TensorView | int | float | bool) or item is None:
            args.append(item)
        else:
            return None
    return RowForm(
        num_rows=result.view.shape[0],
        args=tuple(args),
        kwargs=operator.kwargs,
        outputs=(result,),
    )


def _harmless(options: Mapping[str, Any]) -> bool:
    """Whether keyword arguments change no layout and round only once (`alpha` would do twice)."""
    if options.get("alpha", 1) not in (1, -1) or options.get("rounding_mode") is not None:
        return False
    layout = options.get("memory_format")
    plain = layout is None or layout.get("memory_format") in _PLAIN_FORMATS
    return plain and options.keys() <= _HARMLESS_OPTIONS | {"alpha", "rounding_mode"}


def _loss_form(operator: Operator) -> RowForm | None:
    """(gradient, if backward,) log-probabilities, classes, weights, reduction, ..."""
    backward = operator.target == LOSS_BACKWARD
    args = list(operator.args)
    first = int(backward)
    scores, classes = args[first], args[first + 1]
    if not (isinstance(scores, TensorView) and isinstance(classes, TensorView)):
        return None
    if len(scores.shape) != 2 or len(classes.shape) != 1 or classes.dtype != "int64":
        return None
    rows = ByRows(scores)
    args[first : first + 2] = [rows, ByRows(classes)]
    if backward and args[4] == NO_REDUCTION:
        args[0] = ByRows(args[0])
    outputs = operator.outputs
    if backward:
        if outputs[0] is None or not ByRows(outputs[0]).covers:
            return None
        outputs = (ByRows(outputs[0]),)
    elif not rows.covers or outputs[0] is None:
        return None
    return RowForm(
        num_rows=scores.shape[0],
        args=tuple(args),
        kwargs=operator.kwargs,
        outputs=outputs,
        reduces=not backward,
    )


def as_rows(view: TensorView) -> ByRows | None:
    """Put all dimensions but the last together; None where strides do not allow it."""
    if len(view.shape) < 2 or not all(view.shape):
        return None
    num_rows, step = 1, None
    for extent, stride in reversed(list(zip(view.shape[:-1], view.stride[:-1], strict=True))):
        if extent == 1:
            continue
        if step is not None and stride != step * num_rows:
            return None
        step = stride if step is None else step
        num_rows *= extent
    width = view.shape[-1]
    return ByRows(
        view._replace(
            shape=(num_rows, width), stride=(width if step is None else step, view.stride[-1])
        )
    )


def _broadcast_rows(view: TensorView, shape: tuple[int, ...]) -> ByRows | None:
    missing = len(shape) - len(view.shape)
    stride = [0] * missing
    for extent, own, step in zip(shape[missing:], view.shape, view.stride, strict=True):
        stride.append(step if own == extent else 0)
    return as_rows(view._replace(shape=shape, stride=tuple(stride)))


def views_in(value: Any) -> Iterator[TensorView]:
    """Views among arguments, however deep."""
    if isinstance(value, TensorView):
        yield value
    elif isinstance(value, ByRows):
        yield value.view
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from views_in(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from views_in(item)


def item_bytes(dtype: str) -> int:
    """Bytes of an element, as `4` for `"float32"`; 0 of dtypes that are not arithmetic."""
    return _ITEM_BYTES.get(dtype, 0)


_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
}
