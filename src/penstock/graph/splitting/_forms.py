"""Forms in which operators run in slices: operands and results by vectors.

A vector is all of the last dimension; the other dimensions together count vectors, and a slice is a
range of them. Only operators are listed here whose vectors have the same bits however many of them
one call has: softmaxes and their gradients, the loss of given classes, sums over a vector, and
arithmetic that is rounded exactly. Products of matrices are not among them: the order in which a
kernel sums depends on how many vectors it gets. They run in slices only where the caller says so:
`x W` and `x W + b` by the rows of x; `G^T x` and the sum of the rows of G, the gradients of W and
b, as sums over slices of rows (`adds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.graph.step_graph import Operator, StepGraph, TensorView, views_in

LOSS = "aten.nll_loss_forward.default"
LOSS_BACKWARD = "aten.nll_loss_backward.default"
SUM = "aten.sum.dim_IntList"
NO_REDUCTION = 0  # torch's number for reduction="none"

_SOFTMAXES = {  # the number of operands; `dim` follows them
    **dict.fromkeys(("aten._softmax.default", "aten._log_softmax.default"), 1),
    "aten._softmax_backward_data.default": 2,
    "aten._log_softmax_backward_data.default": 2,
}
_ARITHMETIC = {
    *("aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor"),
    *("aten.mul.Scalar", "aten.add.Scalar", "aten.sub.Scalar", "aten.div.Scalar"),
    *("aten.neg.default", "aten._to_copy.default", "aten.clone.default", "aten.where.self"),
    *("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"),
}
PRODUCT = "aten.mm.default"
PRODUCT_AND_BIAS = "aten.addmm.default"
ADDED_PRODUCT = "aten.addmm_.default"  # what adds a slice's product to the sum
ADD = "aten.add_.Tensor"
_SUMMED_DTYPES = ("float32", "float64")  # others would round after each slice
_HARMLESS_OPTIONS = {"dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"}
_PLAIN_FORMATS = ("contiguous_format", "preserve_format")
_ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
}


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element, as 4 for `"float32"`; 0 for dtypes without arithmetic."""
    return _ITEM_BYTES.get(dtype, 0)


def share_costs(operator: Operator, number: int, num_parts: int) -> dict[str, Any]:
    """Return the costs of one part of an operator as fields; its counts add up to the whole."""
    shares: dict[str, Any] = {
        name: count * (number + 1) // num_parts - count * number // num_parts
        for name in ("flops", "bytes_read", "bytes_written")
        for count in [getattr(operator, name)]
    }
    seconds = operator.seconds
    return shares | {"seconds": None if seconds is None else seconds / num_parts}


