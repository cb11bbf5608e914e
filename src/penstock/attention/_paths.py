"""Paths: the implementations that a call can take, and the choice between them."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.attention import _native, _torch
from penstock.attention._layout import Layout


class Path(NamedTuple):
    """The implementation of a call.

    Attributes:
        name: "SDPA", "C++" or "torch".
        reason: Why it is taken.
    """

    name: str
    reason: str


# SDPA's causal path takes 0.55 to 0.85 of the time of ours in bfloat16, which processors multiply
# themselves, and 0.8 in float64; in float32 and float16 it takes 1.2 to 1.6 times as long.
_FASTER_BY_SDPA = (torch.bfloat16, torch.float64)


def choose_path(q: Tensor, layout: Layout, bias: Tensor | None) -> Path:
    """Return the path that `blocksparse` takes for these operands."""
    kernels = kernels_for(q)
    if bias is None and layout.pattern == "dense":
        return Path("SDPA", "every query sees every key, where SDPA is as fast")
    if bias is None and layout.pattern == "causal":
        if kernels is _torch:
            return Path("SDPA", f"it is causal, and there is no kernel of ours for {q.device}")
        if q.dtype in _FASTER_BY_SDPA:
            return Path("SDPA", f"it is causal, where SDPA is faster in {q.dtype}")
    if kernels is _native:
        return Path("C++", "blocks on the CPU")
    reason = "no compiler could be used" if q.device.type == "cpu" else "its device has no kernel"
    return Path("torch", reason)


def kernels_for(q: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute calls on the device of q."""
    return _native if q.device.type == "cpu" and _native.is_available() else _torch
