"""Two linear layers in blocks of the features between them: results, gradients, what is kept."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from penstock.iomodel import ChainOperator, _plan_chain, chain, plan_chain, run_chain
from penstock.iomodel._modules import run_fused
from test_chain import processor
from test_run_chain import compare


def layers(middle: nn.Module | None = None, *, bias: bool = True, width: int = 40) -> list:
    torch.manual_seed(0)
    between = [] if middle is None else [middle]
    return [nn.Linear(12, width, bias=bias), *between, nn.Linear(width, 10, bias=bias)]


MIDDLES = [None, nn.ReLU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU(0.3)]


@pytest.mark.parametrize("blocks", [1, 3, 8, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("middle", MIDDLES, ids=str)
def test_results_and_gradients_are_those_of_the_modules(middle, bias, blocks):
    x = torch.randn(5, 6, 12, requires_grad=True)
    modules = layers(middle, bias=bias)
    _, expected = compare(modules, x, feature_blocks=blocks)
    with torch.no_grad():
        torch.testing.assert_close(run_chain(modules, x, feature_blocks=blocks), expected)


@pytest.mark.parametrize("frozen", [["0"], ["2"], ["0.weight", "2.bias"], ["0", "2"]])
def test_frozen_weights(frozen):
    modules = nn.Sequential(*layers(nn.GELU()))
    for name, each in modules.named_parameters():
        each.requires_grad_(not name.startswith(tuple(frozen)))
    for needs in (False, True):
        compare(list(modules), torch.randn(7, 12, requires_grad=needs), feature_blocks=4)


def test_gradients_in_double_precision():
    modules = [each.double() for each in layers(nn.GELU(), width=8)]
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    weights = [weight for each in modules for weight in each.parameters()]
    assert torch.autograd.gradcheck(
        lambda x, *_: run_chain(modules, x, feature_blocks=3), (x, *weights)
    )


def test_half_is_kept_and_no_other_value_is_saved():
    saved: list[torch.Size] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        saved.append(value.shape)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        run_chain(layers(nn.GELU()), torch.randn(6, 12, requires_grad=True), feature_blocks=8)
    assert saved == [(6, 12), *[(6, 5)] * 4]


@pytest.mark.parametrize("options", [{"feature_blocks": 4}, {"chunk_rows": 5}])
def test_hooks_that_copy_saved_values_change_nothing(options):
    modules, x = layers(nn.GELU()), torch.randn(13, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        compare(modules, x, **options)


@pytest.mark.parametrize("options", [{"feature_blocks": 4}, {"chunk_rows": 5}])
class TestAccumulate:
    def run(self, options, **more):
        modules, x = layers(nn.GELU()), torch.randn(13, 12, generator=torch.manual_seed(1))
        stock = copy.deepcopy(modules)
        for each in (modules, stock):
            for number, weight in enumerate(w for m in each for w in m.parameters()):
                weight.grad = None if number == 1 else torch.full_like(weight, 0.5)
        places = [weight.grad for m in modules for weight in m.parameters()]
        run_chain(modules, x, **options, **more).sum().backward()
        nn.Sequential(*stock)(x).sum().backward()
        for ours, theirs in zip(nn.Sequential(*modules).parameters(),
                                nn.Sequential(*stock).parameters(), strict=True):  # fmt: skip
            torch.testing.assert_close(ours.grad, theirs.grad)
        return modules, places

    def test_gradients_that_are_there_are_added_to(self, options):
        modules, places = self.run(options, accumulate=True)
        for weight, place in zip(nn.Sequential(*modules).parameters(), places, strict=True):
            assert place is None or weight.grad is place

    def test_without_they_are_returned(self, options):
        self.run(options, accumulate=False)

    def test_weights_with_hooks_are_returned(self, options):
        modules, x = layers(nn.GELU()), torch.randn(13, 12)
        weight, seen = modules[0].weight, []
        weight.grad = torch.zeros_like(weight)
        weight.register_hook(seen.append)
        run_chain(modules, x, **options, accumulate=True).sum().backward()
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], weight.grad)


@pytest.mark.parametrize("options", [{"feature_blocks": 4}, {"chunk_rows": 5}])
def test_changed_weights_and_double_backward_are_refused(options):
    modules, x = layers(nn.GELU()), torch.randn(13, 12, requires_grad=True)
    found = run_chain(modules, x, **options).sum()
    with torch.no_grad():
        modules[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        found.backward()
    found = run_chain(modules, x, **options).square().sum()
    (gradient,) = torch.autograd.grad(found, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of their own"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "modules",
    [
        [nn.Linear(12, 12)],
        [nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12)],
        [nn.GELU(), nn.Linear(12, 12)],
        [nn.Linear(12, 12)] * 2,
    ],
)
def test_other_modules_are_refused(modules):
    with pytest.raises(ValueError, match="feature_blocks is 2 for"):
        run_chain(modules, torch.randn(3, 12), feature_blocks=2)
    with pytest.raises(ValueError, match="feature_blocks is 0"):
        run_chain(modules, torch.randn(3, 12), feature_blocks=0)


def test_functions_of_each_element_overwrite_only_what_the_chain_made():
    x = torch.randn(4, 12)
    before, pointers = x.clone(), []

    class Watched(nn.Tanh):
        def forward(self, value):
            pointers.append(value.data_ptr())
            return super().forward(value)

    with torch.no_grad():
        found = run_fused([lambda x: x[:, :8], nn.ReLU(), nn.Sigmoid(), Watched()], x, [])
        expected = torch.tanh(torch.sigmoid(torch.relu(x[:, :8])))
        assert torch.equal(found, expected) and torch.equal(x, before)
        layer = nn.Linear(12, 6)
        found = run_fused([layer, nn.GELU()], x, [])
        assert torch.equal(found, nn.functional.gelu(layer(x))) and torch.equal(x, before)
        gelu = nn.GELU()
        gelu.register_forward_hook(lambda *_: pointers.append(0))  # a hook sees its own result
        run_fused([layer, gelu], x, [])
    assert len(pointers) == 2


def test_edges_that_are_fused_are_those_that_run_in_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_plan_chain, "_NEW_BYTES", 64 * 2**20)
    modules = [nn.LayerNorm(64), nn.ReLU(), nn.Sigmoid(), lambda x: x * 2, nn.Tanh()]
    with torch.no_grad():
        plan = plan_chain(modules, torch.randn(4096, 64), machine=processor())
    kinds = {edge for pair, edge in plan.edges.items() if pair in [(1, 2)]}
    assert kinds <= {"fuse", "spill"}
    assert all(plan.edges[pair] != "fuse" for pair in [(-1, 0), (0, 1), (2, 3), (3, 4)])
    # A step keeps what its backward pass reads.
    plan = plan_chain(modules, torch.randn(64, 64, requires_grad=True), machine=processor())
    assert "fuse" not in plan.edges.values()


def test_large_weights_between_products_are_planned_in_blocks():
    up = {"row_bytes": 65536, "weight_bytes": 2**28, "row_seconds": 1e-3, "features": "product"}
    operators = [
        ChainOperator(name="up", **up, chunk_seconds=0.1),
        ChainOperator(name="gelu", row_bytes=65536, features="each"),
        ChainOperator(name="down", **{**up, "row_bytes": 16384}, chunk_seconds=0.1),
    ]
    plan = chain(operators, 4096, processor(), input_row_bytes=16384)
    (segment,) = plan.segments
    assert segment.feature_blocks == 16 and segment.chunk_rows == 4096
    assert "4096 rows by 16 blocks" in str(plan)
    unmarked = [dataclasses.replace(each, features="mixed") for each in operators]
    assert chain(unmarked, 4096, processor(), input_row_bytes=16384).cost > plan.cost
