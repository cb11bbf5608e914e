"""Triton's interpreter without work that no result depends on, which is most of its time.

A kernel of small blocks spends next to nothing in NumPy: each of its operations makes tensors and
types anew, asks for the same sizes again, and is checked for overflow although nothing is done
about it. The functions here do as the interpreter's own do; what is the same each time, they keep.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from triton import language
from triton.language import core
from triton.runtime import interpreter

from quick_operations import patch_operations

_SIZES = "_sizes_of_tensors"  # an attribute of types: the shape of their tensors, its product
_BY_ELEMENT = "_types_by_element"  # of types of blocks: those of the same shape


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Have the interpreter take the functions of this module.

    Bounds of loops that are loaded work as well: NumPy 2.4 makes no int of an array of one number,
    which is what such a bound is in the interpreter. So do masks of comparisons of scalars, which
    the interpreter broadcasts as numbers of the type that was compared: Triton 3.9 takes no such
    masks.
    """
    builder = interpreter.interpreter_builder
    # Sums, differences and products are compared with those of 64 bits, for an assertion that only
    # `debug` makes.
    assert not builder.options.debug
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", options)
        patch.setattr(interpreter._LangPatchScope, "set_attr", _set_with_item(patch))
        patch.setattr(interpreter, "_patch_lang", _patch_once(interpreter._patch_lang))
        patch.setattr(interpreter, "_patch_builtin", _patch_known())
        patch.setattr(inspect, "getsourcelines", _find_lines(inspect.getsourcelines))
        patch.setattr(interpreter, "_get_np_dtype", _keep_dtypes(interpreter._get_np_dtype))
        patch.setattr(interpreter.TensorHandle, "__init__", _init_handle)
        patch.setattr(type(builder), "create_splat", _keep_booleans(type(builder).create_splat))
        patch.setattr(core.tensor, "__init__", _init_tensor)
        patch.setattr(core.dtype, "__eq__", _compare_itself(core.dtype.__eq__))
        patch.setattr(core.block_type, "__init__", _keep_shapes(core.block_type.__init__))
        patch.setattr(
            core.block_type, "with_element_ty", _keep_types(core.block_type.with_element_ty)
        )
        patch.setattr(core, "_unwrap_if_constexpr", _pass_tensors(core._unwrap_if_constexpr))
        semantic = interpreter.TritonSemantic
        patch.setattr(
            semantic, "broadcast_impl_value", _pass_equal_shapes(semantic.broadcast_impl_value)
        )
        check = "binary_op_type_checking_impl"
        patch.setattr(semantic, check, _keep_checks(getattr(semantic, check)))
        patch.setattr(interpreter, "_patch_attr", _patch_attribute(patch_operations(patch)))
        yield


