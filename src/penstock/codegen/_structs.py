"""Arguments of C++ functions as one struct, made from a dataclass.

A dataclass says what a function takes; its struct follows by one rule, and the C++ source has the
same fields in the same order:

    Python                                  C++
    int, bool                               int64_t
    float                                   double
    anything else (array, tensor, None)     a pointer to its first element
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CTYPES: dict[Any, Any] = {"int": ctypes.c_int64, "bool": ctypes.c_int64, "float": ctypes.c_double}


@functools.cache
def struct_type(arguments: type[DataclassInstance]) -> type[ctypes.Structure]:
    """Return the struct of a dataclass, for results that C++ writes into it.

    Example:
        >>> @dataclasses.dataclass
        ... class Answer:
        ...     height: int
        ...     seconds: float
        >>> ctypes.sizeof(struct_type(Answer))
        16

    Args:
        arguments: The dataclass. Its annotations decide: `int`, `bool` and `float` are numbers, all
            others pointers.
    """
    fields = [
        # An annotation may be a text, which is its own name.
        (field.name, _CTYPES.get(getattr(field.type, "__name__", field.type), ctypes.c_void_p))
        for field in dataclasses.fields(arguments)
    ]
    return type(arguments.__name__, (ctypes.Structure,), {"_fields_": fields})


def to_struct(arguments: DataclassInstance) -> ctypes.Structure:
    """Return a dataclass's values as its struct, to be passed with `ctypes.byref`.

    Example:
        >>> import numpy as np
        >>> @dataclasses.dataclass(frozen=True)
        ... class Request:
        ...     num_items: int
        ...     sizes: np.ndarray
        >>> to_struct(Request(2, np.array([3, 4]))).num_items
        2

    Args:
        arguments: Numbers, NumPy arrays and tensors on the CPU, with the element type that the C++
            source names; None for a null pointer.

    Returns:
        The struct. It keeps `arguments`, and so the arrays, alive.

    Raises:
        ValueError: An array or a tensor is not contiguous, or is conjugated or negated lazily.
    """
    kind = struct_type(type(arguments))
    struct = kind(*[_value(field[0], getattr(arguments, field[0])) for field in kind._fields_])
    struct.arguments = arguments
    return struct


def _value(name: str, value: Any) -> float | None:
    """Return a number as it is, and the address of an array's or a tensor's first element."""
    if value is None or isinstance(value, (int, float)):
        return value
    is_array = isinstance(value, np.ndarray)
    if not (value.flags.c_contiguous if is_array else value.is_contiguous()):
        raise ValueError(f"{name} must be contiguous, as C++ reads it")
    if not is_array and (value.is_conj() or value.is_neg()):
        raise ValueError(f"{name} must have its numbers in memory: resolve_conj(), resolve_neg()")
    return value.ctypes.data if is_array else value.data_ptr()
