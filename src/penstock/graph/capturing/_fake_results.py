"""Results of operators on fake tensors, with a cache of the forms that results have.

A step runs the same operators on operands of the same form in each of its layers, and a capture
runs it again to compare. A fake kernel takes a tenth of a millisecond; making a tensor of a cached
form takes a tenth of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.compat.dispatch import OpOverload, no_dispatch
from penstock.compat.fake_tensors import (
    UNSAFE_VIEW,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    make_fake,
)
from penstock.graph.capturing._meta_corrections import correct_results
from penstock.graph.capturing._program_lines import error_here
from penstock.graph.capturing.schemas import schema_of
from penstock.graph.costs.counts import OperatorCounts

SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)
_MAX_CACHED = 2**14
_NOT_TOLD = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
    torch.Tag.inplace_view,
}
_PLAIN = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


_UNTRACED = {FakeTensor, *_PLAIN}


class _TensorForm(NamedTuple):
    """Form of a tensor: all of it but its numbers; strides and offset in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _ResultForms(NamedTuple):
    """Forms of an operator's results.

    Attributes:
        container: `tuple` or `list`; None where the result is a tensor.
        forms: Of its tensors; None for a result that was not asked for.
        is_view: Whether it lies in the memory of the first operand.
        is_first: Whether it is the first operand, which was written.
    """

    container: type | None
    forms: tuple[_TensorForm | None, ...]
    is_view: bool = False
    is_first: bool = False


class _FormlessError(Exception):
    """A result depends on more of an argument than on its form."""


class KnownCall:
    """A call of an operator on operands of some forms.

    Attributes:
        counts: The counts of its costs, which the forms tell as well; None until they are counted.
    """

    __slots__ = ("counts", "forms")

    def __init__(self, forms: _ResultForms) -> None:
        self.forms = forms
        self.counts: OperatorCounts | None = None


_cache: dict[Any, KnownCall] = {}
_nested_cache: dict[Any, _ResultForms] = {}  # of fake kernels, whose results are not corrected


def run_fake(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, KnownCall | None]:
    """Return the results of a real kernel, as fake tensors, and what is known of such calls.

    Raises:
        CaptureError: The result's form depends on the data, or there is no fake kernel.
    """
    args = tuple([_untrace(value) for value in args])
    kwargs = {name: _untrace(value) for name, value in kwargs.items()}
    operands: list[FakeTensor] = []
    key = _cache_key(func, args, kwargs, operands) if _is_told_by_forms(func) else None
    known = None if key is None else _cache.get(key)  # another thread may clear it
    if known is not None:
        return _make_results(known.forms, operands[0]), known
    result = _run_kernel(func, args, kwargs)
    if key is not None and (forms := _forms_of(func, result, operands)) is not None:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        known = _cache[key] = KnownCall(forms)
    return result, known


