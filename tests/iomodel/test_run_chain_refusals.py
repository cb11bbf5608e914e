"""Chains that would be another program in chunks are refused, and gradients are never left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.iomodel import plan_chain, run_chain


def rows(count=40, requires_grad=True):
    return torch.randn(count, 6, requires_grad=requires_grad)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += len(x)
        return x


@pytest.mark.parametrize(
    "module",
    [
        nn.Softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x - x.mean(0),
        lambda x: F.layer_norm(x, x.shape),
        lambda x: x.sum(0),
        lambda x: x.sort(0).values,
    ],
    ids=["softmax", "cumsum", "mean", "layer norm of all", "sum", "sort"],
)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_modules_that_mix_rows_are_refused(module, has_gradients):
    modules = [nn.Linear(6, 6), module, nn.Linear(6, 6)]
    with (
        torch.set_grad_enabled(has_gradients),
        pytest.raises(ValueError, match="each row alone"),
    ):
        run_chain(modules, rows(), chunk_rows=8)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6), Counter()], ids=["batch norm", "counter"])
def test_modules_that_change_their_buffers_are_refused(module):
    with pytest.raises(ValueError, match="changes its buffers"):
        run_chain([nn.Linear(6, 6), module], rows(), chunk_rows=8)
    assert run_chain([nn.Linear(6, 6), nn.BatchNorm1d(6).eval()], rows(), chunk_rows=8).shape


class Forgetful(nn.Module):
    """A module that has another buffer after each call, and a new one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x):
        self.last = x.detach()
        self.register_buffer("next", self.last + 1)
        return x


