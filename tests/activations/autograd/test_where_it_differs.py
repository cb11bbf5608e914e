"""Differences from stock that a program can see, and what PyTorch forbids under hooks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import grad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.modules.module import _global_forward_pre_hooks

import penstock
from _cases import Case, assert_same, error_of, leaf, same_one, wave

FORBIDDEN: dict[str, tuple[str, Case]] = {
    "a second pair of hooks": (
        "a saved tensor has room for one pair of hooks, and ours is there",
        lambda: second_pair_registered(),
    ),
    "disable_saved_tensors_hooks": (
        "it is there to make sure that no hooks are active",
        lambda: disable_saved_tensors_hooks("no hooks here").__enter__(),
    ),
    "torch.func.grad": (
        "functorch differentiates wrapped tensors at levels of its own and refuses all hooks",
        lambda: torch.func.grad(lambda x: x.sin().sum())(torch.ones(3)),
    ),
    "torch.func.vjp": ("as torch.func.grad", lambda: torch.func.vjp(torch.sin, torch.ones(3))),
    "torch.func.jacrev": (
        "as torch.func.grad",
        lambda: torch.func.jacrev(torch.sin)(torch.ones(3)),
    ),
    "torch.func.hessian": (
        "as torch.func.grad",
        lambda: torch.func.hessian(lambda x: x.sin().sum())(torch.ones(3)),
    ),
}
"""Uses that PyTorch itself refuses while hooks are active, with the reason. Its error is kept."""

DIFFERENT: dict[str, tuple[str, Callable[[], object], object, object]] = {
    "x.data = other": (
        "the values at the time of saving count for a non-leaf, as under save_on_cpu",
        lambda: data_replaced_after_saving(),
        2.0,
        1.0,
    ),
    "x.detach_()": (
        "hooks keep what is needed to go on, and the gradient is right; stock refuses",
        lambda: error_of(detached_after_saving).split(" that")[0],
        "none",
        "RuntimeError: Trying to use a saved tensor",
    ),
    "weakref.ref(x)": (
        "a saved tensor object dies with its last user, which is how its memory gets free",
        lambda: object_outlives_its_user(),
        False,
        True,
    ),
    "ctx.saved_tensors[0] is x": (
        "a tensor without history that has left comes back as another object, without attributes",
        lambda: object_comes_back(),
        False,
        True,
    ),
    "raw_saved.data": (
        "what is packed is a handle",
        lambda: type_of_what_is_packed(),
        "SavedHandle",
        "Tensor",
    ),
}
"""Where a program can tell that its saved tensors have left: why, what it looks at, what it finds
with Penstock, and in stock. The error for an in-place change differs, too: it names no operator.
"""


def data_replaced_after_saving() -> float:
    """The derivative of x * x at 1, where `x.data` has become 0.5 (1.0) or stays 1 (2.0)."""
    x = torch.ones((), requires_grad=True)
    hidden = x * 1
    out = hidden * hidden
    hidden.data = torch.tensor(0.5)
    return grad(out, x)[0].item()


def detached_after_saving() -> None:
    """Backward through a node whose input has been detached in place."""
    x = leaf()
    hidden = x * 1
    out = hidden.sin().sum()
    hidden.detach_()
    assert torch.equal(grad(out, x)[0], x.detach().cos())


def object_outlives_its_user() -> bool:
    """Return whether a saved tensor's Python object is there after `del`."""
    hidden = leaf() * 1
    out = hidden.sin()
    reference = weakref.ref(hidden)
    del hidden
    return out.grad_fn is not None and reference() is not None


def type_of_what_is_packed() -> str:
    """The type of the object that autograd keeps."""
    out = wave(leaf())
    return type(out.grad_fn._raw_saved_result.data).__name__


def second_pair_registered() -> None:
    """Hooks on one saved tensor. `out` stays alive, because PyTorch's handle does not own it."""
    out = wave(leaf())
    out.grad_fn._raw_saved_result.register_hooks(same_one, same_one)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_under_hooks(name, everything):
    """Allowed without hooks; the same error with ours as with hooks that do nothing."""
    _, attempt = FORBIDDEN[name]
    assert error_of(attempt) == "none"
    with saved_tensors_hooks(same_one, same_one):
        expected = error_of(attempt)
    with everything:
        found = error_of(attempt)
        after = grad(wave(x := leaf()).sum(), x)[0]
    assert found == expected != "none"
    assert torch.equal(after, grad(wave(x).sum(), x)[0])
    assert error_of(attempt) == "none"


def object_comes_back() -> bool:
    kept = torch.ones(64, 64)  # a leaf that needs no gradient, and belongs to no module
    found = []

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            found.append(ctx.saved_tensors[0] is kept)
            return gradient * 2

    x = torch.ones(64, 64, requires_grad=True)
    Multiply.apply(x).sum().backward()
    return found[0]


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_from_stock(name, everything):
    _, observe, with_penstock, in_stock = DIFFERENT[name]
    assert observe() == in_stock
    with everything:
        assert observe() == with_penstock


def test_entered_where_hooks_are_disabled(everything):
    hooks_before = dict(_global_forward_pre_hooks)
    with disable_saved_tensors_hooks("no hooks here"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            everything.__enter__()
    assert everything._num_entered == 0
    assert dict(_global_forward_pre_hooks) == hooks_before
    x = leaf()
    with everything:
        found = grad(wave(x).sum(), x)
    assert_same(found, grad(wave(x).sum(), x))


def test_an_offload_inside_another(everything, store):
    x = leaf()
    inner = penstock.offload(store, policy="all", min_bytes="0B")

    def value(context: AbstractContextManager[Any]) -> torch.Tensor:
        hidden = wave(x)
        with context:
            hidden = wave(hidden * 0.1)
        return (wave(hidden * 0.1) + hidden).sum()

    expected = grad(value(nullcontext()), x)[0]
    before = everything.report().num_saved
    with everything:
        out = value(inner)
        num_outer, num_inner = everything.report().num_saved - before, inner.report().num_saved
        found = grad(out, x)[0]
    assert num_outer > num_inner > 0
    assert torch.equal(found, expected)
    inner.close()


def test_graph_outlives_its_offload(store):
    """Nothing holds the Offload any more, and it was not closed."""
    x = leaf()

    def loss() -> torch.Tensor:
        with penstock.offload(store, policy="all", min_bytes="0B"):
            return wave(x).sum()

    out = loss()
    gc.collect()
    found = grad(out, x)[0]
    assert torch.equal(found, grad(wave(x).sum(), x)[0])
