"""Results that are built once for each graph, and live as long as it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_Owner = TypeVar("_Owner")
_Result = TypeVar("_Result")


def build_once(
    build: Callable[Concatenate[_Owner, _P], _Result],
) -> Callable[Concatenate[_Owner, _P], _Result]:
    """Make a function or method keep its results in its first argument, such as a graph.

    They are plain tensors even if the first use of one is in inference mode.
    """
    outside_inference_mode: Any = torch.inference_mode(False)(build)

    @functools.wraps(build)
    def read(owner: _Owner, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        results = owner.__dict__.setdefault("_built", {})
        key = (build, args, *kwargs.items())
        if key not in results:
            results[key] = outside_inference_mode(owner, *args, **kwargs)
        return results[key]

    return read