class SlicedView(NamedTuple):
    """An operand or result of which one call may take a slice.

    Attributes:
        view: The whole of it, with one dimension (a number for each vector) or two.
        is_transposed: Whether the call takes the vectors as columns.
    """

    view: TensorView
    is_transposed: bool = False

    def slice(self, begin: int, end: int) -> TensorView:
        """Return the vectors from `begin` to `end`, exclusive."""
        view = self.view
        shape = (end - begin, *view.shape[1:])
        return self.turn(view._replace(shape=shape, offset=view.offset + begin * view.stride[0]))

    def turn(self, view: TensorView) -> TensorView:
        """Return vectors as the call takes them."""
        return _transpose(view) if self.is_transposed else view

    @property
    def is_dense(self) -> bool:
        """True if the vectors lie one after the other from the storage's start."""
        view = self.view
        return len(view.shape) == 2 and view.stride == (view.shape[1], 1) and not view.offset

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors."""
        return math.prod(self.view.shape) * item_bytes(self.view.dtype)


@dataclass(frozen=True, slots=True)
class SliceForm:
    """An operator that runs in slices; there are no tensors among its keyword arguments.

    Attributes:
        args: Its arguments, with `SlicedView` where one call takes a slice.
        outputs: Its results: `SlicedView`; those of a reduction as they are.
        reduces: Whether its result is put together from the results of its slices.
        adds: Whether its result is the sum of those of its slices.
    """

    args: tuple[Any, ...]
    outputs: tuple[Any, ...]
    reduces: bool = False
    adds: bool = False

    @property
    def num_vectors(self) -> int:
        """Vectors of the whole."""
        return next(self.sliced_views()).view.shape[0]

    def sliced_views(self) -> Iterator[SlicedView]:
        """Yield the operands and results that are taken in slices."""
        return (item for item in (*self.args, *self.outputs) if isinstance(item, SlicedView))

    def whole_views(self) -> Iterator[TensorView]:
        """Yield the operands that every call takes whole."""
        return views_in([item for item in self.args if not isinstance(item, SlicedView)])


def find_slice_form(
    graph: StepGraph, operator: Operator, *, products: bool = False
) -> SliceForm | None:
    """Return the form in which an operator of a graph runs in slices; None if there is none."""
    if operator.mutates or operator.after or operator.random or operator.recompute_target:
        return None
    form = _find_form(operator)
    if form is None and products:
        form = _find_product_form(operator)
    if form is None or form.num_vectors < 2:
        return None
    views = {view.value for view in views_in(operator.args)}
    made = {view.value for view in operator.outputs if view is not None}
    created = {graph.storage_of_value[value] for value in operator.creates}
    plain = views == set(operator.reads) and made == set(operator.creates)
    return form if plain and len(created) == len(operator.creates) else None


def _find_form(operator: Operator) -> SliceForm | None:
    target, args = operator.target, operator.args
    if target in _SOFTMAXES:
        return _softmax_form(operator, _SOFTMAXES[target])
    if target in _ARITHMETIC:
        return _arithmetic_form(operator)
    if target in (LOSS, LOSS_BACKWARD):
        return _loss_form(operator)
    if target == SUM and isinstance(args[0], TensorView):
        vectors = _flatten(args[0])
        dims = args[1] if isinstance(args[1], tuple) else ()
        last = tuple(dim % len(args[0].shape) for dim in dims) == (len(args[0].shape) - 1,)
        if vectors is not None and last and vectors.is_dense:
            return SliceForm((vectors, (1,), *args[2:]), operator.outputs, reduces=True)
    return None


def _find_product_form(operator: Operator) -> SliceForm | None:
    target, args, (output, *_) = operator.target, operator.args, operator.outputs or (None,)
    is_known = target in (PRODUCT, PRODUCT_AND_BIAS, SUM) and isinstance(args[0], TensorView)
    if output is None or operator.kwargs or not is_known:
        return None
    if target == PRODUCT:
        return _product_form(operator)
    if target == PRODUCT_AND_BIAS and len(args[0].shape) == 1 and output.stride[1] == 1:
        return SliceForm((args[0], SlicedView(args[1]), args[2]), (SlicedView(output),))
    is_sum_of_rows = target == SUM and len(args[0].shape) == 2 and args[1] == (0,)
    if is_sum_of_rows and output.dtype in _SUMMED_DTYPES:
        return SliceForm((SlicedView(args[0]), *args[1:]), operator.outputs, adds=True)
    return None


def _product_form(operator: Operator) -> SliceForm | None:
    """Return the form of (left, right): a sum where the left one is transposed, else by rows."""
    (left, right), output = operator.args, operator.outputs[0]
    if output is None or output.stride != (output.shape[1], 1):
        return None
    turned = SlicedView(_transpose(left), is_transposed=True)
    if left.stride[0] == 1 and left.shape[0] > 1 and turned.view.stride[1] == 1:
        if output.dtype not in _SUMMED_DTYPES:
            return None
        return SliceForm((turned, SlicedView(right)), operator.outputs, adds=True)
    return SliceForm((SlicedView(left), right), (SlicedView(output),))


def _transpose(view: TensorView) -> TensorView:
    return view._replace(shape=view.shape[::-1], stride=view.stride[::-1])


def _softmax_form(operator: Operator, num_tensors: int) -> SliceForm | None:
    """Return the form of (operands, dim, ...), if the last dimension is normalised."""
    args, output = operator.args, operator.outputs[0]
    if output is None or args[num_tensors] % len(output.shape) != len(output.shape) - 1:
        return None
    operands = [_flatten(view) for view in args[:num_tensors]]
    result = _flatten(output)
    if result is None or None in operands or not result.is_dense:
        return None
    return SliceForm((*operands, 1, *args[num_tensors + 1 :]), (result,))


def _arithmetic_form(operator: Operator) -> SliceForm | None:
    output = operator.outputs[0]
    result = None if output is None else _flatten(output)
    if output is None or result is None or not result.is_dense:
        return None
    if not _are_harmless(operator.kwargs):
        return None
    args = []
    for item in operator.args:
        if isinstance(item, TensorView) and item.shape:
            operand = _broadcast(item, output.shape)
            if operand is None:
                return None
            args.append(operand)
        elif isinstance(item, TensorView | int | float | bool) or item is None:
            args.append(item)
        else:
            return None
    return SliceForm(tuple(args), (result,))


def _are_harmless(options: Mapping[str, Any]) -> bool:
    """Return whether options change no layout and round only once (`alpha` would do so twice)."""
    if options.get("alpha", 1) not in (1, -1) or options.get("rounding_mode") is not None:
        return False
    layout = options.get("memory_format")
    plain = layout is None or layout.get("memory_format") in _PLAIN_FORMATS
    return plain and options.keys() <= _HARMLESS_OPTIONS | {"alpha", "rounding_mode"}


def _loss_form(operator: Operator) -> SliceForm | None:
    """Return the form of (gradient, if backward, scores, classes, weights, reduction, ...)."""
    backward = operator.target == LOSS_BACKWARD
    args, outputs = list(operator.args), operator.outputs
    first = int(backward)
    scores, classes = args[first : first + 2]
    if not (isinstance(scores, TensorView) and isinstance(classes, TensorView)):
        return None
    if len(scores.shape) != 2 or len(classes.shape) != 1 or classes.dtype != "int64":
        return None
    vectors = SlicedView(scores)
    args[first : first + 2] = [vectors, SlicedView(classes)]
    if backward and args[4] == NO_REDUCTION:
        args[0] = SlicedView(args[0])
    if outputs[0] is None:
        return None
    result = SlicedView(outputs[0])
    if not (result if backward else vectors).is_dense:
        return None
    return SliceForm(tuple(args), (result,) if backward else outputs, reduces=not backward)


def _flatten(view: TensorView) -> SlicedView | None:
    """Put all dimensions but the last together; None where strides do not allow it."""
    if len(view.shape) < 2 or not all(view.shape):
        return None
    num_vectors, step = 1, None
    for extent, stride in reversed(list(zip(view.shape[:-1], view.stride[:-1], strict=True))):
        if extent == 1:
            continue
        if step is not None and stride != step * num_vectors:
            return None
        step = stride if step is None else step
        num_vectors *= extent
    width = view.shape[-1]
    stride = (width if step is None else step, view.stride[-1])
    return SlicedView(view._replace(shape=(num_vectors, width), stride=stride))


def _broadcast(view: TensorView, shape: tuple[int, ...]) -> SlicedView | None:
    missing = len(shape) - len(view.shape)
    stride = [0] * missing
    for extent, own, step in zip(shape[missing:], view.shape, view.stride, strict=True):
        stride.append(step if own == extent else 0)
    return _flatten(view._replace(shape=shape, stride=tuple(stride)))