def run_nested(
    kernel: Callable[[], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the results of an operator that a fake kernel is made of."""
    operands: list[FakeTensor] = []
    is_told = isinstance(func, OpOverload) and _is_told_by_forms(func)
    key = _cache_key(func, args, kwargs, operands) if is_told else None
    known = None if key is None else _nested_cache.get(key)
    if known is not None:
        return _make_results(known, operands[0])
    result = kernel()
    if key is not None and (forms := _forms_of(func, result, operands)) is not None:
        if len(_nested_cache) >= _MAX_CACHED:
            _nested_cache.clear()
        _nested_cache[key] = forms
    return result


def decompose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operators that an operator is made of.

    Raises:
        CaptureError: Which these are depends on the data.
    """
    try:
        return func.decompose(*args, **kwargs)
    except RuntimeError as error:
        if "data is not allocated yet" not in str(error):
            raise
        raise error_here(
            f"the course of {func} depends on the data; a captured step has one course of events: "
            "pass numbers instead of tensors, or do this outside of the step"
        ) from error


def _run_kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return correct_results(func, args, kwargs, func(*args, **kwargs))
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise error_here(
            f"the shape or value of the result of {error.func} depends on the data; a captured "
            f"step has static shapes: {_remedy(func)}"
        ) from error
    except UnsupportedOperatorException as error:
        raise error_here(
            f"operator {error.func} has no fake kernel, so that its result's shape is unknown; "
            "register one with torch.library.register_fake"
        ) from error


def _remedy(func: OpOverload) -> str:
    if "ctc_loss" in func._opname:
        return "CTC sizes its tables by the lengths; train such a model under penstock.offload"
    return "pad to a fixed size, or mask with torch.where"


def _untrace(value: Any) -> Any:
    """Replace traced numbers by numbers; shapes do not depend on them."""
    if type(value) in _UNTRACED:
        return value
    if isinstance(value, SYMBOLS):
        return value.node.hint
    if type(value) in (list, tuple):
        return type(value)(map(_untrace, value))
    if type(value) is torch.Tensor:
        wrapped = getattr(value, "_wrapped_number", None)
        return value if wrapped is None else wrapped.node.hint
    return value


@functools.cache
def _is_told_by_forms(func: OpOverload) -> bool:
    """Return whether the forms of operands decide on those of results."""
    if func.namespace != "aten" or _NOT_TOLD & set(func.tags):
        return False
    if func._schema.is_mutable:
        return schema_of(func).returns_first or not func._schema.returns
    if func.is_view:  # a view by strides need not lie in its storage
        returned = func._schema.returns
        is_tensor = len(returned) == 1 and str(returned[0].type) == "Tensor"
        return is_tensor and not func._opname.startswith(("as_strided", "lift"))
    return not func._opname.startswith("lift")


def _cache_key(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[FakeTensor],
) -> Any:
    """Collect the operands; return all that results' forms depend on, or None if that is more."""
    try:
        forms = tuple([_argument_key(value, operands) for value in args])
        named = tuple([(name, _argument_key(value, operands)) for name, value in kwargs.items()])
    except _FormlessError:
        return None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (func, forms, named, torch.get_default_dtype(), modes) if operands else None


def _argument_key(value: Any, operands: list[FakeTensor]) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None:  # fake kernels calculate with it
            raise _FormlessError
        operands.append(value)
        return _form(value)
    if isinstance(value, (list, tuple)):
        return tuple([_argument_key(each, operands) for each in value])
    if type(value) in _PLAIN:
        return type(value), value  # 1, 1.0 and True are equal and give other dtypes
    raise _FormlessError


def _form(tensor: FakeTensor) -> _TensorForm:
    if tensor.layout is not torch.strided or tensor.dtype.is_complex or tensor.is_neg():
        raise _FormlessError
    return _TensorForm(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
    )


def _forms_of(func: OpOverload, result: Any, operands: list[FakeTensor]) -> _ResultForms | None:
    """Return the forms of a result; None if it is neither new nor of the first operand."""
    if func._schema.is_mutable:
        if result is None:
            return _ResultForms(None, (None,))
        return _ResultForms(None, (), is_first=True) if result is operands[0] else None
    container = type(result) if type(result) in (tuple, list) else None
    results = [result] if container is None else list(result)
    if not all(each is None or isinstance(each, FakeTensor) for each in results):
        return None
    tensors = [each for each in results if each is not None]
    if any(each.constant is not None for each in tensors):
        return None
    try:
        forms = tuple(None if each is None else _form(each) for each in results)
    except _FormlessError:
        return None
    storages = [each.untyped_storage() for each in tensors]
    identities = [storage._cdata for storage in storages]
    taken = {each.untyped_storage()._cdata for each in operands}
    if func.is_view or func is UNSAFE_VIEW:
        first = operands[0]
        is_its_view = identities == [first.untyped_storage()._cdata] and tensors[0] is not first
        return _ResultForms(container, forms, is_view=True) if is_its_view else None
    if len(set(identities)) < len(identities) or taken & set(identities):
        return None
    for form, storage in zip((each for each in forms if each), storages, strict=True):
        if form.offset or storage.nbytes() != _dense_bytes(form):
            return None
    return _ResultForms(container, forms)


def _dense_bytes(form: _TensorForm) -> int:
    """Bytes from the first element to the last."""
    if 0 in form.shape:
        return 0
    reach = sum((size - 1) * step for size, step in zip(form.shape, form.strides, strict=True))
    return (1 + reach) * form.dtype.itemsize


def _make_results(cached: _ResultForms, first: FakeTensor) -> Any:
    if cached.is_first:
        return first
    with no_dispatch():
        if cached.is_view:
            (form,) = cached.forms
            assert form is not None
            tensor = torch.empty(0, dtype=form.dtype, device="meta")
            tensor.set_(first.untyped_storage(), form.offset, form.shape, form.strides)  # type: ignore[call-overload]
            return make_fake(first.fake_mode, tensor, form.device)
        made = [
            form
            and make_fake(
                first.fake_mode,
                torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta"),
                form.device,
            )
            for form in cached.forms
        ]
    return made[0] if cached.container is None else cached.container(made)