def _set_with_item(patch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `__index__` be what NumPy 2.4 allows."""
    set_attr = interpreter._LangPatchScope.set_attr

    def set_with_item(scope: Any, target: object, name: str, value: Any) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        set_attr(scope, target, name, value)

    return set_with_item


def _patch_once(patch_language: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """Patch `triton.language` at a launch, and not again where its kernel calls a function."""
    named: dict[FunctionType, list[Any]] = {}  # by function: modules of the language that it names

    def patch_once(function: FunctionType) -> Any:
        if function not in named:
            names = list(function.__globals__.values())
            named[function] = [each for each in (language, core) if any(each is it for it in names)]
        is_patched = not any(core.is_builtin(module.load) for module in named[function])
        return None if is_patched else patch_language(function)

    return patch_once


def _patch_known() -> Callable[[Any, Any, Any], None]:
    """Patch the functions of the language in a module or class, which are looked for once."""
    known: dict[Any, list[tuple[str, Any]]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in known:
            members = inspect.getmembers(package)
            known[package] = [each for each in members if core.is_builtin(each[1])]
        for name, member in known[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    return patch


def _find_lines(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Find the lines of a function by the places of its code, not by tokens of its whole file."""

    def find_lines(of: Any) -> tuple[list[str], int]:
        lines = linecache.getlines(of.__code__.co_filename) if type(of) is FunctionType else []
        if not lines:
            return read(of)
        first = of.__code__.co_firstlineno
        last = max(end for _, end, *_ in of.__code__.co_positions() if end is not None)
        while last < len(lines) and lines[last].lstrip().startswith((")", "]", "}")):
            last += 1  # a bracket around the last expression, of which no code has the place
        return lines[first - 1 : last], first

    return find_lines


def _patch_attribute(quick: dict[tuple[object, str], Callable[..., Any]]) -> Callable[..., None]:
    """Have a function of the language called with the interpreter's semantics, or a quick one."""

    def patch_attribute(target: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(target, name, quick.get((target, name), call))

    return patch_attribute


def _keep_dtypes(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Find NumPy's dtype of a type once for each scalar."""
    found: dict[str, Any] = {}

    def find_once(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return find_once


def _keep_booleans(splat: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast scalars that are true or false as such."""

    def splat_or_fill(self: Any, block: Any, scalar: Any) -> Any:
        if scalar.data.dtype != np.bool_:
            return splat(self, block, scalar)
        data = np.full(block.shape, scalar.data.item())
        return interpreter.TensorHandle(data, core.int1)

    return splat_or_fill


def _init_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """Set the fields, and check that the type can hold the data, as `TensorHandle` does."""
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr
    is_pointer = isinstance(dtype, core.pointer_type)
    if not is_pointer and data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
        self.__post_init__()  # which says so


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Set the attributes; tensors of one type have one shape."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = type.__dict__.get(_SIZES)
    if sizes is None:
        sizes = type.__dict__[_SIZES] = _list_sizes(type.shape if type.is_block() else ())
    self.shape, self.numel = sizes


def _list_sizes(shape: Any) -> tuple[Any, Any]:
    """Return the shape of tensors of a type, and its product."""
    return core.tuple([core.constexpr(each) for each in shape]), core.constexpr(math.prod(shape))


def _compare_itself(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Look at names only where types are not one object."""
    return lambda self, other: self is other or compare(self, other)


def _pass_tensors(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Look only into what is no tensor."""
    return lambda value: value if type(value) is core.tensor else unwrap(value)


def _keep_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Check a shape, and write the name of its type, once for each type of elements."""
    kept: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
        self.element_ty = element_ty
        if (fields := kept.get((element_ty.name, sizes))) is None:
            make(self, element_ty, shape)
            fields = {name: getattr(self, name) for name in ("shape", "numel", "name")}
            fields[_SIZES] = _list_sizes(self.shape)
            kept[element_ty.name, sizes] = fields
        self.__dict__.update(fields)

    return make_once


def _pass_equal_shapes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast operands, unless both have one shape."""

    def broadcast_unequal(self: Any, first: Any, second: Any) -> Any:
        types = first.type, second.type
        shapes = [each.shape.values if each.is_block() else None for each in types]
        return (first, second) if shapes[0] == shapes[1] else broadcast(self, first, second)

    return broadcast_unequal


def _keep_checks(check: Callable[..., Any]) -> Callable[..., Any]:
    """Find the types of an operation once for those of its operands.

    The block that is made of a number is kept, too: what is computed with it leaves it as it is.
    """
    types: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # None: the operand is as it was
    numbers: dict[tuple[Any, ...], Any] = {}

    def check_once(self: Any, lhs: Any, rhs: Any, *flags: bool, **others: bool) -> Any:
        if type(lhs) is not core.tensor or others:
            return check(self, lhs, rhs, *flags, **others)
        if type(rhs) is core.tensor:
            key = (lhs.type.name, rhs.type.name, flags)
            if (wanted := types.get(key)) is None:
                left, right = check(self, lhs, rhs, *flags)
                types[key] = (
                    None if left is lhs else left.type,
                    None if right is rhs else right.type,
                )
                return left, right
            lhs = lhs if wanted[0] is None else _convert(self, lhs, wanted[0])
            return lhs, rhs if wanted[1] is None else _convert(self, rhs, wanted[1])
        key = (lhs.type.name, type(rhs), rhs, flags)
        if (kept := numbers.get(key)) is None:
            found, kept = check(self, lhs, rhs, *flags)
            if found is not lhs or rhs != rhs:
                return found, kept
            kept.handle.data.flags.writeable = False
            numbers[key] = kept
        return lhs, kept

    return check_once


def _convert(semantic: Any, operand: Any, wanted: Any) -> Any:
    """Return an operand with the elements, then with the shape of a type."""
    if operand.dtype is not wanted.scalar:
        operand = semantic.cast(operand, wanted.scalar)
        if operand.type.name == wanted.name:
            return operand
    data, shape = operand.handle.data, wanted.shape.values
    if not operand.type.is_block():
        block = np.empty(shape, interpreter._get_np_dtype(operand.handle.dtype))
        block.fill(data.item())
    else:
        block = np.broadcast_to(data, shape)
    return semantic.tensor(interpreter.TensorHandle(block, operand.handle.dtype), wanted)


def _keep_types(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Make the type of a block's shape once for each type of its elements."""

    def make_once(self: Any, element: Any) -> Any:
        types = self.__dict__.setdefault(_BY_ELEMENT, {})
        if (kept := types.get(id(element))) is None:  # which it keeps alive
            kept = types[id(element)] = make(self, element)
        return kept

    return make_once
