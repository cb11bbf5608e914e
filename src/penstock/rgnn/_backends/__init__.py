"""Backends: each runs the same lowered programs; `_run.Execute` says what one is."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.codegen import why_nothing_can_be_built
from penstock.rgnn._backends import _cpp, _torch
from penstock.rgnn._backends._narrow import widened
from penstock.rgnn._graph import Graph
from penstock.rgnn._interpreter import wide_dtype
from penstock.rgnn._plan import Plan
from penstock.rgnn._run import Execute

_logger = logging.getLogger(__name__)

_execute_in_cpp, _execute_in_torch = widened(_cpp.execute), widened(_torch.execute)

BACKENDS = ("auto", "torch", "cpp", "triton")
"""The names that `compile(backend=...)` takes."""


def choose(name: str) -> Execute:
    """The backend of a call.

    Args:
        name: One of `BACKENDS`; "auto" takes the fastest that can run there.
    """
    assert name in BACKENDS, name
    return _fastest if name == "auto" else _named(name)


def resolve(name: str, device_type: str) -> str:
    """The name of the backend that runs a call, where `name` may be "auto".

    Args:
        name: One of `BACKENDS`.
        device_type: Of the graph's device, such as "cpu".
    """
    return _fastest_on(device_type) if name == "auto" else name


def computed_dtype(backend: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a backend keeps values in, for arguments of `dtype`."""
    return dtype if backend == "triton" else wide_dtype(dtype)


def _named(name: str) -> Execute:
    if name == "triton":
        from penstock.rgnn._backends import _triton  # imports Triton, so only where it is used

        return _triton.execute
    return _execute_in_cpp if name == "cpp" else _execute_in_torch


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
    execute = _named(_fastest_on(graph.device.type))
    return execute(plan, graph, values, given, arguments, outputs, keep)


@functools.cache
def _fastest_on(device_type: str) -> str:
    name, reason = "torch", ""
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        name = "triton"
    elif device_type == "cpu":
        problem = why_nothing_can_be_built()
        name, reason = ("cpp", "") if problem is None else ("torch", f": {problem}")
    _logger.info("relational programs on %s run in the backend %r%s", device_type, name, reason)
    return name
