"""From a GPU to pinned host memory, to the file, and back; needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.memory import FileStore, Link

pytestmark = pytest.mark.gpu

HIDDEN = 1024
MIB = 1024**2


def model_of(num_layers: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = []
    for _ in range(num_layers):
        layers.append(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN)))
    return nn.Sequential(*layers).to("cuda", dtype)


def train(model: nn.Module, num_steps: int = 4, batch: int = 2048) -> list[torch.Tensor]:
    """Losses and last gradients of a few seeded steps."""
    parameter = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for _ in range(num_steps):
        x = torch.randn(batch, HIDDEN, device="cuda", generator=generator, dtype=parameter.dtype)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    return [*results, *[parameter.grad.clone() for parameter in model.parameters()]]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["all", "auto"])
@pytest.mark.parametrize("with_file", [False, True])
def test_training_is_bit_equal(store, policy, dtype, with_file):
    expected = train(model_of(dtype=dtype))
    offload = penstock.offload(
        store if with_file else None,
        host_memory=64 * MIB if with_file else None,
        policy=policy,
    )
    with offload:
        found = train(model_of(dtype=dtype))
    assert_equal(found, expected)
    report = offload.report()
    assert report.device == "cuda"
    assert report.offloaded_bytes > 0
    assert report.moved_bytes[Link.DEVICE_TO_HOST.value] > 0
    if with_file:
        assert report.peak_host_bytes <= 64 * MIB
        if policy == "all":
            assert report.moved_bytes[Link.HOST_TO_FILE.value] > 0
    offload.close()


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_training_past_host_memory_is_bit_equal(store, policy):
    pytest.importorskip("kvikio", reason="GPUDirect Storage needs it")
    expected = train(model_of())
    offload = penstock.offload(FileStore(store, gpu_direct=True), policy=policy)
    with offload:
        assert_equal(train(model_of()), expected)
    moved = offload.report().moved_bytes
    assert moved[Link.DEVICE_TO_FILE.value] > 0
    assert Link.DEVICE_TO_HOST.value not in moved
    offload.close()


def test_everything_leaves_and_the_peak_falls():
    def peak(offload) -> int:
        model = model_of(24)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if offload is None:
            train(model, batch=16384)
        else:
            with offload:
                train(model, batch=16384)
        return torch.cuda.max_memory_allocated() - before

    stock = peak(None)
    offload = penstock.offload(policy="all", device_memory="512MiB")
    offloaded = peak(offload)
    report = offload.report()
    assert report.offloaded_bytes >= 0.85 * report.saved_bytes
    assert offloaded <= 0.6 * stock
    offload.close()


@pytest.mark.parametrize("fraction", [2, 4])
def test_the_device_budget_holds(fraction):
    model = model_of()
    probe = penstock.offload(policy="all", min_bytes="1GiB")
    with probe:
        expected = train(model_of(), num_steps=1)
    budget = probe.report().saved_bytes // fraction
    offload = penstock.offload(device_memory=budget, policy="all", min_bytes="64KiB")
    with offload:
        found = train(model, num_steps=1)
    assert_equal(found, expected)
    assert offload.report().peak_device_bytes <= budget + 2048 * HIDDEN * 4
    offload.close()


def test_a_full_host_without_a_file_keeps_the_rest():
    expected = train(model_of())
    offload = penstock.offload(host_memory="32MiB", policy="all")
    with offload:
        assert_equal(train(model_of()), expected)
    report = offload.report()
    assert report.peak_host_bytes <= 32 * MIB
    assert report.num_kept > 0
    offload.close()


def test_a_stream_that_is_not_the_default():
    expected = train(model_of())
    offload = penstock.offload(policy="all")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), offload:
        found = train(model_of())
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(found, expected)
    offload.close()


def test_retain_graph_double_backward_and_abandoned_graphs():
    offload = penstock.offload(policy="all", min_bytes="0B")
    x = torch.randn(512, 512, device="cuda", requires_grad=True)

    def second_order() -> torch.Tensor:
        loss = (x * 1.0).sin().exp().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(loss, x, retain_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    expected = second_order()
    with offload:
        for _ in range(3):
            assert torch.equal(second_order(), expected)
            (x * 1.0).exp().sum()
    offload.close()


def test_compiled_layers():
    expected = train(model_of())
    model = model_of()
    for layer in model.children():
        layer.compile()
    offload = penstock.offload(policy="all")
    with offload:
        found = train(model)
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-4)
    offload.close()


def test_bandwidth_of_the_copies_is_in_the_ledger():
    offload = penstock.offload(policy="all")
    with offload:
        train(model_of(), num_steps=2)
    moved = offload.report().moved_bytes
    assert moved[Link.DEVICE_TO_HOST.value] == offload.report().bytes_written
    offload.close()
