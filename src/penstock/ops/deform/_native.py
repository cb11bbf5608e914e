"""Deformable convolutions on the CPU, in C++ (`samples.cpp` to `backward.cpp`)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import REALS, THREADS, VECTORS, load_optional_library, to_struct
from penstock.compat.dynamo import mark_constant
from penstock.ops._operands import KINDS, sum_dtype
from penstock.ops.deform._shapes import DeformInputs, count_offset_groups

_FILES = ("samples.cpp", "forward.cpp", "backward.cpp")
_LEAST_TASKS, _BLOCK_CHANNELS = 8, 32


@mark_constant
def is_available() -> bool:
    """Return whether the kernels can be built, or were."""
    return _library() is not None


def forward(given: DeformInputs) -> Tensor:
    """Return the output as `_torch.forward` does."""
    out = given.new_output()
    _run(_DeformCall.of(given, out))
    return out


def backward(
    dout: Tensor, given: DeformInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients as `_torch.backward` does."""
    x, offset, weight, bias, mask, _ = given
    dtype = sum_dtype(x.dtype)
    # Few blocks of channels leave threads idle: then images are in parts, whose sums are added up.
    # The parts follow from the shapes alone, and so do the bits.
    parts = max(1, min(len(x), _LEAST_TASKS // -(-x.shape[1] // _BLOCK_CHANNELS)))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    doffset = torch.zeros(offset.shape, dtype=dtype, device="cpu")
    dmask = None if mask is None else torch.zeros(mask.shape, dtype=dtype, device="cpu")
    dweight = torch.zeros((parts, *weight.shape), dtype=dtype, device="cpu")
    dbias = None if bias is None else torch.zeros((parts, *bias.shape), dtype=dtype, device="cpu")
    grads = {"dx": dx, "doffset": doffset, "dmask": dmask, "dweight": dweight, "dbias": dbias}
    call = _DeformCall.of(given, dout.contiguous())
    _run(dataclasses.replace(call, **grads, num_parts=parts))
    return (
        dx,
        doffset.to(offset.dtype),
        _add_parts(dweight).to(weight.dtype),
        None if dbias is None or bias is None else _add_parts(dbias).to(bias.dtype),
        None if dmask is None or mask is None else dmask.to(mask.dtype),
    )


def _add_parts(parts: Tensor) -> Tensor:
    """Return the sum of parts in their order."""
    for part in parts[1:]:
        parts[0] += part
    return parts[0] if len(parts) == 1 else parts[0].clone()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _DeformCall:
    """`struct Call` of `samples.cpp`."""

    x: Tensor
    offset: Tensor
    mask: Tensor | None
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    dx: Tensor | None = None
    doffset: Tensor | None = None
    dmask: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel_height: int
    kernel_width: int
    out_height: int
    out_width: int
    stride_y: int
    stride_x: int
    padding_y: int
    padding_x: int
    dilation_y: int
    dilation_x: int
    groups: int
    offset_groups: int
    num_parts: int = 1
    kind: int
    num_threads: int

    @classmethod
    def of(cls, given: DeformInputs, out: Tensor) -> _DeformCall:
        """Return a call without gradients."""
        x, offset, weight, bias, mask, geometry = given
        dtype = sum_dtype(x.dtype)
        return cls(
            x=x.contiguous(),
            offset=offset.to(dtype).contiguous(),
            mask=None if mask is None else mask.to(dtype).contiguous(),
            weight=weight.to(dtype).contiguous(),
            bias=None if bias is None else bias.to(dtype).contiguous(),
            out=out,
            batch=x.shape[0],
            channels=x.shape[1],
            height=x.shape[2],
            width=x.shape[3],
            out_channels=len(weight),
            kernel_height=weight.shape[2],
            kernel_width=weight.shape[3],
            out_height=out.shape[2],
            out_width=out.shape[3],
            stride_y=geometry.stride[0],
            stride_x=geometry.stride[1],
            padding_y=geometry.padding[0],
            padding_x=geometry.padding[1],
            dilation_y=geometry.dilation[0],
            dilation_x=geometry.dilation[1],
            groups=x.shape[1] // weight.shape[1],
            offset_groups=count_offset_groups(offset, weight),
            kind=KINDS[x.dtype],
            num_threads=torch.get_num_threads(),
        )


def _run(call: _DeformCall) -> None:
    library = _library()
    assert library is not None, "there is a path without the library"
    if call.out.numel() > 0:
        library.penstock_deform(ctypes.byref(to_struct(call)))


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "deform",
        [THREADS, VECTORS, REALS, *(Path(__file__).with_name(name) for name in _FILES)],
        flags=("-O3", "-march=native"),
        functions={"penstock_deform": (None, [ctypes.c_void_p])},
        work="deformable convolutions are computed",
        otherwise="by torch, slower",
    )
