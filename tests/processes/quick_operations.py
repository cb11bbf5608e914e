"""Operations of Triton's interpreter that look once at the types of their operands.

For each operation the interpreter finds the type of the result, converts and broadcasts operands,
and only then computes, which takes NumPy a tenth of the time. What is found depends on types alone:
here it is found by the interpreter's own function, at the first operation with operands of such
types, and is kept. The first result has to be that of the interpreter, bit by bit; types for which
it is not, and those that NumPy does not have, are left to the interpreter each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton.language import core
from triton.runtime import interpreter

Semantic = interpreter.TritonSemantic
Operate = Callable[..., Any]
Plan = Callable[[Any, Any], Any]
"""Returns the result for the data of two operands, or None where these are not as planned."""

NUMBERS = (bool, int, float)
NUMPY_TYPES = {
    *("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("fp16", "fp32", "fp64"),
}
"""Types whose numbers NumPy computes with; others are bits in the interpreter."""


def _divide_whole(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right  # towards zero


ARITHMETIC: dict[str, Operate] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "floordiv": _divide_whole,
    "mod": np.fmod,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor_": np.bitwise_xor,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
"""By method of `TritonSemantic`: operations on two operands of the result's type."""
COMPARISONS: dict[str, Operate] = {
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "less_than": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
OF_TENSORS = {
    "add": ("add", True),
    "sub": ("sub", True),
    "mul": ("mul", True),
    "floordiv": ("floordiv",),
    "mod": ("mod",),
    "and": ("and_",),
    "or": ("or_",),
    "xor": ("xor_",),
    "gt": ("greater_than",),
    "ge": ("greater_equal",),
    "lt": ("less_than",),
    "le": ("less_equal",),
    "eq": ("equal",),
    "ne": ("not_equal",),
}
"""By the name of an operator, the method that it calls, with its last arguments."""


def patch_operations(patch: pytest.MonkeyPatch) -> dict[tuple[object, str], Callable[..., Any]]:
    """Have the semantics of the interpreter take the operations of this module.

    Returns:
        By object and name, what kernels may call in place of a function of the language.
    """
    for name, operate in (ARITHMETIC | COMPARISONS).items():
        patch.setattr(Semantic, name, _plan_once(name, getattr(Semantic, name), operate))
    patch.setattr(Semantic, "cast", _cast_once(Semantic.cast))
    patch.setattr(Semantic, "where", _select_once(Semantic.where))
    patch.setattr(Semantic, "load", _load_once(Semantic.load))
    found: dict[tuple[object, str], Callable[..., Any]] = {}
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)
    for name, (method, *last) in OF_TENSORS.items():
        method = getattr(semantic, method)
        found[core.tensor, f"__{name}__"] = _operator(method, last)
        found[core.tensor, f"__r{name}__"] = _reflected(method, last)
    found[core.tensor, "__getitem__"] = _index_once(core.tensor.__getitem__, semantic)
    return found


def _operator(method: Callable[..., Any], last: list[bool]) -> Callable[[Any, Any], Any]:
    """Return an operator of tensors."""

    def operate(self: Any, other: Any) -> Any:
        return method(self, other.value if type(other) is core.constexpr else other, *last)

    return operate


def _reflected(method: Callable[..., Any], last: list[bool]) -> Callable[[Any, Any], Any]:
    """Return an operator of tensors that are on its right side."""

    def operate(self: Any, other: Any) -> Any:
        return method(other.value if type(other) is core.constexpr else other, self, *last)

    return operate


# -------------------------------------------------------------------------------- results


def _new_tensor(data: Any, element: Any, of: Any) -> Any:
    """Make a tensor as `core.tensor` does, of a type `of` that one was made of before."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    made = object.__new__(core.tensor)
    made.handle, made.type, made.dtype = handle, of, of.scalar
    made.shape, made.numel = of.__dict__["_sizes_of_tensors"]
    return made


def _describe(operand: Any) -> Any:
    """Return what a plan depends on: a tensor's type, or a number itself; else None."""
    if type(operand) is core.tensor:
        return operand.type.name
    # Two zeros, and no number, are not told apart by comparing them.
    return (type(operand), operand or repr(operand)) if type(operand) in NUMBERS else None


def _find_dtype(of: Any) -> Any:
    """Return NumPy's dtype of a Triton type, or None."""
    return interpreter._get_np_dtype(of.scalar) if of.scalar.name in NUMPY_TYPES else None


