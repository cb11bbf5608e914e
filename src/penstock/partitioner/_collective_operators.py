"""Operators that see more than a rank's pieces: written out with their own collectives.

- Random numbers: every rank draws those of the whole tensor, and keeps its piece, so that a step
  has the numbers of the unsplit one.
- Rows of a table of embeddings: a rank gives zeros for the rows of others.
- A mean loss of classes: the sum over all ranks, by the weight of all ranks.
- A batch norm whose batch is split: the statistics of all ranks, as SyncBatchNorm. With ranks' own
  means m_r and variances v_r, of equal numbers of elements,

      m = mean of m_r,    v = mean of (v_r + (m_r - m)^2).
"""

from __future__ import annotations

from math import prod

from penstock.graph.encoding import EMPTY
from penstock.graph.step_graph import TensorView
from penstock.partitioner._mesh import PARTIAL, REPLICATED
from penstock.partitioner._operator_call import OperatorCall
from penstock.partitioner._pieces import StoragePiece, dense_strides, split_into_digits
from penstock.partitioner._rank_builder import CLONE, COPY
from penstock.partitioner._split import needed_placement


def draw_whole(call: OperatorCall) -> bool:
    """Draw the random numbers of the whole tensor, and keep those of the rank's piece."""
    if all(axis < 0 for axis in call.split):
        return False
    view, builder = call.operator.args[0], call.builder
    use = call.axes.inputs[0]
    target, rest = call.operand_in(view), call.operator.args[1:]
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
    if not levels:
        return False
    builder = call.builder
    grad, places, _, padding, by_frequency = (call.operand_in(each) for each in call.operator.args)
    if by_frequency:
        raise call.refuse("its gradients are scaled by frequency")
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


def batch_norm(call: OperatorCall) -> bool:
    """Normalise by the statistics of all ranks."""
    levels = call.summed_levels()
    x_view, training = call.operator.args[0], call.operator.args[5]
    if not levels or not training:
        return False
    builder = call.builder
    x, weight, bias, mean, variance, _, momentum, epsilon = (
        call.operand_in(each) for each in call.operator.args
    )
    outputs = call.declare_outputs(added_up=True)
    dims = (0, *range(2, len(x.shape)))
    vector = TensorView(0, "float32", (x.shape[1],), (1,))
    spread, center = (
        builder.new_view(vector.shape, "float32"),
        builder.new_view(vector.shape, "float32"),
    )
    builder.emit("aten.var_mean.correction", (x, dims), (spread, center), kwargs={"correction": 0})
    whole = _average(call, builder.dense(center), levels)
    apart = builder.call("aten.sub.Tensor", center, whole, like=vector)
    spread = builder.change("aten.addcmul_.default", spread, apart, apart)
    spread = _average(call, spread, levels)
    args = (x, weight, bias, whole, spread, False, momentum, epsilon)
    builder.emit(call.operator.target, args, (outputs[0], None, None))
    shifted = builder.call("aten.add.Scalar", spread, epsilon, like=vector)
    if outputs[1] is not None:
        builder.emit(CLONE, (whole,), (outputs[1],))
    if outputs[2] is not None:
        builder.emit("aten.rsqrt.default", (shifted,), (outputs[2],))
    count = prod(x_view.shape) // x_view.shape[1]
    scaled = builder.call("aten.mul.Scalar", spread, count / (count - 1), like=vector)
    for running, new in ((mean, whole), (variance, scaled)):
        if running is not None:
            after = call.made_after(running.value)
            args = (running, new, momentum)
            made = running._replace(value=after)
            builder.emit("aten.lerp_.Scalar", args, (made,), mutates=((running.value, after),))
    call.put_to_rest()
    return True


def _average(call: OperatorCall, view: TensorView, levels: list[int]) -> TensorView:
    """Return the mean of a vector over the ranks of some levels."""
    builder = call.builder
    num = prod(call.mesh.sizes[level] for level in levels)
    view = builder.call("aten.div.Scalar", view, num, like=view)
    return builder.add_up_whole(view, levels)


def batch_norm_backward(call: OperatorCall) -> bool:
    """Return gradients by the sums of all ranks.

    With N elements of a channel, x' = (x - m) / s, and sums over all of them,

        gradient = w/s (g - sum(g)/N - x' sum(g x')/N).
    """
    levels = call.summed_levels()
    if not levels or not call.operator.args[7]:
        return False
    builder, x_view = call.builder, call.operator.args[1]
    args = [call.operand_in(each) for each in call.operator.args]
    grad, x, weight, _, _, mean, inverse, _, _, wanted = args
    outputs = call.declare_outputs(added_up=True)
    vector = TensorView(0, "float32", (x.shape[1],), (1,))
    sums = [builder.new_view(vector.shape, "float32") for _ in range(2)]
    local = (*args[:9], (False, True, True))
    builder.emit(call.operator.target, local, (None, *sums))
    sums = [builder.add_up_whole(each, levels) for each in sums]
    for each, output in zip(sums, outputs[1:], strict=True):
        if output is not None:
            builder.emit(CLONE, (each,), (output,))
    if outputs[0] is not None and wanted[0]:
        count = prod(x_view.shape) // x_view.shape[1]
        along = [0] * len(x.shape)

        def spread(view: TensorView) -> TensorView:
            stride = (0, view.stride[0], *along[2:])
            return view._replace(shape=x.shape, stride=stride)

        slope = builder.call("aten.mul.Tensor", sums[0], inverse, like=vector)
        slope = builder.change("aten.div_.Scalar", slope, count)
        offset = builder.call("aten.div.Scalar", sums[1], count, like=vector)
        scale = inverse
        if weight is not None:
            scale = builder.call("aten.mul.Tensor", weight, inverse, like=vector)
        found = builder.call("aten.sub.Tensor", x, spread(mean), like=x)
        found = builder.change("aten.mul_.Tensor", found, spread(slope))
        found = builder.change("aten.add_.Tensor", found, spread(offset))
        found = builder.call("aten.sub.Tensor", grad, found, like=x)
        builder.emit("aten.mul.Tensor", (found, spread(scale)), (outputs[0],))
    call.put_to_rest()
    return True


WRITTEN_OUT = {
    **dict.fromkeys(("bernoulli_", "uniform_", "normal_"), draw_whole),
    "embedding": embed_own_rows,
    "embedding_dense_backward": embed_own_rows_backward,
    "nll_loss_forward": mean_loss,
    "native_batch_norm": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
}
