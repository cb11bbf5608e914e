"""Private names of torch's fake tensors, which have a form and no memory."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

__all__ = [
    "UNSAFE_VIEW",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "make_contiguous_strides_for",
    "make_fake",
    "make_parameter",
    "new_mode",
    "suggest_memory_format",
]

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""No view, as its operand is not used again, but in its operand's memory all the same."""

_Attributes = dict[torch.device, tuple[torch.device, dict[str, Any]]]
_attributes: WeakKeyDictionary[FakeTensorMode, _Attributes] = WeakKeyDictionary()


RunNested = Callable[[Callable[[], Any], Any, Any, Any], Any]
"""Called as `run(kernel, func, args, kwargs)`; returns the results that `kernel()` has."""


class _Mode(FakeTensorMode):
    """A mode that calls `run_nested` for the operators that fake kernels are made of."""

    def __init__(self, run_nested: RunNested) -> None:
        super().__init__()
        self._run_nested = run_nested
        self._is_in_kernel = False

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        run = super()._dispatch_impl
        if self._is_in_kernel:
            return self._run_nested(lambda: run(func, types, args, kwargs), func, args, kwargs)
        self._is_in_kernel = True
        try:
            return run(func, types, args, kwargs)
        finally:
            self._is_in_kernel = False


def new_mode(run_nested: RunNested) -> FakeTensorMode:
    """Return a mode that calls fake kernels without torch's cache of their results.

    Captures have one of their own, and making a key and an entry of torch's takes as long as most
    fake kernels. `run_nested` is called for the operators that a fake kernel runs: one of a sampled
    grid is made of hundreds, most of them again and again.
    """
    mode = _Mode(run_nested)
    mode.cache_enabled = False
    return mode


def make_fake(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """Return a tensor of the meta device, which has no past, as a fake tensor of another device.

    The first of a mode and device is made by torch. The others get its attributes, which are the
    same for all new ones: that takes a quarter of the time. The mode is not kept with them, as it
    would live for ever then.
    """
    known = _attributes.get(mode)
    if known is None:
        known = _attributes[mode] = {}
    if device not in known:
        first = FakeTensor(mode, meta, device)
        same = {name: value for name, value in vars(first).items() if value is not mode}
        known[device] = first.fake_device, same
        return first
    fake_device, attributes = known[device]
    made = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=fake_device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.fake_mode = mode
    vars(made).update(attributes)
    return made


def make_parameter(fake: FakeTensor, *, requires_grad: bool) -> FakeTensor:
    """Make a new fake tensor a parameter, as `nn.Parameter(fake)` would make another one."""
    fake.requires_grad_(requires_grad)
    fake._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
    return fake
