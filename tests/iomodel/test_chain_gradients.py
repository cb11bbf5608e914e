"""Gradients of chains in chunks: those that are none, of 16 bits, of other shapes, and hooked."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from penstock.iomodel import run_chain
from test_run_chain import compare

ENDS = pytest.mark.parametrize("end", [torch.tanh, lambda value: value.square().sum()])


class Adapters(nn.Module):
    """A layer with two adapters, one of them in use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.used, self.unused = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, value):
        return self.base(value) + self.used(value)


@ENDS
@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_that_no_row_uses_have_no_gradient(end, accumulate):
    """An optimizer with weight decay would move them."""
    adapters = Adapters()
    run_chain(
        [adapters, end], torch.randn(20, 8), chunk_rows=6, accumulate=accumulate
    ).sum().backward()
    assert adapters.unused.weight.grad is None
    assert adapters.used.weight.grad.any()
    x = torch.randn(20, 8, requires_grad=True)
    run_chain([torch.zeros_like, adapters, end], x, chunk_rows=6).sum().backward()
    assert x.grad is None


@ENDS
def test_hooks_of_weights_that_no_row_uses_get_zeros(end):
    adapters, seen = Adapters(), []
    adapters.unused.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    run_chain([adapters, end], torch.randn(20, 8), chunk_rows=6).sum().backward()
    assert len(seen) == 1 and not seen[0].any()


def tied(layer, *, is_weight_kept: bool):
    weight = layer.weight
    return lambda value: F.linear(value, weight.t() if is_weight_kept else layer.weight.mT)


@pytest.mark.parametrize("is_weight_kept", [False, True])
@ENDS
def test_hooks_of_a_weight_that_a_function_uses_too_run_once(end, is_weight_kept):
    layer, x, calls = nn.Linear(8, 6), torch.randn(20, 8, requires_grad=True), []
    layer.weight.register_hook(lambda gradient: calls.append(1) or gradient * gradient)
    function = tied(layer, is_weight_kept=is_weight_kept)
    expected = end(function(F.gelu(layer(x))))
    found = run_chain([layer, nn.GELU(), function, end], x, chunk_rows=6)
    ours, theirs = (
        torch.autograd.grad(each.sum(), [x, *layer.parameters()]) for each in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)
    assert len(calls) == 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        value, weight = ctx.saved_tensors
        return gradient * weight, (gradient * value).sum(0)


def test_hooks_of_weights_that_cannot_be_replaced_are_refused():
    """As are those of scripted modules."""
    norm, calls = nn.LayerNorm(8), []
    modules = [norm, lambda value: Product.apply(value, norm.weight)]
    x = torch.randn(20, 8)
    found = run_chain(modules, x, chunk_rows=6)
    expected = modules[1](norm(x))
    ours, theirs = (torch.autograd.grad(each.sum(), norm.weight)
                    for each in (run_chain(modules, x, chunk_rows=6), expected))  # fmt: skip
    torch.testing.assert_close(ours, theirs)
    norm.weight.register_hook(calls.append)
    with pytest.raises(RuntimeError, match=r"shape \(8,\) has hooks"):
        found.sum().backward()
    assert not calls


def test_gradients_of_a_sum_in_float16_have_its_factor():
    """A mean's divisor and a loss scale keep them within the range of float16."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 1).half(), torch.ones(512, 4).half().requires_grad_()
    targets = torch.full((512, 1), -400.0)
    squares = functools.partial(squared_error, factor=1.0)
    tiny = functools.partial(squared_error, factor=1e-10)
    for end, factor in ((squares, 1 / 512), (tiny, 65536.0)):
        found = run_chain([layer, end], x, targets, chunk_rows=64)
        expected = end(layer(x), targets)
        operands = [x, *layer.parameters()]
        ours, theirs = (torch.autograd.grad(each * factor, operands) for each in (found, expected))
        torch.testing.assert_close(ours, theirs)
        assert all(each.isfinite().all() and each.all() for each in ours)


def squared_error(value, targets, factor):
    return factor * (value.float() - targets).square().sum()


def test_gradients_of_a_sum_in_bfloat16_are_rounded_after_its_factor():
    layer = nn.Linear(4, 4).bfloat16()
    loss = run_chain([layer, lambda value: value.float().sum()], torch.ones(261, 4).bfloat16(),
                     chunk_rows=29)  # fmt: skip
    (loss / 3).backward()
    assert layer.bias.grad.tolist() == [87.0] * 4  # not 86.5, as of 260 / 3


@pytest.mark.parametrize("end", [[], [nn.GELU()]])
def test_linear_layers_on_values_of_more_dimensions(end):
    modules = [nn.Unflatten(-1, (2, 4)), nn.Linear(4, 3), *end]
    compare(modules, torch.randn(17, 8, requires_grad=True), chunk_rows=4)


@pytest.mark.parametrize(
    "end", [[], [nn.GELU()], [nn.Linear(8, 3)], [nn.Linear(8, 1), torch.squeeze]]
)
def test_chunks_of_one_row_that_lose_a_dimension(end):
    modules = [nn.Linear(8, 8), torch.squeeze, *end]
    compare(modules, torch.randn(17, 8, requires_grad=True), chunk_rows=4)


def test_chunks_of_other_shapes_than_the_first_rows_are_refused():
    def outer(value):
        return value @ value[:1].expand(5, -1).t() if len(value) < 4 else value

    x = torch.randn(18, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=r"returned the shape \(2, 5\)"):
        run_chain([outer], x, chunk_rows=4)


@pytest.mark.parametrize("options", [{"chunk_rows": 6}, {"feature_blocks": 4}], ids=str)
def test_sparse_gradients_are_added_to_by_autograd(options):
    modules, x = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)], torch.randn(20, 8)
    weight = modules[0].weight
    (expected,) = torch.autograd.grad(nn.Sequential(*modules)(x).sum(), weight)
    weight.grad = torch.ones(8, 8).to_sparse(1)
    run_chain(modules, x, **options, accumulate=True).sum().backward()
    torch.testing.assert_close(weight.grad, 1 + expected)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_transformations_are_refused(transform):
    modules = [nn.Linear(8, 8), nn.Tanh()]
    for options in ({}, {"chunk_rows": 4}):
        with pytest.raises(ValueError, match=r"torch\.func"):
            transform(lambda x, options=options: run_chain(modules, x, **options).sum())(
                torch.randn(2, 20, 8)
            )


def test_weights_that_are_cached_are_refused_where_chunks_differentiate_them():
    layer, x = weight_norm(nn.Linear(8, 8)), torch.randn(20, 8, requires_grad=True)
    with parametrize.cached():
        found = run_chain([layer, nn.GELU()], x, chunk_rows=6)
        with pytest.raises(RuntimeError, match=r"parametrize.cached\(\) keeps a weight of"):
            found.sum().backward()
        with pytest.raises(RuntimeError, match=r"parametrize.cached\(\) keeps a weight of"):
            run_chain([layer, torch.sum], x, chunk_rows=6)
    compare([layer, nn.GELU()], x, chunk_rows=6)
    found.sum().backward()
