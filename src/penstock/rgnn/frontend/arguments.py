"""Arguments of a call: the properties that decide how it runs, and checks against the graph."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from penstock.rgnn.ir import Program
from penstock.rgnn.spaces import COUNT_OF, Space

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Scalar = bool | int | float | str | None
_SCALARS = (int, float, str, type(None))  # a bool is an int


class TensorKind(NamedTuple):
    """The properties of a tensor that decide how a call runs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: torch.layout


class Constant(NamedTuple):
    """An argument that is no tensor. 1, 1.0 and True compare equal, 0.0 and -0.0 as well."""

    type: type
    value: Scalar
    sign: float


Kind = TensorKind | Constant


def read_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function in the language.

    Raises:
        TypeError: It is no plain function, takes no graph, or any number of arguments.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise TypeError(
            f"function: expected a plain Python function, got {type(function).__name__}; of a "
            "module, compile a function of the graph that is given the module's parameters "
            "(the layers RGCNConv, RGATConv and HGTConv are compiled)"
        )
    signature = inspect.signature(function)
    several = [
        p for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if several:
        raise TypeError(
            f"{function.__name__} takes {several[0]}; give each argument of a compiled function a "
            f"name of its own"
        )
    if not signature.parameters:
        raise TypeError(f"{function.__name__} takes no argument; the first one is the graph")
    return signature


def bind_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return a value for each parameter after the graph, in their order."""
    if not kwargs and len(args) == len(signature.parameters) - 1:
        return args
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())[1:]


def describe(arguments: Iterable[Any]) -> tuple[Kind, ...]:
    """Describe arguments by what decides how a call runs; `check_constants` checks them."""
    return tuple(
        TensorKind(value.shape, value.dtype, value.device, value.requires_grad, value.layout)
        if isinstance(value, torch.Tensor)
        else _describe_constant(value)
        for value in arguments
    )


def _describe_constant(value: Any) -> Constant:
    sign = math.copysign(1, value) if isinstance(value, float) else 1
    return Constant(type(value), value if isinstance(value, _SCALARS) else None, sign)


def check_constants(kinds: Mapping[str, Kind]) -> None:
    """Raise unless what is no tensor is a plain constant."""
    for name, kind in kinds.items():
        if isinstance(kind, Constant) and not issubclass(kind.type, _SCALARS):
            raise TypeError(
                f"{name} must be a tensor, a number, a string or None; got {kind.type.__name__}"
            )


def check_tensors(
    kinds: Mapping[str, Kind], device: torch.device, *, is_autocast: bool
) -> torch.dtype | None:
    """Raise unless the tensors are floating-point, of one dtype and on the graph's device.

    Returns:
        The dtype to convert them to: under autocast they may differ, and the widest is taken.
    """
    tensors = {name: kind for name, kind in kinds.items() if isinstance(kind, TensorKind)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be floating-point; it has dtype {tensor.dtype}")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name} must be a dense tensor; it has the layout {tensor.layout}. Convert with "
                ".to_dense()"
            )
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device} and the graph on {device}; "
                f"use graph.to({str(tensor.device)!r}) once and keep the result"
            )
    dtypes = {tensor.dtype: name for name, tensor in reversed(tensors.items())}
    if len(dtypes) < 2:
        return None
    if is_autocast:
        widest, *others = dtypes
        for dtype in others:
            widest = torch.promote_types(widest, dtype)
        return widest
    (other, second), (dtype, first) = list(dtypes.items())[-2:]
    raise ValueError(
        f"{second} has dtype {other} and {first} {dtype}; convert one of them with .to()"
    )


def check_rows(program: Program, kinds: Mapping[str, Kind], rows: Callable[[Space], int]) -> None:
    """Raise unless each tensor of a traced program has as many rows as the graph."""
    for name, position in program.inputs().items():
        space, kind = program.nodes[position].space, kinds[name]
        assert isinstance(kind, TensorKind)
        if space is not Space.ONE and kind.shape[0] != rows(space):
            shape = tuple(int(length) for length in kind.shape)
            remedy = f"; give Graph {COUNT_OF[space]}= if some do not occur"
            remedy = "" if space is Space.EDGE else remedy
            raise ValueError(
                f"{name} is used with one row for each {space.value}, of which the graph has "
                f"{int(rows(space)):,}; it has shape {shape}{remedy}"
            )
