"""Operators on pieces that need more than their pieces: other arguments, or other operators.

Where ranks make partial sums, the bias of a product is added by one of them alone; sizes among
arguments are those of the piece; a table of embeddings that is split by rows gives zeros for the
rows of others; means and norms over a split batch are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.graph.step_graph import TensorView
from penstock.partitioner._operator_call import OperatorCall


def adapt_arguments(
    call: OperatorCall,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: tuple[TensorView | None, ...],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which an operator runs on pieces."""
    kwargs = dict(kwargs)
    adapt = _ADAPT.get(call.name)
    if adapt is not None:
        args = adapt(args, outputs)
    if call.rule is not None and call.rule.first_only and not _counts_first(call):
        if call.name == "convolution":
            args = (*args[:2], None, *args[3:])
        else:
            kwargs["beta"] = 0
    halos = [use.halo for use in (*call.axes.inputs, *call.axes.outputs) if use.halo]
    if any(axis >= 0 and halo[axis] for halo in halos for axis in call.split):
        raise call.refuse("rows of an image that reach into other ranks' are not exchanged yet")
    if call.operator.random and any(axis >= 0 for axis in call.split):
        raise call.refuse("it draws random numbers")
    return args, kwargs


def _counts_first(call: OperatorCall) -> bool:
    """Return whether the rank is the one that counts operands which the others leave out."""
    sums = call.axes.outputs[0].sums
    coordinates = call.builder.coordinates
    return not any(axis in sums and at for axis, at in zip(call.split, coordinates, strict=True))


def _with_shape(position: int) -> Callable[..., tuple[Any, ...]]:
    def adapt(args: tuple[Any, ...], outputs: tuple[TensorView | None, ...]) -> tuple[Any, ...]:
        assert outputs[0] is not None
        return (*args[:position], outputs[0].shape, *args[position + 1 :])

    return adapt


def _with_rows(args: tuple[Any, ...], outputs: tuple[TensorView | None, ...]) -> tuple[Any, ...]:
    assert outputs[0] is not None
    return (*args[:2], outputs[0].shape[0], *args[3:])


def _with_bias_sizes(
    args: tuple[Any, ...], outputs: tuple[TensorView | None, ...]
) -> tuple[Any, ...]:
    weight = args[2]
    return (*args[:3], (weight.shape[0],) if args[3] else args[3], *args[4:])


def _with_samples(place: int) -> Callable[..., tuple[Any, ...]]:
    def adapt(args: tuple[Any, ...], outputs: tuple[TensorView | None, ...]) -> tuple[Any, ...]:
        return (*args[:place], args[0].shape[0], *args[place + 1 :])

    return adapt


_ADAPT: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("slice_backward", "select_backward"), _with_shape(1)),
    **dict.fromkeys(("full", "zeros", "ones", "empty"), _with_shape(0)),
    "embedding_dense_backward": _with_rows,
    "convolution_backward": _with_bias_sizes,
    **{"native_group_norm": _with_samples(3), "native_group_norm_backward": _with_samples(5)},
}
