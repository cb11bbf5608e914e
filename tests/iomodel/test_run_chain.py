"""Chains that run: results and gradients of the modules themselves, in any chunks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.iomodel import _plan_chain, _segment_runs, plan_chain, run_chain
from penstock.iomodel._modules import find_parameters
from penstock.memory import CachingAllocator
from test_chain import processor

SOFTMAX = functools.partial(F.softmax, dim=-1)
SUM_LOSS = functools.partial(F.cross_entropy, reduction="sum")


class Gate(nn.Module):
    """A gated unit: half of the features are gates."""

    def forward(self, x):
        value, gate = x.chunk(2, dim=-1)
        return value * torch.sigmoid(gate)


def chains() -> dict[str, list]:
    torch.manual_seed(0)
    return {
        "mlp": [nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 10)],
        "mlp without bias": [nn.Linear(12, 40, bias=False), nn.SiLU(), nn.Linear(40, 12)],
        "gate": [nn.Linear(12, 32), Gate(), nn.Linear(16, 12)],
        "norms": [nn.LayerNorm(12), nn.GELU(), nn.LayerNorm(12), SOFTMAX],
        "one linear": [nn.Linear(12, 12)],
    }  # fmt: skip


def compare(modules, x, *row_args, chunk_rows=None, **options):
    weights = [w for m in modules if isinstance(m, nn.Module) for w in m.parameters()]
    operands = [each for each in [x, *weights] if each.requires_grad]

    def unchunked():
        value = x.reshape(-1, x.shape[-1])
        for module in modules[:-1]:
            value = module(value)
        value = modules[-1](value, *(each.reshape(len(value)) for each in row_args))
        return value.reshape(*x.shape[:-1], *value.shape[1:]) if value.dim() else value

    found = run_chain(modules, x, *row_args, chunk_rows=chunk_rows, **options)
    expected = unchunked()
    torch.testing.assert_close(found, expected)
    seed = torch.ones_like(expected) / 3 if expected.dim() == 0 else torch.randn_like(expected)
    if operands:
        ours = torch.autograd.grad(found, operands, seed)
        theirs = torch.autograd.grad(expected, operands, seed)
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our, their)
    return found, expected


@pytest.mark.parametrize("chunk_rows", [1, 7, 30, 100])
@pytest.mark.parametrize("name", chains())
def test_results_and_gradients_are_those_of_the_modules(name, chunk_rows):
    modules = chains()[name]
    compare(modules, torch.randn(5, 6, 12, requires_grad=True), chunk_rows=chunk_rows)


@pytest.mark.parametrize("chunk_rows", [1, 8, 64])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_loss_is_the_sum_over_the_chunks(chunk_rows, is_frozen):
    head = nn.Linear(12, 50).requires_grad_(not is_frozen)
    labels = torch.randint(0, 50, (4, 9))
    labels[0, :3] = -100  # ignored
    compare([head, SUM_LOSS], torch.randn(4, 9, 12, requires_grad=True), labels,
            chunk_rows=chunk_rows)  # fmt: skip


def test_gradients_in_double_precision():
    modules = [nn.Linear(3, 5).double(), nn.Tanh(), nn.Linear(5, 2).double()]
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    weights = [w for m in modules if isinstance(m, nn.Module) for w in m.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *_: run_chain(modules, x, chunk_rows=3), (x, *weights)
    )


def test_elementwise_chains_are_the_same_bits():
    modules = [nn.LayerNorm(64), nn.GELU(), SOFTMAX]
    found, expected = compare(modules, torch.randn(100, 64, requires_grad=True), chunk_rows=16)
    assert torch.equal(found, expected)


def test_hooks_of_modules_run():
    calls: list[int] = []
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda *_: calls.append(1))
    compare([nn.ReLU(), layer], torch.randn(20, 6, requires_grad=True), chunk_rows=10)
    assert len(calls) == 2 + 2 + 2 + 1  # some rows and fewer, the chunks twice, and unchunked


def test_shared_weights_have_one_gradient():
    layer = nn.Linear(6, 6)
    compare([layer, nn.ReLU(), layer], torch.randn(20, 6, requires_grad=True), chunk_rows=4)


def test_nothing_is_computed_for_what_needs_no_gradient():
    modules = [nn.Linear(6, 6).requires_grad_(False), nn.ReLU()]
    assert not run_chain(modules, torch.randn(20, 6), chunk_rows=4).requires_grad
    compare(modules, torch.randn(20, 6), chunk_rows=4)


def test_values_within_chunks_are_not_kept():
    seen: list[int] = []

    class Probe(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x * 2

    x = torch.randn(32, 4, requires_grad=True)
    found = run_chain([Probe(), nn.ReLU()], x, chunk_rows=8)
    assert seen == [8, 7, 8, 8, 8, 8]  # some rows and fewer show that rows are independent
    found.sum().backward()
    assert seen[6:] == [8] * 4  # again, chunk by chunk


def test_the_plan_chunks_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(_plan_chain, "_time", lambda call: 0.0)  # bytes alone decide
    x = torch.randn(8192, 256, requires_grad=True)
    modules = [nn.ReLU(), nn.Sigmoid(), nn.Tanh()]
    plan = plan_chain(modules, x, machine=processor())
    segment = plan.segments[0]
    assert segment.level == "L2" and len(segment.operators) > 1
    assert 2 * 1024 * segment.chunk_rows <= 2**20
    compare(modules, x, plan=plan)


@pytest.mark.parametrize("is_step", [False, True])
@pytest.mark.parametrize("has_products", [False, True])
def test_times_of_chunks_are_of_runs_of_some_rows(monkeypatch, is_step: bool, has_products: bool):
    seen: list[int] = []

    def time_best(call, repetitions: int, **options: float) -> float:
        call()
        seen.append(len(call.args[1]))
        return 2.0 + seen[-1] / 4

    monkeypatch.setattr(_plan_chain, "_time", lambda call: 0.0)  # bytes alone decide
    monkeypatch.setattr(_segment_runs, "time_best", time_best)
    modules = [nn.Linear(64, 4096), nn.Softmax(-1), nn.Linear(4096, 8)]
    if not has_products:
        modules = [nn.SiLU(), nn.LayerNorm(64), nn.SiLU()]
    x = torch.randn(8192, 64, requires_grad=is_step)
    with torch.set_grad_enabled(is_step):
        plan = plan_chain(modules, x, machine=processor())
    (segment,) = [each for each in plan.segments if each.chunk_rows < len(x)]
    many = 4 * segment.chunk_rows
    if not has_products:
        many = max(many, len(x) // 8)
    assert seen == [many // 2, many]
    assert segment.seconds == pytest.approx(2.0 + len(x) / 4)
    assert all(each.grad is None for each in (x, *find_parameters(modules)))


def test_planning_changes_no_input():
    x = torch.randn(256, 64)
    before = x.clone()
    with torch.no_grad():
        _plan_chain.choose_chain([nn.SiLU(inplace=True), nn.Linear(64, 8)], x)
    assert torch.equal(x, before)


def test_refusals():
    x = torch.randn(8, 4)
    with pytest.raises(ValueError, match="modules is 0"):
        run_chain([], x)
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        run_chain([nn.ReLU()], x, chunk_rows=0)
    with pytest.raises(ValueError, match="random numbers"):
        run_chain([nn.Dropout(0.5)], x, chunk_rows=2)
    assert run_chain([nn.Dropout(0.5).eval()], x, chunk_rows=2).shape == (8, 4)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is on"):
        run_chain([nn.ReLU()], x)
    with pytest.raises(ValueError, match="rows is 0"):
        run_chain([nn.ReLU()], x[:0])


@pytest.mark.parametrize("is_step", [False, True])
def test_chunks_lie_in_the_memory_of_the_first(is_step):
    """No chunk but the first makes further memory resident, and none is kept afterwards."""
    allocator = CachingAllocator.instance()
    if not allocator.available():
        pytest.skip(allocator.reason)
    modules = [nn.Linear(8, 2**17, bias=False), nn.Softmax(dim=-1), nn.Linear(2**17, 4)]
    x = torch.randn(512, 8, requires_grad=is_step)  # values of 256 MiB, of a chunk 32
    misses = []
    for num_rows in (128, 512):
        before = allocator.statistics()
        with torch.set_grad_enabled(is_step):
            found = run_chain(modules, x[:num_rows], chunk_rows=64)
        if is_step:
            found.sum().backward()
        after = allocator.statistics()
        misses.append(after.num_misses - before.num_misses)
        assert after.num_hits - before.num_hits >= num_rows // 64 - 1
        assert after.idle_bytes == before.idle_bytes
    assert misses[1] <= misses[0] + 2 * is_step  # the gradients of more rows