def _is_the_same(found: Any, wanted: Any) -> bool:
    """Return whether data is the same in dtype, shape and bits."""
    return (
        found.dtype is wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


# ----------------------------------------------------------------------- binary operations


def _plan_once(name: str, operate_slowly: Operate, operate: Operate) -> Operate:
    """Return an operation on two operands that makes a plan for each two types."""
    plans: dict[Any, Plan | None] = {}

    def operate_quickly(self: Any, left: Any, right: Any, *last: Any, **named: Any) -> Any:
        key = (
            left.type.name if type(left) is core.tensor else _describe(left),
            right.type.name if type(right) is core.tensor else _describe(right),
        )
        plan = plans.get(key)
        if plan is not None and (result := plan(left, right)) is not None:
            return result
        result = operate_slowly(self, left, right, *last, **named)
        if key not in plans and None not in key:
            plan = _make_plan(self, name, operate, left, right, result)
            if plan is not None:
                again = plan(left, right)
                if again is None or not _is_the_same(again.handle.data, result.handle.data):
                    plan = None
            plans[key] = plan
        return result

    return operate_quickly


def _make_plan(
    semantic: Any, name: str, operate: Operate, left: Any, right: Any, result: Any
) -> Plan | None:
    """Return a plan for operands like these, or None where there is none."""
    of, element = result.type, result.handle.dtype
    if of.scalar.is_ptr():
        return _add_to_pointers(left, right, of) if name == "add" else None
    if name in COMPARISONS:
        checked, _ = semantic.binary_op_type_checking_impl(left, right)
        wanted = checked.type.scalar
    else:
        wanted = of.scalar
    dtype = _find_dtype(wanted)
    if dtype is None or (name in ("floordiv", "mod") and not wanted.is_int()):
        return None
    readers = [_read_operand(semantic, each, wanted, dtype) for each in (left, right)]
    if None in readers:
        return None
    (left_dtype, left_number), (right_dtype, right_number) = readers  # pyright: ignore

    def plan(left: Any, right: Any) -> Any:
        data = left_number
        if data is None:
            data = left.handle.data
            if data.dtype is not dtype:
                if data.dtype is not left_dtype:
                    return None
                data = data.astype(dtype)
        other = right_number
        if other is None:
            other = right.handle.data
            if other.dtype is not dtype:
                if other.dtype is not right_dtype:
                    return None
                other = other.astype(dtype)
        return _new_tensor(operate(data, other), element, of)

    return plan


def _read_operand(semantic: Any, operand: Any, wanted: Any, dtype: Any) -> tuple[Any, Any] | None:
    """Return the dtype of a tensor's data and None, or what a number is in the wanted type."""
    if type(operand) is not core.tensor:
        number = semantic.scalar_constant(operand, wanted).handle.data
        return dtype, number
    found = _find_dtype(operand.type)
    if found is None or (dtype == np.bool_ and found is not dtype):
        return None
    return found, None


def _add_to_pointers(left: Any, right: Any, of: Any) -> Plan | None:
    """Return a plan for pointers and whole numbers beside them."""
    is_left = type(left) is core.tensor and left.type.scalar.is_ptr()
    offset = right if is_left else left
    if type(offset) is not core.tensor:
        return None
    found = _find_dtype(offset.type)
    if found is None or not offset.type.scalar.is_int():
        return None
    item_bytes = max(1, of.scalar.element_ty.primitive_bitwidth // 8)

    def plan(left: Any, right: Any) -> Any:
        pointers, offsets = (left, right) if is_left else (right, left)
        handle, offsets = pointers.handle, offsets.handle.data
        if offsets.dtype is not found:
            return None
        return _new_tensor(handle.data + item_bytes * offsets.astype(np.uint64), handle.dtype, of)

    return plan


# ------------------------------------------------------------------------ other operations


def _cast_once(cast: Operate) -> Operate:
    """Return a conversion that finds the type of its result once for each two types."""
    plans: dict[tuple[str, str], tuple[Any, Any, Any] | None] = {}

    def cast_quickly(self: Any, operand: Any, to: Any, rounding: str | None = None) -> Any:
        of, to = operand.type, to.scalar
        if of.scalar is to:
            return operand
        if rounding is not None:
            return cast(self, operand, to, rounding)
        key = (of.name, to.name)
        if (plan := plans.get(key)) is not None:
            data = operand.handle.data
            if data.dtype is plan[0]:
                return _new_tensor(data.astype(plan[1]), to, plan[2])
        result = cast(self, operand, to)
        if key not in plans:
            given, wanted = _find_dtype(of), _find_dtype(to)
            is_plain = given is not None and wanted is not None and wanted != np.bool_
            is_plain = is_plain and result.handle.dtype is to
            plans[key] = (given, wanted, result.type) if is_plain else None
        return result

    return cast_quickly


def _select_once(select: Operate) -> Operate:
    """Return `where` that finds its type once for each three types."""
    plans: dict[Any, Any] = {}

    def select_quickly(self: Any, condition: Any, first: Any, second: Any) -> Any:
        key = (_describe(condition), _describe(first), _describe(second))
        if (plan := plans.get(key)) is not None:
            of, element, dtype, numbers = plan
            data = [
                each.handle.data if number is None else number
                for each, number in zip((first, second), numbers, strict=True)
            ]
            lanes = condition.handle.data
            if lanes.dtype == np.bool_ and data[0].dtype is dtype and data[1].dtype is dtype:
                return _new_tensor(np.where(lanes, *data), element, of)
        result = select(self, condition, first, second)
        if key not in plans and None not in key:
            plans[key] = _plan_selection(self, condition, (first, second), result)
        return result

    return select_quickly


def _plan_selection(semantic: Any, condition: Any, operands: Any, result: Any) -> Any:
    """Return the type of a selection, and the operands that are numbers; else None."""
    of, element = result.type, result.handle.dtype
    dtype = _find_dtype(of)
    if dtype is None or condition.type.scalar.name != "int1":
        return None
    numbers = []
    for each in operands:
        if type(each) is core.tensor:
            if each.type.scalar.name != of.scalar.name:
                return None
            numbers.append(None)
        else:
            numbers.append(semantic.scalar_constant(each, of.scalar).handle.data)
    data = [
        each.handle.data if number is None else number
        for each, number in zip(operands, numbers, strict=True)
    ]
    if not _is_the_same(np.where(condition.handle.data, *data), result.handle.data):
        return None
    return of, element, dtype, numbers


def _index_once(index: Callable[..., Any], semantic: Any) -> Callable[[Any, Any], Any]:
    """Return the indexing of blocks by `None` and `:` that finds its type once."""
    kept: dict[tuple[str, tuple[bool, ...]], Any] = {}
    index = getattr(index, "__wrapped__", index)
    whole = slice(None)

    def index_quickly(self: Any, slices: Any) -> Any:
        if type(slices) is not tuple or not self.type.is_block():
            return index(self, slices, _semantic=semantic)
        if any(each is not None and each != whole for each in slices):
            return index(self, slices, _semantic=semantic)
        key = (self.type.name, tuple([each is None for each in slices]))
        if (plan := kept.get(key)) is not None:
            return _new_tensor(self.handle.data[slices], self.handle.dtype.scalar, plan)
        result = index(self, slices, _semantic=semantic)
        kept[key] = result.type
        return result

    return index_quickly


def _load_once(load: Operate) -> Operate:
    """Return `load` that broadcasts masks, and what is in their place, once for their types."""
    plans: dict[Any, tuple[Any, Any] | None] = {}

    def load_quickly(self: Any, pointers: Any, mask: Any, other: Any, *how: Any) -> Any:
        if mask is None or other is None:
            return load(self, pointers, mask, other, *how)
        masks, others = mask.handle, other.handle
        key = (pointers.type.name, mask.type.name, other.type.name, how)
        if key not in plans:
            plans[key] = _plan_load(pointers, mask, other, how)
        plan = plans[key]
        if plan is None or masks.data.dtype != np.bool_ or others.data.dtype is not plan[1]:
            return load(self, pointers, mask, other, *how)
        shape = pointers.handle.data.shape
        if masks.data.shape != shape:
            masks = interpreter.TensorHandle(np.broadcast_to(masks.data, shape), core.int1)
        dtype = interpreter._get_np_dtype(plan[0].scalar)
        if others.data.shape != shape or plan[1] is not dtype:
            block = np.empty(shape, dtype)
            block[...] = others.data
            others = interpreter.TensorHandle(block, plan[0].scalar)
        loaded = self.builder.create_masked_load(pointers.handle, masks, others, *_NO_HINTS)
        return _new_tensor(loaded.data, loaded.dtype, plan[0])

    return load_quickly


_NO_HINTS = (None, None, False)  # of caches, which the interpreter does not have


def _plan_load(pointers: Any, mask: Any, other: Any, how: tuple[Any, ...]) -> Any:
    """Return the type of what is loaded, and NumPy's dtype of what is in place of it; or None."""
    of = pointers.type
    if not of.is_block() or not of.scalar.is_ptr() or any(how):
        return None
    element, given = of.scalar.element_ty, _find_dtype(other.type)
    if element.is_block() or _find_dtype(element) in (None, np.bool_) or given is None:
        return None
    shape = of.shape.values
    if any(each.is_block() and each.shape.values != shape for each in (mask.type, other.type)):
        return None
    if mask.type.scalar.name != "int1" or given == np.bool_:
        return None
    return of.with_element_ty(element), given
