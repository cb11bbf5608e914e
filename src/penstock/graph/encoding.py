"""Arguments of operators as plain data, and back.

JSON has no word for a dtype, a device or an infinite float, and a step graph is JSON: such an
argument is a mapping with one key, as `{"dtype": "float32"}`. A number that changes from step to
step is `{"scalar": expression}`: an expression of Python's operators.
"""

from __future__ import annotations

import base64
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.compat.dispatch import OpOverload
from penstock.graph.step_graph import TensorView

CONSTANT = "penstock.constant"
"""Target that makes a tensor from bytes in the graph: `args = ({"bytes": ...},)`."""
SCALAR = "penstock.scalar"
"""Target that reads a number before its tensor changes, for later operators."""
EMPTY = "penstock.empty"
"""Target that makes a tensor without setting its bytes: `args = ()`."""
FULL = "penstock.full"
"""Target that makes a tensor with one number everywhere: `args = (number,)`."""
GET_RNG_STATE = "penstock.get_rng_state"
"""Target that returns a generator's state: `args = ()` of the CPU's, `("cuda",)` of a GPU's."""
SET_RNG_STATE = "penstock.set_rng_state"
"""Target that sets it: `args = (state,)` or `(state, "cuda")`."""
OWN_TARGETS = (CONSTANT, SCALAR, EMPTY, FULL, GET_RNG_STATE, SET_RNG_STATE)

Expression = float | int | bool | TensorView | tuple[Any, ...]
"""A number, a 0-dimensional view whose number is meant, or `(operator, operand, ...)`."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv")},
    **{name: getattr(operator, name) for name in ("mod", "pow", "neg", "abs")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or", "not")},
    **{"min": min, "max": max, "float": float},
}


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return `"float32"` for `torch.float32`."""
    return str(dtype)[6:]


@functools.cache
def dtype_from_name(name: str) -> torch.dtype:
    """Return `torch.float32` for `"float32"`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of this torch ({torch.__version__})")
    return dtype


def encode_constant(value: object) -> Mapping[str, Any] | None:
    """Return an argument that JSON has no word for as a mapping with one key; None for others."""
    if isinstance(value, torch.device):
        return {"device": value.type}
    is_named = isinstance(value, torch.dtype | torch.layout | torch.memory_format)
    return {type(value).__name__: str(value).removeprefix("torch.")} if is_named else None


def encode_bytes(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Return a small tensor's elements as data."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"bytes": base64.b64encode(raw).decode()}


def decode(
    value: Any, device: torch.device, tensor: Callable[[TensorView], Any], scalar: Callable
) -> Any:
    """Return an argument of an `Operator` as torch takes it, with tuples as lists.

    `device` takes the place of the graph's device, `tensor` returns the tensor of a view, and
    `scalar` the number of an expression.
    """
    if isinstance(value, TensorView):
        return tensor(value)
    if isinstance(value, tuple):
        return [decode(item, device, tensor, scalar) for item in value]
    if not isinstance(value, Mapping):
        return value
    ((key, content),) = value.items()
    if key == "dtype":
        return dtype_from_name(content)
    if key == "device":
        return device if content == device.type else torch.device(content)
    if key == "scalar":
        return scalar(content)
    if key == "bytes":
        return bytearray(base64.b64decode(content))
    if key in ("layout", "memory_format"):
        return getattr(torch, content)
    raise ValueError(f"an argument of a step graph has the unknown form {key!r}")


def decode_arguments(
    call: Any, device: torch.device, tensor: Callable[[TensorView], Any], scalar: Callable
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keyword arguments of a call of an operator, as `decode` does."""
    args = [decode(value, device, tensor, scalar) for value in call.args]
    items = call.kwargs.items()
    return args, {name: decode(value, device, tensor, scalar) for name, value in items}


def make(target: str, args: list[Any], view: TensorView, device: torch.device) -> torch.Tensor:
    """Run `EMPTY`, `FULL` or `CONSTANT`: make a tensor with the form of a view."""
    dtype = dtype_from_name(view.dtype)
    made = torch.empty_strided(view.shape, view.stride, dtype=dtype, device=device)
    if target == FULL:
        made.fill_(args[0])
    elif target == CONSTANT and made.numel():
        made.copy_(torch.frombuffer(args[0], dtype=dtype).view(made.shape))
    return made


def random_state(generator: str = "cpu") -> torch.Tensor:
    """Run `GET_RNG_STATE`: the state of the CPU's generator, or of the current GPU's (`"cuda"`)."""
    return torch.cuda.get_rng_state() if generator == "cuda" else torch.get_rng_state()


def set_random_state(state: torch.Tensor, generator: str = "cpu") -> None:
    """Run `SET_RNG_STATE`."""
    state = state.detach().cpu().clone()  # torch reads a storage from its first byte
    if generator == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def view_memory(
    memory: torch.UntypedStorage, view: TensorView, device: torch.device | str
) -> torch.Tensor:
    """Return the tensor of a view in a memory of its storage on a device."""
    tensor = torch.empty(0, dtype=dtype_from_name(view.dtype), device=device)
    return tensor.set_(memory, view.offset, view.shape, view.stride)  # pyright: ignore


def flat_results(result: Any) -> list[Any]:
    """Return an operator's results in the order of `Operator.outputs`."""
    if isinstance(result, list | tuple):
        return [item for each in result for item in flat_results(each)]
    return [result]


def resolve(target: str) -> OpOverload:
    """Return torch's operator of a name as `"aten.addmm.default"`.

    Raises:
        ValueError: This torch has none of this name.
    """
    namespace, name, overload = target.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError as error:
        raise ValueError(
            f"operator {target!r} of the step graph does not exist in torch {torch.__version__}: "
            "import the package that defines it, or capture the model again with this torch"
        ) from error


def evaluate(expression: Expression, read: Callable[[TensorView], float | int]) -> Any:
    """Calculate an expression with Python's own numbers.

    Example:
        >>> evaluate(("sub", 1.0, ("pow", 0.5, 2.0)), lambda view: 0.0)
        0.75

    Args:
        expression: The content of a mapping `{"scalar": ...}` among the arguments of an operator.
        read: Returns the number of a 0-dimensional view.
    """
    if isinstance(expression, TensorView):
        return read(expression)
    if not isinstance(expression, tuple):
        return expression
    name, *operands = expression
    numbers = [evaluate(operand, read) for operand in operands]
    return _OPERATORS[name](*numbers)
