"""Batch norms whose batch is split: by the statistics of all ranks, as SyncBatchNorm.

With ranks' own means m_r and variances v_r, of equal numbers of elements,

    m = mean of m_r,    v = mean of (v_r + (m_r - m)^2).

Of inputs of 16 bits, statistics and sums have 32 bits, and are rounded where the step keeps them.
"""

from __future__ import annotations

from math import prod

from penstock.graph.encoding import FULL
from penstock.graph.step_graph import TensorView
from penstock.partitioner._operator_call import OperatorCall
from penstock.partitioner._rank_builder import CLONE, COPY, RankBuilder


def batch_norm(call: OperatorCall) -> bool:
    """Normalise by the statistics of all ranks."""
    levels = _levels_of_batch(call)
    x_view, training = call.operator.args[0], call.operator.args[5]
    if not levels or not training:
        return False
    builder = call.builder
    x, weight, bias, mean, variance, _, momentum, epsilon = (
        call.operand_in(each) for each in call.operator.args
    )
    outputs = call.declare_outputs(added_up=True)
    vector = _statistics_of(x)
    whole, spread = _average_statistics(call, _convert(builder, x, vector.dtype), levels)
    scale, shift = (
        None if each is None else _convert(builder, each, vector.dtype) for each in (weight, bias)
    )
    args = (x, scale, shift, whole, spread, False, momentum, epsilon)
    builder.emit(call.operator.target, args, (outputs[0], None, None))
    shifted = builder.call("aten.add.Scalar", spread, epsilon, like=vector)
    if outputs[1] is not None:
        _keep(builder, whole, outputs[1])
    if outputs[2] is not None:
        _keep(builder, builder.call("aten.rsqrt.default", shifted, like=vector), outputs[2])
    count = prod(x_view.shape) // x_view.shape[1]
    scaled = builder.call("aten.mul.Scalar", spread, count / (count - 1), like=vector)
    for running, new in ((mean, whole), (variance, scaled)):
        if running is not None:
            _update_running(call, running, new, momentum)
    call.put_to_rest()
    return True


def _levels_of_batch(call: OperatorCall) -> list[int]:
    """Return the levels that split the batch or its places, be sums among the results or not."""
    names = call.axes.names
    return [i for i, axis in enumerate(call.split) if axis >= 0 and names[axis][0] != "c"]


def _average_statistics(
    call: OperatorCall, x: TensorView, levels: list[int]
) -> tuple[TensorView, TensorView]:
    """Return mean and variance of each channel over all ranks."""
    builder, vector = call.builder, _statistics_of(x)
    dims = (0, *range(2, len(x.shape)))
    spread, center = (builder.new_view(vector.shape, vector.dtype) for _ in range(2))
    builder.emit("aten.var_mean.correction", (x, dims), (spread, center), kwargs={"correction": 0})
    whole = _average(call, builder.dense(center), levels)
    apart = builder.call("aten.sub.Tensor", center, whole, like=vector)
    spread = builder.change("aten.addcmul_.default", spread, apart, apart)
    return whole, _average(call, spread, levels)


def _average(call: OperatorCall, view: TensorView, levels: list[int]) -> TensorView:
    """Return the mean of a vector over the ranks of some levels."""
    builder = call.builder
    num = prod(call.mesh.sizes[level] for level in levels)
    view = builder.call("aten.div.Scalar", view, num, like=view)
    return builder.add_up_whole(view, levels)


def _update_running(
    call: OperatorCall, running: TensorView, new: TensorView, momentum: object
) -> None:
    """Move running statistics towards those of the batch."""
    builder = call.builder
    wide = _convert(builder, running, new.dtype)
    moved = builder.call("aten.lerp.Scalar", wide, new, momentum, like=new)
    after = running._replace(value=call.made_after(running.value))
    builder.emit(COPY, (running, moved), (after,), mutates=((running.value, after.value),))


