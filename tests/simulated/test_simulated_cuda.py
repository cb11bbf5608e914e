"""The simulated device itself: it computes what the CPU does, and shows missing waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

MIB = 2**20


def train() -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.RReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        optimizer.zero_grad()
        target = torch.randint(0, 8, (16,))
        loss = nn.functional.cross_entropy(model(torch.randn(16, 32)), target)
        loss.backward()
        optimizer.step()
    return [loss.detach(), *(each.detach() for each in model.parameters())]


def test_late_kernels_compute_the_same_bits(simulated_cuda):
    expected = train()
    with simulated_cuda.kernels():
        found = train()
    simulated_cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert simulated_cuda.pool.num_reused > 0


def test_nothing_has_run_before_it_is_waited_for(simulated_cuda):
    x = torch.ones(8)
    with simulated_cuda.kernels():
        y = x + 1
        event = torch.cuda.current_stream().record_event()
        x.mul_(0)
    assert y.isnan().all() and x.sum() == 8 and not event.query()
    event.synchronize()
    assert (y == 2).all() and x.sum() == 8  # no further than the event
    with simulated_cuda.kernels():
        assert y.sum().item() == 16


@pytest.mark.parametrize("ordered", [True, False])
def test_streams_are_in_order_only_where_an_event_says_so(simulated_cuda, ordered):
    side = torch.cuda.Stream()
    with simulated_cuda.kernels():
        x = torch.ones(8) + 1
        if ordered:
            side.wait_stream(torch.cuda.current_stream())  # type: ignore[arg-type]
        with torch.cuda.stream(side):  # type: ignore[arg-type]
            y = x * 2
    side.synchronize()
    assert bool((y == 4).all()) == ordered


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_given_out_again_unless_its_users_are_known(simulated_cuda, recorded):
    side = torch.cuda.Stream()
    with simulated_cuda.kernels():
        x = torch.zeros(8) + 1
        side.wait_stream(torch.cuda.current_stream())  # type: ignore[arg-type]
        with torch.cuda.stream(side):  # type: ignore[arg-type]
            y = x * 2
            if recorded:
                x.record_stream(side)  # type: ignore[arg-type]
        del x
        other = torch.zeros(8) + 5
        torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert (other == 5).all()
    assert bool((y == 2).all()) == recorded


def test_a_copy_that_does_not_wait_needs_page_locked_memory(simulated_cuda):
    host = torch.zeros(8)
    with simulated_cuda.kernels():
        x = torch.ones(8) + 1
        with pytest.raises(AssertionError, match="page-locked"):
            host.copy_(x, non_blocking=True)
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 32, 1)  # type: ignore[union-attr]
        host.copy_(x, non_blocking=True)
    assert (host == 0).all()
    simulated_cuda.synchronize()
    assert (host == 2).all()


def test_an_operator_that_fails_is_an_error_at_the_next_wait(simulated_cuda):
    simulated_cuda.default_stream.launch(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="CUDA error"):
        simulated_cuda.synchronize()
