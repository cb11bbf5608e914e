"""Paths: the implementations that a call can take, and the choice between them."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from penstock.attention import _torch
from penstock.attention._layout import Layout


class Path(NamedTuple):
    """The implementation of a call.

    Attributes:
        name: "SDPA", "C++", "Triton" or "torch".
        reason: Why it is taken.
    """

    name: str
    reason: str


def choose_path(q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None) -> Path:
    """Return the path that `blocksparse` takes for these operands."""
    if bias is None and layout.pattern == "dense":
        return Path("SDPA", "every query sees every key")
    if bias is None and layout.pattern == "causal" and q.device.type != "cpu":
        return Path("SDPA", "it is causal, for which SDPA has a kernel on this device")
    return Path("torch", "there is no kernel for this device")


def kernels_for(q: Tensor) -> ModuleType:
    """Return the module whose `forward` and `backward` compute calls on the device of q."""
    del q
    return _torch
