"""Gradients of chains in chunks: those that are none, of 16 bits, of other shapes, and hooked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.iomodel import run_chain

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
