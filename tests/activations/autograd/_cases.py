"""Parts of the programs that must be as in stock PyTorch, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

F64 = torch.float64
Case = Callable[[], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Put a function into the table of what must be as in stock PyTorch."""
    CASES[function.__name__] = function
    return function


def leaf(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """A seeded parameter; `leaf() * 1` is no parameter and may leave."""
    return torch.randn(shape or (6, 5), dtype=dtype, requires_grad=True)


def wave(x: torch.Tensor) -> torch.Tensor:
    """Saves an input (of sin), an output (of exp) and both factors of a product."""
    x = x * 1
    return (x.sin() * x).exp()


def same_one(x: Any) -> Any:
    """The hook that does nothing."""
    return x


def error_of(function: Callable[[], Any]) -> str:
    """The error that `function` raises, or "none"."""
    try:
        function()
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            return f"{type(error).__name__}: modified by an inplace operation"
        return f"{type(error).__name__}: {error}"
    return "none"


def outcome_of(function: Case) -> Any:
    """Return a case's result. An error counts, too; as text it keeps no graph alive."""
    try:
        return function()
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, through nests of tuples and lists; tensors in strides and dtype too."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, check_stride=not expected.is_sparse
        )
        assert found.requires_grad == expected.requires_grad
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for ours, stock in zip(found, expected, strict=True):
            assert_same(ours, stock)
    else:
        assert found == expected


class SavesAll(Function):
    """Saves an input, an intermediate, an output, and nothing."""

    @staticmethod
    def forward(ctx, x, factor):
        middle = x.sin()
        out = middle.exp() * factor
        ctx.save_for_backward(x, None, middle, out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, nothing, _, out = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        assert nothing is None and torch.equal(x, again)
        return gradient * out * x.cos(), None
