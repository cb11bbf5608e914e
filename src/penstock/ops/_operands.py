"""Operands of the operators: their dtypes, and the dtype that sums over them have."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.compat.autograd import has_tangent
from penstock.compat.dispatch import are_functorch_transforms_active, is_differentiated_by_func

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KINDS = {dtype: kind for kind, dtype in enumerate(DTYPES)}
"""By dtype the number that `with_element` of `codegen/reals.cpp` knows it by."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for that, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensor(name: str, value: object) -> None:
    """Refuse what is no tensor.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be a tensor")


def check_dtype(name: str, tensor: Tensor) -> None:
    """Refuse what is no tensor of floating-point numbers that the operators know.

    Raises:
        TypeError: It is something else, or of another dtype.
    """
    check_tensor(name, tensor)
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} has the dtype {tensor.dtype}, but must have one of "
            f"{', '.join(map(str, DTYPES))}: convert it with {name}.float()"
        )


def check_operand(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not of floating-point numbers that the operators know, or is dual.

    Raises:
        TypeError: The dtype is another.
        NotImplementedError: It has a tangent; without this error the result would have none. Or
            `torch.func.grad` follows it, whose own error names neither operator nor remedy.
    """
    check_dtype(name, tensor)
    if torch.compiler.is_compiling():
        return
    if are_functorch_transforms_active() and is_differentiated_by_func(tensor):
        raise NotImplementedError(
            f"{name} is differentiated by torch.func, which does not take the operators of "
            "penstock.ops: take gradients by torch.autograd.grad"
        )
    if has_tangent(tensor):
        raise NotImplementedError(
            f"{name} has a tangent, but the operators of penstock.ops have no forward-mode "
            "derivatives: take gradients by torch.autograd.grad"
        )


def check_together(**tensors: Tensor) -> None:
    """Refuse tensors on several devices.

    Raises:
        ValueError: They are not on one.
    """
    if len({each.device for each in tensors.values()}) > 1:
        found = ", ".join(f"{name} on {each.device}" for name, each in tensors.items())
        raise ValueError(f"{', '.join(tensors)} must be on one device, but are: {found}")


def read_integers(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Return the integers of a sequence, or those of a number for both dimensions.

    Raises:
        TypeError: One is no whole number.
    """
    given = value if isinstance(value, Sequence) else (value, value)
    try:
        # Symbols of a graph that is traced stay what they are.
        numbers = [
            each if isinstance(each, (int, torch.SymInt)) else operator.index(each)
            for each in given
        ]
    except TypeError:
        raise TypeError(f"{name} is {value!r}, but must be an int or a pair of them") from None
    return tuple(numbers)
