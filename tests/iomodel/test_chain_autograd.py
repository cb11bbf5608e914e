"""Chains beside what else autograd does: swapped and frozen weights, hooks, sums, other passes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from penstock.iomodel import _plan_chain, plan_chain, run_chain
from penstock.iomodel._row_chunks import reuse_memory
from penstock.memory import CachingAllocator
from test_run_chain import compare

BOTH = pytest.mark.parametrize("options", [{"feature_blocks": 4}, {"chunk_rows": 5}], ids=str)


def layers(middle: nn.Module | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(12, 40), middle or nn.GELU(), nn.Linear(40, 10)]


def rows(count: int = 13) -> torch.Tensor:
    return torch.randn(count, 12, requires_grad=True)


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.layers, self.options = nn.ModuleList(layers()), options

    def forward(self, x, in_chain):
        if in_chain:
            return run_chain(list(self.layers), x, **self.options)
        return nn.Sequential(*self.layers)(x)


@BOTH
def test_weights_are_those_of_the_forward_pass(options):
    """`functional_call` has given the module its own weights back when the backward pass runs."""
    model, x = Model(options), rows()
    weights = {name: 2 * each.detach() for name, each in model.named_parameters()}
    for each in weights.values():
        each.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(
            torch.func.functional_call(model, weights, (x, in_chain)).square().sum(),
            [x, *weights.values()],
        )
        for in_chain in (True, False)
    )
    torch.testing.assert_close(ours, theirs)


@BOTH
def test_weights_that_are_computed_get_gradients_or_are_refused(options):
    modules, base = layers(), torch.randn(40, 12, requires_grad=True)
    del modules[0].weight
    modules[0].weight = base * 2
    if "chunk_rows" in options:
        with pytest.raises(ValueError, match=r"shape \(40, 12\) needs a gradient"):
            run_chain(modules, rows(), **options)
        return
    x = rows()
    ours, theirs = (
        torch.autograd.grad(each.square().sum(), [base, x], retain_graph=True)
        for each in (run_chain(modules, x, **options), nn.Sequential(*modules)(x))
    )
    torch.testing.assert_close(ours, theirs)


@BOTH
def test_frozen_weights_that_change_are_noticed(options):
    modules = layers()
    modules[0].requires_grad_(requires_grad=False)
    found = run_chain(modules, rows(), **options)
    modules[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        found.sum().backward()


def test_modules_that_are_switched_are_noticed():
    modules = [nn.Linear(12, 12), nn.Dropout(0.5).eval()]
    found = run_chain(modules, rows(), chunk_rows=5)
    modules[1].train()
    with pytest.raises(RuntimeError, match=r"Dropout .* switched between train\(\) and eval\(\)"):
        found.sum().backward()


@BOTH
@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_that_are_frozen_after_the_forward_pass(options, accumulate):
    modules, x = [*layers(), nn.LayerNorm(10)][-4:], rows()
    modules = modules if "chunk_rows" in options else modules[:3]
    modules[0].weight.grad = torch.zeros_like(modules[0].weight)
    found = run_chain(modules, x, **options, accumulate=accumulate)
    for module in modules:
        module.requires_grad_(requires_grad=False)
    expected = nn.Sequential(*modules)(x)
    ours, theirs = (torch.autograd.grad(each.square().sum(), x) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_hooks_of_weights_run_once():
    norm, x, seen = nn.LayerNorm(12), rows(), []
    norm.weight.register_hook(lambda gradient: seen.append(1) or gradient * 2)
    plan_chain([norm, nn.Tanh()], x)
    loss = run_chain([norm, lambda value: value.square().sum()], x, chunk_rows=5)
    assert not seen
    loss.backward()
    assert len(seen) == 1
    twice = norm.weight.grad.clone()
    norm.weight.grad = None
    norm(x).square().sum().backward()
    torch.testing.assert_close(twice, norm.weight.grad)


@pytest.mark.parametrize("chunk_rows", [1, 16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_bfloat16_do_not_stop_to_grow(chunk_rows, accumulate):
    layer = nn.Linear(4, 4).bfloat16()
    for each in layer.parameters():
        each.grad = torch.zeros_like(each)
    x = torch.ones(2048, 4, dtype=torch.bfloat16, requires_grad=True)
    options = {"chunk_rows": chunk_rows, "accumulate": accumulate}
    run_chain([nn.Identity(), layer], x, **options).sum().backward()
    assert layer.bias.grad.tolist() == [2048.0] * 4
    assert layer.weight.grad.eq(2048).all()
    total = run_chain([nn.Identity(), torch.sum], x.detach(), chunk_rows=chunk_rows)
    assert float(total) == 8192 and total.dtype == torch.bfloat16


def test_blocks_of_bfloat16_add_in_float32():
    modules, x = [each.bfloat16() for each in layers()], rows(40).detach().bfloat16()
    exact = nn.Sequential(*(copy.deepcopy(each).double() for each in modules))(x.double())
    with torch.no_grad():
        blocks, whole = run_chain(modules, x, feature_blocks=40), nn.Sequential(*modules)(x)
    errors = [(each.double() - exact).norm() for each in (blocks, whole)]
    assert errors[0] < 1.3 * errors[1]


@BOTH
def test_gradients_that_are_not_asked_for_are_not_added(options):
    modules, x = layers(), rows()
    for each in nn.Sequential(*modules).parameters():
        each.grad = torch.zeros_like(each)
    torch.autograd.grad(run_chain(modules, x, **options, accumulate=True).sum(), x)
    run_chain(modules, x, **options, accumulate=True).sum().backward(inputs=[x])
    assert not any(each.grad.any() for each in nn.Sequential(*modules).parameters())
    weight = modules[0].weight
    found = run_chain(modules, x, **options, accumulate=True).sum()
    expected = nn.Sequential(*modules)(x).sum()
    ours, theirs = (torch.autograd.grad(each, weight) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


@BOTH
def test_gradients_with_hooks_on_their_node_are_returned(options):
    modules, x, seen = layers(), rows(), []
    weight = modules[0].weight
    weight.grad = torch.zeros_like(weight)
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_prehook(lambda gradients: seen.append(gradients))
    run_chain(modules, x, **options, accumulate=True).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0][0], weight.grad)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers())

    def forward(self, x):
        return run_chain(list(self.layers), x, feature_blocks=4, accumulate=True)


@pytest.mark.parametrize("end", [torch.tanh, lambda value: value.square().sum()])
def test_chains_in_chains_add_once(end):
    inner, x = Inner(), rows()
    for each in inner.parameters():
        each.grad = torch.zeros_like(each)
    found = run_chain([inner, end], x, chunk_rows=5, accumulate=True).sum() / 100
    plan_chain([inner, end], x)
    assert not any(each.grad.any() for each in inner.parameters())
    found.backward()
    ours = [each.grad for each in inner.parameters()]
    expected = end(nn.Sequential(*inner.layers)(x)).sum() / 100
    torch.testing.assert_close(ours, list(torch.autograd.grad(expected, [*inner.parameters()])))


@BOTH
def test_modules_that_work_in_place(options):
    compare(layers(nn.ReLU(inplace=True)), rows(), **options)
    modules = layers(nn.ReLU(inplace=True))
    assert run_chain(modules, rows(), plan=plan_chain(modules, rows())).shape == (13, 10)
    with pytest.raises(ValueError, match="changes x in place"):
        run_chain([lambda value: value.mul_(2)], rows(), chunk_rows=5)


def test_a_first_module_that_works_in_place_without_gradients():
    x = rows().detach()
    expected = 2 * x
    with torch.no_grad():
        found = run_chain([lambda value: value.mul_(2), nn.Identity()], x, chunk_rows=5)
    assert torch.equal(found, expected) and torch.equal(x, expected)  # as the modules do


@BOTH
def test_patched_layers_compute_what_they_are_patched_to(options):
    modules = layers()
    stock = modules[0].forward
    modules[0].forward = lambda x: 2 * stock(x)
    if "feature_blocks" in options:
        with pytest.raises(ValueError, match="different weights, without hooks"):
            run_chain(modules, rows(), **options)
    else:
        compare(modules, rows(), **options)


@BOTH
def test_hooks_of_all_modules_are_called(options):
    modules, x = layers(), rows()
    handle = nn.modules.module.register_module_forward_hook(lambda _, args, output: output * 2)
    try:
        plan = plan_chain(modules, x)
        with torch.no_grad():
            torch.testing.assert_close(
                run_chain(modules, x, plan=plan), nn.Sequential(*modules)(x) / 2
            )
    finally:
        handle.remove()


@BOTH
def test_directional_derivatives_are_refused(options):
    with pytest.raises(RuntimeError, match="no gradients of their own"):
        torch.autograd.functional.jvp(
            lambda x: run_chain(layers(), x, **options), rows().detach(), torch.ones(13, 12)
        )


@BOTH
def test_a_backward_pass_under_autocast(options):
    modules, x = layers(), rows()
    found = run_chain(modules, x, **options).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        found.backward()
    (expected,) = torch.autograd.grad(nn.Sequential(*modules)(x).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    "module",
    [
        lambda x: x.flip(0).cumsum(0).flip(0),
        lambda x: x - x[-1:],
        lambda x: torch.cat([x[1:], x[:1]]),
        lambda x: x + 0.02 * x.mean(0),
        lambda x: x.square().sum() + 40.0,
    ],
    ids=["reverse cumsum", "last row", "next row", "a little of all", "a penalty"],
)
def test_modules_that_mix_rows_in_other_ways_are_refused(module):
    with pytest.raises(ValueError, match=r"each row alone|no sum over its rows"):
        run_chain([nn.Linear(12, 12), module], rows(40), chunk_rows=8)


def test_planning_changes_no_buffers_and_draws_no_numbers_that_count():
    with pytest.raises(ValueError, match="changes its buffers"):
        run_chain([nn.Linear(12, 12), nn.BatchNorm1d(12)], rows(40))
    modules, x = [nn.Linear(12, 12), nn.Dropout(0.5)], rows(40)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch.no_grad():
        plan_chain(modules, x)
    assert torch.equal(torch.rand(4), expected)


def test_arguments_that_do_not_fit_are_refused():
    modules, x = layers(), rows()
    with pytest.raises(ValueError, match="plan has 2 modules, and modules are 3"):
        run_chain(modules, x, plan=plan_chain(modules[:2], x))
    with pytest.raises(ValueError, match="plan and chunk_rows are given"):
        run_chain(modules, x, plan=plan_chain(modules, x), chunk_rows=5)
    with pytest.raises(ValueError, match="feature_blocks is 4, and the last module has 1 other"):
        run_chain(modules, x, torch.zeros(13), feature_blocks=4)
    with pytest.raises(ValueError, match=r"row_args\[0\] has the shape \(10,\)"):
        run_chain([*modules[:2], F.mse_loss], x, torch.zeros(10), chunk_rows=5)
    with pytest.raises(ValueError, match="complex64"):
        run_chain(modules, x.to(torch.complex64), chunk_rows=5)


def test_an_interrupted_start_leaves_no_user_of_the_allocator(monkeypatch):
    allocator = CachingAllocator.instance()

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(allocator, "_prepare", interrupt)
    with pytest.raises(KeyboardInterrupt), reuse_memory(torch.device("cpu")):
        pass
    assert allocator._num_acquired == 0


def test_checkpointing_around_a_chain_saves_the_same_in_both_runs():
    modules, x = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)], torch.randn(4096, 32)

    def differentiate(run) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        result = run(leaf)
        return torch.autograd.grad(result.square().sum(), [leaf, modules[0].weight])

    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    expected = differentiate(nn.Sequential(*modules))
    for options in ({}, {"chunk_rows": 64}):
        found = differentiate(
            lambda leaf, options=options: checkpoint(
                functools.partial(run_chain, modules, **options), leaf
            )
        )
        torch.testing.assert_close(found, expected)


def test_a_chain_is_planned_once():
    modules, x = [nn.Linear(8, 8), nn.GELU()], torch.randn(100, 8)
    first = _plan_chain.choose_chain(modules, x)
    assert _plan_chain.choose_chain(modules, x) is first
    assert _plan_chain.choose_chain(modules, x[:50]) is not first
    assert _plan_chain.choose_chain([modules[0], nn.GELU()], x) is not first
    with torch.no_grad():
        assert _plan_chain.choose_chain(modules, x) is not first
