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


def choose_path(q: Tensor, k: Tensor, layout: Layout, bias: Tensor | None) -> Path:
    """Return the path that `blocksparse` takes for these operands."""
    kernels = kernels_for(q)
    if bias is None and layout.pattern == "dense":
        return Path("SDPA", "every query sees every key")
    if bias is None and layout.pattern == "causal":
        if kernels is _torch:
            return Path("SDPA", f"it is causal, and there is no kernel of ours for {q.device}")
        if not _native.does_sweep(k.shape[0] * k.shape[1], _num_threads()):
            return Path("SDPA", "it is causal, and there are fewer KV heads than threads")
    if kernels is _native:
        return Path("C++", "blocks on the CPU")
    reason = "no compiler could be used" if q.device.type == "cpu" else "its device has no kernel"
    return Path("torch", reason)


@torch.compiler.assume_constant_result
def _num_threads() -> int:
    return torch.get_num_threads()


def kernels_for(q: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute calls on the device of q."""
    return _native if q.device.type == "cpu" and _native.is_available() else _torch
