"""Effects of operators on their arguments, by their schemas and where a schema does not say."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from penstock.compat.dispatch import DispatchKey, OpOverload

aten = torch.ops.aten

UNDECLARED_WRITES: dict[str, tuple[int, ...]] = {
    # Running statistics, which the schema does not mark as written.
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}
_TAGGED = ("aten", "penstock", "prims", "mkldnn", "quantized", "torchvision")
"""Namespaces whose operators are tagged if they draw random numbers; others often are not."""
COLLECTIVES = (
    "penstock.average_over_ranks_.default",
    "penstock.sum_over_ranks_.default",
    "penstock.max_over_ranks_.default",
    "penstock.all_gather_shards_.default",
    "penstock.reduce_scatter_mean_.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.wait_tensor.default",
)
"""Operators in which all ranks take part: none may leave them out, or run them twice."""

_TRAINING_ARGUMENT = 5  # of the same three

_SOFTMAXES = (
    *("_softmax", "_log_softmax"),
    *("_softmax_backward_data", "_log_softmax_backward_data"),
)


class Schema(NamedTuple):
    """Properties of an operator that a capture needs.

    Attributes:
        target: Its name, as `"aten.addmm.default"`.
        written: Positions of the arguments that it writes.
        written_names: Names of the keyword arguments that it writes.
        random: Whether it draws random numbers, or may do so without saying it.
        pointwise: Whether each element of the result depends on the same element of operands.
        composite: Whether it is made of other operators, which are captured instead.
        has_out: Whether a variant writes its result to a given place.
        returns_first: Whether it writes its first argument, a tensor, and returns just that.
        side_effect: Whether it runs although its results have no use.
        changes_view: Whether it changes the form of its first argument, and no byte.
    """

    target: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    random: bool
    pointwise: bool
    composite: bool
    has_out: bool
    returns_first: bool
    side_effect: bool
    changes_view: bool


@functools.cache
def schema_of(func: OpOverload) -> Schema:
    """Return the properties of an operator."""
    target = f"{func.namespace}.{func._opname}.{func._overloadname}"
    written, names = list(UNDECLARED_WRITES.get(target, ())), []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                written.append(position)
    packet = func._overloadpacket
    overloads = packet.overloads()
    return Schema(
        target=target,
        written=tuple(written),
        written_names=tuple(names),
        random=torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _TAGGED,
        pointwise=torch.Tag.pointwise in func.tags,
        composite=_is_composite(func),
        has_out=any(name.endswith(("out", "grad_input")) for name in overloads),
        returns_first=_returns_first(func, written),
        side_effect="_assert" in target or target in COLLECTIVES,
        changes_view=torch.Tag.inplace_view in func.tags,
    )


def _is_composite(func: OpOverload) -> bool:
    """Return whether it runs as other operators; some do so only where they have no kernel."""
    keys = DispatchKey
    has = func.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not (has(keys.CPU) or has(keys.CUDA))


def _returns_first(func: OpOverload, written: list[int]) -> bool:
    returned = func._schema.returns
    return (
        func._opname.endswith("_")
        and written == [0]
        and len(returned) == 1
        and returned[0].alias_info is not None
        and str(returned[0].type) == "Tensor"
    )


def writes_nothing(schema: Schema, args: tuple[Any, ...]) -> bool:
    """Return whether a batch norm uses its running statistics instead of updating them."""
    return schema.target in UNDECLARED_WRITES and not args[_TRAINING_ARGUMENT]


def is_random_call(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call draws random numbers: attention with a dropout of zero does not."""
    if not schema_of(func).random:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, 0.0)
            return given != 0.0
        if argument.name == "train" and position < len(args):
            return bool(args[position])
    return True


def is_softmax_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a softmax or its gradient may be written over an operand.

    The CPU kernels over the last dimension have read a row when they write it, element by element.
    """
    if func._opname not in _SOFTMAXES or args[0].device.type != "cpu":
        return False
    dim = args[2] if func._opname.endswith("_backward_data") else args[1]
    return dim % max(args[0].dim(), 1) == max(args[0].dim(), 1) - 1
