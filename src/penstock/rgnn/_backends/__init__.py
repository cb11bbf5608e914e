"""Backends: each runs the same lowered programs; `_run.Execute` says what one is."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.codegen import find_compiler
from penstock.rgnn._backends import _cpp, _torch
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan
from penstock.rgnn._run import Execute

_logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "cpp", "triton")
"""The names that `compile(backend=...)` takes."""


def choose(name: str) -> Execute:
    """The backend of a call.

    Args:
        name: One of `BACKENDS`; "auto" takes the fastest that can run there.
    """
    assert name in BACKENDS, name
    return _fastest if name == "auto" else _named(name)


def resolve(name: str, device_type: str, element_bytes: int) -> str:
    """The name of the backend that runs a call, where `name` may be "auto".

    Args:
        name: One of `BACKENDS`.
        device_type: Of the graph's device, such as "cpu".
        element_bytes: Of one number.
    """
    return _fastest_on(device_type, element_bytes) if name == "auto" else name


def _named(name: str) -> Execute:
    if name == "triton":
        from penstock.rgnn._backends import _triton  # imports Triton, so only where it is used

        return _triton.execute
    return _cpp.execute if name == "cpp" else _torch.execute


def _fastest(
    plan: Plan,
    graph: Graph,
    values: frozenset[int],
    given: Mapping[int, torch.Tensor],
    arguments: Mapping[str, torch.Tensor],
    outputs: Sequence[int],
    keep: Collection[int],
) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    """Compute values by the fastest backend for the graph's device; see `_run.Execute`."""
    first = next(iter(arguments.values()), None)
    dtype = torch.get_default_dtype() if first is None else first.dtype
    execute = _named(_fastest_on(graph.device.type, dtype.itemsize))
    return execute(plan, graph, values, given, arguments, outputs, keep)


@functools.cache
def _fastest_on(device_type: str, element_bytes: int) -> str:
    name = "torch"
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        name = "triton"
    elif device_type == "cpu" and element_bytes in {dtype.itemsize for dtype in _cpp.DTYPES}:
        name = "torch" if find_compiler() is None else "cpp"
    _logger.info(
        "relational programs on %s in numbers of %d bytes run in the backend %r",
        device_type,
        element_bytes,
        name,
    )
    return name
