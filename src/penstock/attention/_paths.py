"""Paths: the implementations that a call can take, and the choice between them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.attention import _native, _torch
from penstock.attention._layout import Layout
from penstock.compat.dynamo import mark_constant
from penstock.compat.packages import is_installed


class Path(NamedTuple):
    """The implementation of a call.

    Attributes:
        name: "SDPA", "C++", "Triton" or "torch".
        reason: Why it is taken.
    """

    name: str
    reason: str


# On the CPU, SDPA's causal path takes 0.55 to 0.85 of the time of ours in bfloat16, which CPUs
# multiply themselves, and 0.8 in float64. In float32 and float16 it takes 1.2 to 1.6 times as long
# where there is AVX-512, and 0.76 to 0.91 of the time with AVX2, whose registers hold small tiles.
_FASTER_BY_SDPA = (torch.bfloat16, torch.float64)


def choose_path(q: Tensor, layout: Layout, bias: Tensor | None, scale: float | None = None) -> Path:
    """Return the path that `blocksparse` takes for these operands."""
    name = name_kernels(q)
    if bias is None and layout.pattern == "dense":
        return Path("SDPA", "every query sees every key, where SDPA is as fast")
    # SDPA multiplies its mask of -inf by the scale on the CPU: by one of 0 that is NaN.
    is_rising = scale is None or scale > 0
    if bias is None and layout.pattern == "causal" and is_rising:
        if name == "Triton":
            return Path("SDPA", "it is causal, which SDPA has kernels for on a GPU")
        if name == "torch":
            return Path("SDPA", f"it is causal, and there is no kernel of ours for {q.device}")
        if q.dtype in _FASTER_BY_SDPA:
            return Path("SDPA", f"it is causal, where SDPA is faster in {q.dtype}")
        if not _has_wide_registers():
            return Path("SDPA", "it is causal, where SDPA is faster without AVX-512")
    return Path(name, _explain(name, q))


def _explain(name: str, q: Tensor) -> str:
    """Return the reason for kernels."""
    if name == "torch" and q.device.type == "cpu":
        return "no compiler could be used"
    if name == "torch" and q.device.type == "cuda":
        is_double = q.dtype == torch.float64
        return "its GPU has no kernel of float64" if is_double else "Triton is not installed"
    reasons = {"C++": "blocks on the CPU", "Triton": "blocks on a GPU"}
    return reasons.get(name, "its device has no kernel")


@mark_constant
def _has_wide_registers() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@mark_constant
def _has_triton() -> bool:
    return is_installed("triton")


def name_kernels(q: Tensor) -> str:
    """Return "C++", "Triton" or "torch": what computes blocks of the dtype and device of q."""
    if q.device.type == "cpu":
        return "C++" if _native.is_available() else "torch"
    has_kernels = q.device.type == "cuda" and q.dtype != torch.float64 and _has_triton()
    return "Triton" if has_kernels else "torch"


def kernels_for(q: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute calls of the dtype and device of q.

    Triton is imported by the first call on a GPU.
    """
    name = name_kernels(q)
    if name == "Triton":
        return import_module("penstock.attention.triton")
    return _native if name == "C++" else _torch
