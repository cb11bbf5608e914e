"""Backends: each runs the same lowered programs; `_run.Execute` says what one is."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from penstock.rgnn._backends import _torch
from penstock.rgnn._graph import Graph
from penstock.rgnn._plan import Plan
from penstock.rgnn._run import Execute

_logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton")
"""The names that `compile(backend=...)` takes."""


def choose(name: str) -> Execute:
    """The backend of a call.

    Args:
        name: One of `BACKENDS`; "auto" takes the fastest that can run there.
    """
    assert name in BACKENDS, name
    return _fastest if name == "auto" else _named(name)


def _named(name: str) -> Execute:
    if name == "triton":
        from penstock.rgnn._backends import _triton  # imports Triton, so only where it is used

        return _triton.execute
    return _torch.execute


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
    has_triton = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    name = "triton" if has_triton else "torch"
    _logger.info("relational programs on %s run in the backend %r", device_type, name)
    return name
