"""Backends: each runs the same lowered programs; `_run.Execute` says what one is."""

from __future__ import annotations

from penstock.rgnn._backends import _cpp, _torch
from penstock.rgnn._run import Execute

BACKENDS = ("auto", "torch", "cpp")
"""The names that `compile(backend=...)` takes."""


def choose(name: str) -> Execute:
    """The backend of a call.

    Args:
        name: One of `BACKENDS`; "auto" takes the fastest that can run there.
    """
    assert name in BACKENDS, name
    return {"auto": _torch.execute, "torch": _torch.execute, "cpp": _cpp.execute}[name]
