"""Backends: each runs the same lowered programs; `_run.Execute` says what one is."""

from __future__ import annotations

from penstock.rgnn._backends import _torch
from penstock.rgnn._run import Execute

BACKENDS = ("auto", "torch", "triton")
"""The names that `compile(backend=...)` takes."""


def choose(name: str) -> Execute:
    """The backend of a call.

    Args:
        name: One of `BACKENDS`; "auto" takes the fastest that can run there.
    """
    assert name in BACKENDS, name
    if name == "triton":
        from penstock.rgnn._backends import _triton  # imports Triton, so only where it is asked for

        return _triton.execute
    return _torch.execute
