"""Back ends: each runs lowered programs; `Backend` says how it is called."""

from __future__ import annotations

import functools
import logging

import torch

from penstock.codegen import why_nothing_can_be_built
from penstock.compat.packages import is_installed
from penstock.rgnn.backends._invocation import Backend, Invocation, Results
from penstock.rgnn.backends._torch import TorchBackend
from penstock.rgnn.backends.cpp import CppBackend
from penstock.rgnn.interpreter import wide_dtype

__all__ = [
    "BACKENDS",
    "Backend",
    "Invocation",
    "Results",
    "choose_dtype",
    "load_backend",
    "resolve",
]

_logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "cpp", "triton")
"""The names that `compile(backend=...)` takes."""


def resolve(name: str, device_type: str) -> str:
    """Return the name of the back end that runs a call on a device, where `name` may be "auto"."""
    assert name in BACKENDS, name
    return _find_fastest(device_type) if name == "auto" else name


def load_backend(name: str) -> type[Backend]:
    """Return the back end of a name that is not "auto"."""
    if name == "triton":
        from penstock.rgnn.backends.triton import TritonBackend  # imports Triton: only at need

        return TritonBackend
    return CppBackend if name == "cpp" else TorchBackend


def choose_dtype(backend: type[Backend], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a back end keeps values in, for arguments of `dtype`."""
    return dtype if backend.has_half_precision else wide_dtype(dtype)


@functools.cache
def _find_fastest(device_type: str) -> str:
    name, reason = "torch", ""
    if device_type == "cuda" and is_installed("triton"):
        name = "triton"
    elif device_type == "cpu":
        problem = why_nothing_can_be_built()
        name, reason = ("cpp", "") if problem is None else ("torch", f": {problem}")
    _logger.info("relational programs on %s run in the backend %r%s", device_type, name, reason)
    return name
