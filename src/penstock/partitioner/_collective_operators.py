"""Operators that see more than a rank's pieces: written out with their own collectives.

- Random numbers: every rank draws those of the whole tensor, and keeps its piece, so that a step
  has the numbers of the unsplit one.
- Rows of a table of embeddings: a rank gives zeros for the rows of others.
- A mean loss of classes: the sum over all ranks, by the weight of all ranks.
- A batch norm whose batch is split: the statistics of all ranks, in `_batch_norm`.
"""

from __future__ import annotations

from penstock.graph.encoding import EMPTY
from penstock.graph.step_graph import TensorView
from penstock.partitioner._batch_norm import batch_norm, batch_norm_backward
from penstock.partitioner._mesh import PARTIAL, REPLICATED
from penstock.partitioner._operator_call import OperatorCall
from penstock.partitioner._pieces import StoragePiece, dense_strides, split_into_digits
from penstock.partitioner._rank_builder import COPY
from penstock.partitioner._split import needed_placement


def draw_whole(call: OperatorCall) -> bool:
    """Draw the random numbers of the whole tensor, and keep those of the rank's piece."""
    if all(axis < 0 for axis in call.split):
        return False
    view, builder = call.operator.args[0], call.builder
    use = call.axes.inputs[0]
    target = call.operand_in(view)
    rest = [call.whole_operand_in(each) for each in call.operator.args[1:]]  # probabilities
    (result,) = call.declare_outputs()
    num_bytes = call.writer.graph.storages[use.storage].num_bytes
    value = builder.storage(f"{call.operator.name}.whole", num_bytes, builder.kind)
    drawn = view._replace(value=value)
    builder.emit(EMPTY, (), (drawn,))
    drawn = builder.change(call.operator.target, drawn, *rest, random=True)
    extents = call.writer.extents(use.storage)
    whole = StoragePiece(
        drawn.value,
        view.dtype,
        (REPLICATED,) * len(call.split),
        (0,) * len(extents),
        extents,
        dense_strides(extents),
    )
    own = builder.compact(builder.move(whole, needed_placement(use, call.split), extents))
    part = call.writer.view(view, use.storage, own, target.shape)
    assert result is not None
    builder.emit(COPY, (target, part), (result,), mutates=((target.value, result.value),))
    call.put_to_rest()
    return True


def embed_own_rows(call: OperatorCall) -> bool:
    """Look up rows of a split table: zeros where another rank has the row."""
    levels = call.levels_of("v")
    if not levels:
        return False
    builder = call.builder
    table, places, *rest = (call.operand_in(each) for each in call.operator.args)
    (result,) = call.declare_outputs()
    assert result is not None
    mine, shifted = _own_rows(call, places, table.shape[0], levels)
    safe = builder.call("aten.clamp.default", shifted, 0, table.shape[0] - 1, like=shifted)
    rows = builder.call("aten.embedding.default", table, safe, *rest, like=result)
    mask = mine._replace(shape=result.shape, stride=(*mine.stride, 0))
    builder.emit("aten.mul.Tensor", (rows, mask), (result,))
    call.put_to_rest()
    return True


def embed_own_rows_backward(call: OperatorCall) -> bool:
    """Add up the gradients of a rank's own rows."""
    levels = call.levels_of("v")
    by_frequency = call.operator.args[4]
    if by_frequency and any(axis >= 0 and call.axes.names[axis] != "w" for axis in call.split):
        raise call.refuse("its gradients are scaled by the frequency of all places")
    if not levels:
        return False
    builder = call.builder
    grad, places, _, padding, _ = (call.operand_in(each) for each in call.operator.args)
    (result,) = call.declare_outputs()
    assert result is not None
    mine, shifted = _own_rows(call, places, result.shape[0], levels)
    if padding >= 0:
        used = builder.call("aten.ne.Scalar", places, padding, like=mine)
        mine = builder.call("aten.logical_and.default", mine, used, like=mine)
    others = builder.call("aten.logical_not.default", mine, like=mine)
    own = builder.call("aten.masked_fill.Scalar", shifted, others, -1, like=shifted)
    args = (grad, own, result.shape[0], -1, False)
    builder.emit(call.operator.target, args, (result,))
    call.put_to_rest()
    return True


def _own_rows(
    call: OperatorCall, places: TensorView, rows: int, levels: list[int]
) -> tuple[TensorView, TensorView]:
    """Return whether a place is one of the rank's rows, and its number among these."""
    builder, sizes = call.builder, call.mesh.sizes
    axis = call.axes.names.index("v") if "v" in call.axes.names else -1
    if axis < 0 or any(call.split[level] != axis for level in levels):
        raise call.refuse("its rows are split within an axis")
    digits = split_into_digits(
        (call.axes.sizes[axis],), (tuple(0 if a == axis else -1 for a in call.split),), sizes
    )
    assert digits is not None
    if [each.level for each in digits[: len(levels)]] != levels:
        raise call.refuse("its rows are split in turns")
    number = 0
    for level in levels:
        number = number * sizes[level] + builder.coordinates[level]
    dense = TensorView(0, places.dtype, places.shape, ())
    shifted = builder.call("aten.sub.Tensor", places, number * rows, like=dense)
    boolean = dense._replace(dtype="bool")
    low = builder.call("aten.ge.Scalar", shifted, 0, like=boolean)
    high = builder.call("aten.lt.Scalar", shifted, rows, like=boolean)
    return builder.call("aten.logical_and.default", low, high, like=boolean), shifted


def mean_loss(call: OperatorCall) -> bool:
    """Calculate a mean over all ranks' classes: sums of ranks, by the weight of all."""
    args = tuple(call.operand_in(each) for each in call.operator.args)
    levels = call.levels_of("n")
    outputs = call.declare_outputs()
    is_mean = args[3] == 1 and bool(levels)
    if is_mean:
        args = (*args[:3], 2, *args[4:])
        if None in outputs:
            raise call.refuse("its total weight is no value of the step")
    call.emit(call.operator.target, args, {}, outputs)
    call.put_to_rest()
    if not is_mean:
        return True
    writer, builder = call.writer, call.builder
    loss, weight = (writer.pieces[each.value] for each in call.operator.outputs if each)
    whole = tuple(REPLICATED if axis == PARTIAL else axis for axis in weight.placement)
    total = builder.move(weight, whole, (1,))
    divided = builder.change(
        "aten.div_.Tensor",
        TensorView(loss.value, loss.dtype, (), ()),
        TensorView(total.value, total.dtype, (), ()),
    )
    value = next(each.value for each in call.operator.outputs if each)
    writer.pieces[value] = loss._replace(value=divided.value)
    return True


WRITTEN_OUT = {
    **dict.fromkeys(("bernoulli_", "uniform_", "normal_"), draw_whole),
    "embedding": embed_own_rows,
    "embedding_dense_backward": embed_own_rows_backward,
    "nll_loss_forward": mean_loss,
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
}
