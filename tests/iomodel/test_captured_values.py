"""Values that functions of a chain have captured: others in the backward pass are noticed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from penstock.iomodel import run_chain

SCALE = torch.full((4,), 2.0)


def multiply(h):
    return h * SCALE


def rows():
    return torch.randn(12, 4, requires_grad=True)


class Holder(nn.Module):
    """A module with a tensor that is no buffer, and one of its last call."""

    def __init__(self):
        super().__init__()
        self.scale = torch.full((4,), 2.0)

    def forward(self, h):
        self.last = h * self.scale
        return self.last


def test_captured_tensors_that_change_in_place_are_noticed():
    scale, holder = torch.full((4,), 2.0), Holder()
    for module, tensor in (
        (lambda h: h * scale, scale),
        (functools.partial(torch.mul, scale), scale),
        (multiply, SCALE),
        (holder, holder.scale),
    ):
        x = rows()
        found = run_chain([module, nn.Tanh()], x, chunk_rows=4)
        expected = torch.autograd.grad(torch.tanh(x * 2).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), expected)
        found = run_chain([module, nn.Tanh()], x, chunk_rows=4)
        tensor.mul_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            found.sum().backward()


def test_variables_that_have_other_values_are_noticed():
    calls, losses = 0, []

    def scale(h):
        nonlocal calls
        calls += 1
        return h * power

    for power in (2.0, 3.0):
        losses.append(run_chain([scale, nn.Tanh()], rows(), chunk_rows=4).sum())
    losses[1].backward()
    with pytest.raises(RuntimeError, match="scale of the chain reads power"):
        losses[0].backward()


def test_names_of_attributes_are_no_variables(monkeypatch):
    monkeypatch.setitem(globals(), "t", torch.ones(2))
    found = run_chain([lambda h: h.t().t(), nn.Tanh()], rows(), chunk_rows=4)
    globals()["t"].zero_()
    found.sum().backward()


def test_modules_that_are_replaced_are_noticed():
    changes = (
        lambda module: module.__setitem__(1, nn.Identity()),
        lambda module: parametrize.remove_parametrizations(module[0], "weight"),
    )
    for change in changes:
        module = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
        found = run_chain([module, nn.ReLU()], rows(), chunk_rows=4)
        change(module)
        with pytest.raises(RuntimeError, match="other modules in it"):
            found.sum().backward()
