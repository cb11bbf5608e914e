"""Values that a step on a GPU makes on the CPU: every plan leaves them in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _planned import everything, plan_within
from _steps import differences
from penstock.executor import bind
from penstock.graph import Phase, StepGraph, capture
from penstock.graph.capturing.recorder import Recorder
from penstock.graph.executable import is_on_host
from penstock.planner import plan

DTYPE = torch.float64
"""What has it counts as on the CPU, and all else as on a GPU."""


class HostValues(nn.Module):
    """Random numbers, positions and constants of the CPU, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.table = torch.linspace(0.5, 1.5, 64, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(0.5, dtype=DTYPE)
        positions = torch.arange(64, dtype=DTYPE)
        for layer in self.layers:
            positions += torch.rand(64, dtype=DTYPE)
            y = (layer(x) * scale).tanh()
            nothing = torch.tensor([], device=x.device)
            x = torch.cat([nothing, (y + (positions * self.table).to(x)).flatten()]).view_as(x)
        return x.square().mean()


@pytest.fixture
def is_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "is_on_host", lambda _, tensor: tensor.dtype is DTYPE)


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = HostValues()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(4, 64)


def captured() -> StepGraph:
    return capture(*make())


def test_they_have_no_planned_bytes_and_are_not_read_after_a_change(is_host: None):
    graph = captured()
    forward = [each for each in graph.operators if each.phase is Phase.FORWARD]
    outputs = [(operator, view) for operator in forward for view in operator.outputs if view]
    on_host = [(operator, view) for operator, view in outputs if view.dtype == "float64"]
    assert len(on_host) >= 2 + 2 * 6
    assert all(is_on_host(graph, view) for _, view in on_host)
    assert not any(is_on_host(graph, view) for _, view in outputs if view.dtype != "float64")
    products = [each for each, _ in on_host if each.target == "aten.mul.Tensor"]
    assert [each.recomputable for each in products] == [False] * 5 + [True]


@pytest.mark.parametrize("share", [1, 2])
def test_steps_are_eager_ones(is_host: None, share: int):
    model, optimizer, batch = make()
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(model(batch))
        losses[-1].backward()
        optimizer.step()
    expected = everything(model, optimizer, [each.detach() for each in losses])
    graph = captured()
    full = plan(graph, time_limit=0.1)
    found = plan_within(graph, full.peak_device_bytes // share, "host")
    model, optimizer, batch = make()
    with bind(found, model, optimizer, graph=graph, shadow=1) as step:
        losses = [step(batch).clone() for _ in range(4)]
        assert differences(expected, everything(model, optimizer, losses), "") == []
