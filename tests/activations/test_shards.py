"""DTensors leave and come back as plain tensors do: in a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from _waiting import nothing_is_held, wait_until

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

SHAPE = 64, 64
NUM_BYTES = 64 * 64 * 4


@pytest.fixture(scope="module")
def sharded() -> Iterator[Callable[[torch.Tensor], Any]]:
    """Return a function that makes a DTensor that requires a gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    whole = init_device_mesh("cpu", (1,)), [Replicate()]
    yield lambda tensor: DTensor.from_local(tensor, *whole, run_check=False).requires_grad_()
    dist.destroy_process_group()


def gradients_of(sharded: Callable[[torch.Tensor], Any]) -> list[torch.Tensor]:
    """Gradients of weights and an input, through views, a checkpoint, and a second derivative."""
    torch.manual_seed(0)
    x, *weights = [sharded(torch.randn(SHAPE)) for _ in range(4)]
    hidden = x * 1
    q, k, v = (nn.functional.linear(hidden, weight) for weight in weights)
    out = checkpoint(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, q, k, v, use_reentrant=False)
    (first,) = torch.autograd.grad((out * hidden.t()).square().mean(), x, create_graph=True)
    (first.square().sum() + out.sum()).backward()
    return [leaf.grad.to_local() for leaf in (x, *weights)]


@pytest.mark.parametrize("min_bytes", ["0B", "1MiB"])
@pytest.mark.parametrize("device_memory", [None, "32KiB"])
def test_gradients_are_bit_equal(sharded, store, min_bytes, device_memory):
    expected = gradients_of(sharded)
    offload = penstock.offload(
        store, policy="all", min_bytes=min_bytes, device_memory=device_memory
    )
    with offload:
        assert all(map(torch.equal, gradients_of(sharded), expected))
    report = offload.report()
    assert report.saved_bytes > 4 * NUM_BYTES
    assert (report.offloaded_bytes > 0) == (min_bytes == "0B" or device_memory is not None)
    assert "stay:" not in report.reason
    wait_until(lambda: nothing_is_held(offload))
    offload.close()


def test_a_storage_that_several_operators_save_leaves_once(sharded, store):
    x, weights = sharded(torch.randn(SHAPE)), [sharded(torch.randn(SHAPE)) for _ in range(2)]
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    with offload:
        hidden = x * 1
        first = hidden @ weights[0]
        other = (torch.randn(SHAPE, requires_grad=True) * 1).exp()
        wait_until(lambda: offload.report().bytes_written == 2 * NUM_BYTES)
        second = hidden.t() @ weights[1]
        assert offload.report().num_saved == 2
        (first.sum() + second.sum()).full_tensor().backward()
        other.sum().backward()
    assert offload.report().bytes_written == offload.report().saved_bytes == 2 * NUM_BYTES
    offload.close()


def test_a_change_in_place_is_found(sharded, store):
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    with offload:
        x = sharded(torch.randn(SHAPE))
        hidden = x * 1
        early = hidden.sin()
        hidden.add_(1)  # changes no version of the local part
        late = hidden.cos().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.sum().backward()
        del early
        (found,) = torch.autograd.grad(late, x)
    assert isinstance(found, DTensor)
    assert torch.equal(found.to_local(), -(x + 1).sin().to_local())
    offload.close()
