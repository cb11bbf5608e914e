"""Block-sparse attention on the CPU, in C++ (`tiles.cpp` to `key_pass.cpp`).

A pass in which queries stay computes the output, or dQ; one in which keys stay computes dK, dV and
the gradient of the bias over the transposed list, and dQ with them where every thread has KV heads
of its own: that saves the scores' second computation. Bits are the same in both.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path

import torch
from torch import Tensor

from penstock.attention._operands import (
    BlockOperands,
    empty_gradient,
    empty_results,
    sum_dtype,
    with_whole_rows,
)
from penstock.codegen import REALS, THREADS, VECTORS, load_optional_library
from penstock.compat.dynamo import mark_constant

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_FILES = ("tiles.cpp", "blocks.cpp", "query_pass.cpp", "key_pass.cpp")
_pack = struct.Struct("21P27q12q3qd").pack  # `struct Call` of `blocks.cpp`
# Products of a pair of blocks: 5 in the single sweep, and 7 in two passes.
_SWEEP_PRODUCTS, _TWO_PASS_PRODUCTS = 5, 7


@mark_constant
def is_available() -> bool:
    """Return whether the kernels can be built, or were."""
    return _library() is not None


def forward(given: BlockOperands) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp of its scores, as `_torch.forward` does."""
    out, lse = empty_results(given.q, given.v)
    _call(given, out=out, lse=lse)
    return out, lse


def backward(
    dout: Tensor, given: BlockOperands, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias, as `_torch.backward` does."""
    q, k, v, _, bias, _ = given
    grads = {"dq": empty_gradient(q), "dk": empty_gradient(k), "dv": empty_gradient(v)}
    if bias is not None:
        grads["dbias"] = torch.empty(bias.shape, dtype=sum_dtype(q), device="cpu")
    _call(given, dout=dout, out=out, lse=lse, delta=torch.empty_like(lse), **grads)
    return grads["dq"], grads["dk"], grads["dv"], grads.get("dbias")


def does_sweep(num_heads: int, num_threads: int) -> bool:
    """Return whether a thread per KV head of the batch takes less time than two passes.

    The threads wait for the one with the most heads.
    """
    most = -(-num_heads // num_threads)
    return most * _SWEEP_PRODUCTS * num_threads <= num_heads * _TWO_PASS_PRODUCTS


def _call(given: BlockOperands, **others: Tensor) -> None:
    """Compute the output, or with `dout` among the others the gradients, in place."""
    q, k, v, layout, bias, scale = given
    operands = {"q": q, "k": k, "v": v, "bias": bias, "dout": others.pop("dout", None)}
    read = {
        name: None if each is None else with_whole_rows(each) for name, each in operands.items()
    }
    named = {**read, **others}
    names = ("q", "k", "v", "dout", "out", "lse", "bias", "delta", "dq", "dk", "dv", "dbias")
    pointers = [_pointer(named.get(name)) for name in names]
    strided = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", "bias")
    strides = [stride for name in strided for stride in _strides(named.get(name))]
    num_threads = torch.get_num_threads()
    sweeps = does_sweep(k.shape[0] * k.shape[1], num_threads)
    arguments = _pack(
        *pointers,
        *(each.data_ptr() for each in layout.arrays),
        *strides,
        *(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]),
        *(layout.block, layout.num_heads, layout.num_query_blocks, layout.num_key_blocks),
        *(layout.num_blocks, _KINDS[q.dtype], sweeps, num_threads),
        scale,
    )
    library = _library()
    assert library is not None, "there is a path without the library"
    if q.numel() > 0 and not library.penstock_blocksparse(arguments):
        raise ValueError(
            "arrays list blocks beyond the operands: take those of a penstock.attention.Layout"
        )


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    if tensor is None:
        return 0, 0, 0
    batch, head, token = tensor.stride()[:3]
    return batch, head, token


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "attention",
        [THREADS, VECTORS, REALS, *(Path(__file__).with_name(name) for name in _FILES)],
        flags=("-O3", "-march=native"),
        functions={"penstock_blocksparse": (ctypes.c_int, [ctypes.c_char_p])},
        work="block-sparse attention is computed",
        otherwise="by torch, slower",
    )