def batch_norm_backward(call: OperatorCall) -> bool:
    """Return gradients by the sums of all ranks.

    With N elements of a channel, x' = (x - m) / s, and sums over all of them,

        gradient = w/s (g - sum(g)/N - x' sum(g x')/N).
    """
    levels = _levels_of_batch(call)
    if not levels or not call.operator.args[7]:
        return False
    builder, x_view = call.builder, call.operator.args[1]
    args = [call.operand_in(each) for each in call.operator.args]
    grad, x, weight, _, _, mean, inverse, _, epsilon, wanted = args
    outputs = call.declare_outputs(added_up=True)
    vector = _statistics_of(x)
    mean, inverse = (_convert(builder, each, vector.dtype) for each in (mean, inverse))
    if weight is None:  # without one, kernels calculate no sums
        weight = builder.new_view(vector.shape, vector.dtype)
        builder.emit(FULL, (1,), (weight,))
    weight = _convert(builder, weight, vector.dtype)
    sums = [builder.new_view(vector.shape, vector.dtype) for _ in range(2)]
    local = (grad, x, weight, None, None, mean, inverse, True, epsilon, (False, True, True))
    builder.emit(call.operator.target, local, (None, *sums))
    sums = [builder.add_up_whole(each, levels) for each in sums]
    for each, output in zip(sums, outputs[1:], strict=True):
        if output is not None:
            _keep(builder, each, output)
    if outputs[0] is not None and wanted[0]:
        count = prod(x_view.shape) // x_view.shape[1]
        slope = builder.call("aten.mul.Tensor", sums[0], inverse, like=vector)
        slope = builder.change("aten.div_.Scalar", slope, count)
        offset = builder.call("aten.div.Scalar", sums[1], count, like=vector)
        scale = builder.call("aten.mul.Tensor", weight, inverse, like=vector)
        _write_gradient(builder, (grad, x, mean, slope, offset, scale), outputs[0])
    call.put_to_rest()
    return True


def _write_gradient(
    builder: RankBuilder, operands: tuple[TensorView, ...], result: TensorView
) -> None:
    """Write the gradient of x, scale (g - (x - mean) slope - offset)."""
    grad, x, mean, slope, offset, scale = operands
    wide = x._replace(dtype=mean.dtype)

    def spread(view: TensorView) -> TensorView:
        stride = (0, view.stride[0], *(0,) * (len(x.shape) - 2))
        return view._replace(shape=x.shape, stride=stride)

    found = builder.call("aten.sub.Tensor", x, spread(mean), like=wide)
    found = builder.change("aten.mul_.Tensor", found, spread(slope))
    found = builder.change("aten.add_.Tensor", found, spread(offset))
    found = builder.call("aten.sub.Tensor", grad, found, like=wide)
    if result.dtype == wide.dtype:
        builder.emit("aten.mul.Tensor", (found, spread(scale)), (result,))
        return
    found = builder.change("aten.mul_.Tensor", found, spread(scale))
    _keep(builder, found, result)


def _statistics_of(x: TensorView) -> TensorView:
    """Return the form of a number for each channel, of the dtype of statistics."""
    dtype = "float64" if x.dtype == "float64" else "float32"
    return TensorView(0, dtype, (x.shape[1],), (1,))


def _convert(builder: RankBuilder, view: TensorView, dtype: str) -> TensorView:
    """Return a view in a dtype: itself, or a copy."""
    if view.dtype == dtype:
        return view
    like = view._replace(dtype=dtype)
    return builder.call("aten._to_copy.default", view, like=like, dtype={"dtype": dtype})


def _keep(builder: RankBuilder, view: TensorView, result: TensorView) -> None:
    """Write what was calculated as a result of the operator."""
    if view.dtype == result.dtype:
        builder.emit(CLONE, (view,), (result,))
        return
    dtype = {"dtype": result.dtype}
    builder.emit("aten._to_copy.default", (view,), (result,), kwargs={"dtype": dtype})
