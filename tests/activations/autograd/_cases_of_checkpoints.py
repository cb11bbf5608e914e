"""Activation checkpointing, both kinds."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from _cases import case, error_of, leaf, wave


def _block(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(wave(x * 1), 0.2) * x


@case
def checkpoint_of_both_kinds():
    x = leaf()
    outs = [
        checkpoint(_block, x * 1, use_reentrant=True),
        checkpoint(_block, x * 1, use_reentrant=False),
        checkpoint(_block, x * 1, use_reentrant=False, preserve_rng_state=False),
        checkpoint(_block, x * 1, use_reentrant=False, determinism_check="none"),
    ]
    return [backward(out, x) for out in outs]


def backward(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient by way of `.grad`, which is the only one that reentrant checkpoints know."""
    x.grad = None
    out.sum().backward()
    gradient, x.grad = x.grad, None
    return gradient


@case
def checkpoint_nested():
    x = leaf()

    def outer(y: torch.Tensor, inner_is_reentrant: bool) -> torch.Tensor:
        hidden = checkpoint(_block, y * 1, use_reentrant=inner_is_reentrant)
        return checkpoint(wave, hidden.sin(), use_reentrant=inner_is_reentrant) + hidden.cos()

    return [
        backward(checkpoint(outer, x * 1, inner, use_reentrant=kind), x)
        for kind in (True, False)
        for inner in (True, False)
        if kind or not inner
    ]


@case
def checkpoint_that_stops_early_or_not():
    x, stops = leaf(), []
    for early in (True, False):
        calls = []

        def block(y: torch.Tensor, calls: list[str] = calls) -> torch.Tensor:
            hidden = wave(y)
            calls.append("middle")
            out = hidden * 2
            calls.append("end")
            return out

        with set_checkpoint_early_stop(early):
            out = checkpoint(block, x * 1, use_reentrant=False)
        stops.append((grad(out.sum(), x), calls))
    return stops


@case
def checkpoint_selective():
    x = leaf(5, 5)
    policy = functools.partial(
        create_selective_checkpoint_contexts,
        [torch.ops.aten.mm.default, torch.ops.aten.sin.default],
    )

    def block(y: torch.Tensor) -> torch.Tensor:
        return ((y @ y.sin()).exp() @ y * 1e-3).sin()

    out = checkpoint(block, x * 1, use_reentrant=False, context_fn=policy)
    return grad(out.sum(), x)


@case
def checkpoint_keeps_its_determinism_errors():
    x, calls = leaf(), []

    def changes_shape(y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return wave(y[: 7 - len(calls)]).sum()

    def changes_number(y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return wave(y) if len(calls) % 2 else y * 2

    errors = []
    for block in (changes_shape, changes_number):
        calls.clear()
        out = checkpoint(block, x * 1, use_reentrant=False)
        errors.append(error_of(lambda out=out: grad(out.sum(), x)).split("\n")[0])
    return errors, grad(wave(x).sum(), x)


@case
def checkpoint_with_retained_and_double_backward():
    x = leaf()
    out = checkpoint(_block, x * 1, use_reentrant=False)
    first = grad(out.sum(), x, retain_graph=True)
    second = grad(out.sum(), x, create_graph=True)[0]
    return first, second, grad(second.sum(), x)


@case
def checkpoint_sequential_and_saved_outside():
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]).double()
    x = leaf()
    out = checkpoint_sequential(layers, 2, wave(x), use_reentrant=False)
    out.sin().sum().backward()
    return [parameter.grad for parameter in layers.parameters()], x.grad


@case
def checkpoint_with_an_error_in_the_recomputation():
    x, calls = leaf(), []

    def block(y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("while recomputing")
        return wave(y)

    out = checkpoint(block, x * 1, use_reentrant=False)
    error = error_of(lambda: grad(out.sum(), x, retain_graph=True))
    return error, grad(out.sum(), x)