class Statistics(nn.Module):
    """A module whose statistics change without a new version of the tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize("kind", [lambda: nn.BatchNorm1d(6), Counter, Forgetful, Statistics])
@pytest.mark.parametrize(
    "run",
    [
        lambda modules, x: run_chain(modules, x, chunk_rows=8),
        lambda modules, x: run_chain(modules, x.unflatten(0, (4, 10)), chunk_rows=99),
        run_chain,
        plan_chain,
    ],
    ids=["chunks", "sequences", "planned", "plan"],
)
def test_a_refused_chain_leaves_buffers_and_random_numbers(kind, run):
    module, x = kind(), rows()
    before = {name: (each, each.clone()) for name, each in module.named_buffers()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="changes its buffers"):
        run([nn.Dropout(0.1), module], x)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(before) == [name for name, _ in module.named_buffers()]
    for name, (buffer, copy) in before.items():
        assert getattr(module, name) is buffer and torch.equal(buffer, copy)


def test_large_buffers_are_not_copied_and_their_changes_noticed():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(2**19))
    module.forward = lambda x: x + module.table.add_(1)[0]
    with pytest.raises(ValueError, match="changes its buffers"):
        run_chain([module], rows(), chunk_rows=8)


@pytest.mark.parametrize("are_ignored", [False, True])
def test_a_number_that_is_no_sum_is_refused(are_ignored):
    labels = torch.randint(0, 6, (40,))
    labels[-5:] = -100 if are_ignored else labels[-5:]
    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([nn.Linear(6, 6), nn.CrossEntropyLoss()], rows(), labels, chunk_rows=8)
    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([lambda x: x.square().mean()], rows(), chunk_rows=8)


def test_tensors_that_would_get_no_gradient_are_refused():
    weight = torch.randn(6, 6, requires_grad=True)
    for hidden in (lambda x: F.linear(x, weight), lambda x: F.linear(x, weight * 2).tanh()):
        with pytest.raises(ValueError, match=r"shape \(6, 6\) needs a gradient"):
            run_chain([nn.GELU(), hidden], rows(requires_grad=False), chunk_rows=8)
    scale = torch.rand(40, 6, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \(40, 6\) needs a gradient"):
        run_chain([nn.Linear(6, 6), torch.mul], rows(), scale, chunk_rows=8)
    with torch.no_grad():
        assert run_chain([lambda x: F.linear(x, weight)], rows(), chunk_rows=8).shape == (40, 6)


@pytest.mark.parametrize("options", [{"chunk_rows": 8}, {}])
def test_results_that_are_no_tensor_are_refused(options):
    def divide(x):
        return x.chunk(2, -1)

    with pytest.raises(TypeError, match="divide returned a tuple"):
        run_chain([nn.Linear(6, 6), divide], rows(), **options)


@pytest.mark.parametrize("end", [torch.tanh, lambda x: x.tanh().sum()], ids=["rows", "sum"])
def test_second_derivatives_are_refused(end):
    layer, x = nn.Linear(6, 6), rows()
    value = run_chain([layer, end], x, chunk_rows=8).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of their own"):
        gradient.square().sum().backward()


def test_gradients_of_a_sum_may_be_changed_before_a_second_backward_pass():
    layer, x = nn.Linear(6, 6), rows()
    loss = run_chain([layer, lambda x: x.square().sum()], x, chunk_rows=8)
    loss.backward(retain_graph=True)
    before = x.grad.clone(), layer.weight.grad.clone()
    for each in (x, layer.weight):
        each.grad.zero_()
    loss.backward()
    torch.testing.assert_close((x.grad, layer.weight.grad), before)


@pytest.mark.parametrize("number", [0, 1])
def test_hooks_before_the_backward_pass_of_a_layer_run(number):
    modules, x = [nn.Linear(6, 6), nn.Linear(6, 6)], rows()
    modules[number].register_full_backward_pre_hook(lambda _, gradient: (gradient[0] * 2,))
    found, expected = run_chain(modules, x, chunk_rows=8), modules[1](modules[0](x))
    operands = [x, *modules[0].parameters(), *modules[1].parameters()]
    ours, theirs = (torch.autograd.grad(each.sum(), operands) for each in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_labels_that_change_before_the_backward_pass_are_noticed():
    labels = torch.randint(0, 6, (40,))
    loss = nn.CrossEntropyLoss(reduction="none")
    found = run_chain([nn.Linear(6, 6), loss], rows(), labels, chunk_rows=8)
    labels.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_modules_that_mix_rows_are_refused_in_a_single_chunk_of_sequences(dropout, has_gradients):
    """Each sequence would attend to all others, whose rows it gets beside its own."""
    encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=dropout, batch_first=True)
    x = torch.randn(4, 10, 6)
    with torch.set_grad_enabled(has_gradients):
        for options in ({"chunk_rows": 40}, {}):
            with pytest.raises(ValueError, match="each row alone"):
                run_chain([nn.Linear(6, 6), encoder], x, **options)
    state = torch.get_rng_state()
    expected = nn.Sequential(dropping := nn.Dropout(0.5))(x)
    torch.set_rng_state(state)
    assert torch.equal(run_chain([dropping], x, chunk_rows=40), expected)


class Keeper(nn.Module):
    """A module that keeps a part of the loss, or a product of weights."""

    def __init__(self, keep):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(6, 2)), nn.Parameter(torch.rand(2, 6))
        self.keep, self.kept = keep, []

    def forward(self, x):
        weight = self.left @ self.right
        self.kept = [self.keep(x, weight)]
        return x @ weight


def test_parts_of_a_loss_that_modules_keep_are_refused():
    """They would be those of the last chunk, without a graph."""
    for keep in (lambda x, weight: (x @ weight).square().mean(), lambda x, _: x.abs().sum()):
        with pytest.raises(ValueError, match="keeps a result of its rows"):
            run_chain([Keeper(keep), nn.Tanh()], rows(), chunk_rows=8)
    for keep in (lambda _, weight: weight, lambda x, _: x.detach().mean(), torch.matmul):
        run_chain([Keeper(keep), nn.Tanh()], rows(), chunk_rows=8).sum().backward()


@pytest.mark.parametrize(
    ("modules", "x", "error", "message"),
    [
        (nn.Linear(6, 6), rows(), TypeError, "modules is a Linear; pass a list"),
        ([nn.Tanh(), "relu"], rows(), TypeError, r"modules\[1\] is 'relu'"),
        ([nn.Tanh()], rows().to_sparse(), ValueError, "x is sparse or nested"),
        ([lambda x: (x, x)], rows(), TypeError, "returned a tuple"),
        ([lambda x: x[:3]], rows(), ValueError, "each row alone"),
    ],
)
def test_what_is_no_chain_is_named_in_a_single_chunk_too(modules, x, error, message):
    with pytest.raises(error, match=message):
        run_chain(modules, x, chunk_rows=40)
