"""Autocast around a capture is around forward and loss alone; autocast in `forward` is as eager."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from _planned import MACHINE, differences, everything
from penstock.compat.autocast import outside_autocast

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
OPTIONS = {"machine": MACHINE, "time_limit": 0.05, "cache": False, "device_memory": "64MiB"}


def autocast(enabled):
    """Return a block of autocast; none at all where it is not enabled."""
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


class Checkpointed(nn.Module):
    """Two layers, the second of which is computed again; within autocast, or as around it."""

    def __init__(self, inside, use_reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.inside, self.use_reentrant = inside, use_reentrant

    def forward(self, x):
        with autocast(self.inside):
            y = checkpoint(self.second, self.first(x), use_reentrant=self.use_reentrant)
        return (y.float() - x).square().mean()


class Preconditioned(torch.optim.Optimizer):
    """Multiplies matrices of float32, which autocast would do in bfloat16."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.view(parameter.grad.shape[0], -1)
            update = gradient - 0.1 * gradient @ gradient.T @ gradient
            parameter.sub_(0.1 * update.view_as(parameter))


def train(around, make, before_step=lambda model: None, planned=False):
    torch.manual_seed(0)
    model = make()
    optimizer = Preconditioned(model.parameters())
    losses = []
    if planned:
        with autocast(around):
            step = penstock.fit(
                model, optimizer, X, before_step=lambda: before_step(model), shadow=1, **OPTIONS
            )
        with step:
            losses = [step(X) for _ in range(3)]
            assert step.report().num_captures_again and not step.report().shadow_left_out
        return everything(model, optimizer, losses)
    for _ in range(3):
        optimizer.zero_grad()
        with autocast(around):
            loss = model(X)
        loss.backward()
        before_step(model)
        optimizer.step()
        losses.append(loss.detach())
    return everything(model, optimizer, losses)


def mix_gradients(model):
    for parameter in (model.first.weight, model.second.weight):
        parameter.grad = parameter.grad @ (parameter.grad.T @ parameter.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_autocast_and_checkpoints(around, inside, use_reentrant):
    make = lambda: Checkpointed(inside, use_reentrant)  # noqa: E731
    eager = train(around, make, mix_gradients)
    assert differences(eager, train(around, make, mix_gradients, planned=True), "") == []


def test_outside_of_autocast_blocks_end_as_in_none():
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", torch.float16, enabled=False), outside_autocast("cpu"):
            assert not torch.is_autocast_enabled("cpu")
            assert torch.autocast_increment_nesting() == 1
            assert torch.autocast_decrement_nesting() == 0
            assert (weight @ weight).dtype is torch.float32
        assert (weight @ weight).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="within"), outside_autocast("cpu"):
            raise ValueError("within")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
