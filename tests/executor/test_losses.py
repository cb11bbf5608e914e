"""Operators whose `out=` variants use the result's place as room for something larger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from _steps import differences
from penstock.graph.executable import writes_in_place
from penstock.planner import plan

pytestmark = pytest.mark.usefixtures("one_thread")

ONES = torch.ones(64, 32)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda y: F.mse_loss(y, ONES),
    "huber": lambda y: F.huber_loss(y, ONES),
    "smooth l1": lambda y: F.smooth_l1_loss(y, ONES),
    "soft margin": lambda y: F.soft_margin_loss(y, ONES),
    "binary cross-entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), ONES),
    "with logits": lambda y: F.binary_cross_entropy_with_logits(y, ONES),
    "divergence": lambda y: F.kl_div(y.log_softmax(1), ONES, reduction="batchmean"),
    "margins": lambda y: F.multi_margin_loss(y, torch.arange(64) % 32),
    "labels": lambda y: F.multilabel_margin_loss(y, torch.arange(32).expand(64, 32)),
    "likelihood": lambda y: F.nll_loss(y.log_softmax(1), torch.arange(64) % 32),
    "l1": lambda y: F.l1_loss(y, ONES),
}


def trainee() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 32)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_writes_nothing_but_its_place(name):
    def loss(output: Tensor, _: Tensor) -> Tensor:
        return LOSSES[name](output)

    model, optimizer, batch = trainee()
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model, optimizer, batch = trainee()
    graph = penstock.capture(model, optimizer, batch, loss=loss)
    full = plan(graph, machine="h200", time_limit=0.05)
    budget = full.peak_device_bytes * 3 // 4
    below = {"host_memory": "1MiB", "machine": "h200", "time_limit": 0.05}
    options = {"graph": graph, "loss": loss, "debug": True}
    # The program is called again beside the steps of one of the plans.
    for found, shadow in ((full, None), (plan(graph, device_memory=budget, **below), 0)):
        model, optimizer, batch = trainee()
        with penstock.bind(found, model, optimizer, shadow=shadow, **options) as step:
            losses = [step(batch) for _ in range(3)]
            assert differences(expected, losses, "") == []
            assert differences(weights, dict(model.state_dict()), "") == []


def test_reductions_of_losses_are_copied_to_their_places():
    assert not writes_in_place("aten.soft_margin_loss.default")
    assert writes_in_place("aten.mse_loss_backward.default")
    assert writes_in_place("aten.sum.dim_IntList")


class ParameterAsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, _: Tensor) -> Tensor:
        return self.weights[1]


def test_a_loss_that_is_a_parameter_is_that_before_the_update():
    model = ParameterAsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"device_memory": "1MiB", "machine": "h200", "time_limit": 0.05, "cache": False}
    with penstock.fit(model, optimizer, torch.ones(1), **options) as step:
        assert [step(torch.ones(1)).item() for _ in range(3)] == [4.0, 3.5, 3.0]
    assert model.weights.tolist() == [3.0, 2.5]
