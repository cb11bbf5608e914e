"""Device, host and file on a machine without a GPU: RAM plays the device.

The CUDA runtime is simulated: copies and kernels are as late as they can be. Everything above it
is the real thing.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.activations._cuda import CudaCopies
from penstock.activations._host_route import HostRoute
from penstock.activations._routes import Declined
from penstock.memory import ExtentFile, Ledger, Link, Tier

MIB = 1024**2


def storage_of(value: int, num_bytes: int) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def content(storage: torch.UntypedStorage, shift: int, num_bytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, shift, (num_bytes,), (1,))


def test_round_trip_through_the_host(simulated_cuda):
    ledger = Ledger()
    route = HostRoute(ledger, CudaCopies(), file=None, host_memory=4 * MIB)
    device = torch.device("cpu")
    source = torch.randint(0, 256, (MIB + 17,), dtype=torch.uint8)
    copy = route.store(source.untyped_storage(), route.mark(device))
    storage, shift, token = route.load(copy, device)
    assert not torch.equal(content(storage, shift, MIB + 17), source)  # only what waits sees it
    route.settle(token, storage)
    simulated_cuda.current_stream().synchronize()
    assert torch.equal(content(storage, shift, MIB + 17), source)
    assert ledger.moved(Link.DEVICE_TO_HOST) == ledger.moved(Link.HOST_TO_DEVICE) == MIB + 17
    route.discard(copy)
    route.close()
    assert simulated_cuda.registered == {}
    assert ledger.resident(Tier.HOST) == 0


def test_without_a_file_a_full_host_declines(simulated_cuda):
    route = HostRoute(Ledger(), CudaCopies(), file=None, host_memory=4 * MIB)
    device = torch.device("cpu")
    held = [route.store(storage_of(i, MIB), route.mark(device)) for i in range(4)]
    with pytest.raises(Declined):
        route.store(storage_of(9, MIB), route.mark(device))
    route.discard(held.pop())
    held.append(route.store(storage_of(9, MIB), route.mark(device)))
    for copy in held:
        route.discard(copy)
    route.close()


def test_a_full_host_moves_its_oldest_to_the_file(store, simulated_cuda):
    ledger = Ledger()
    file = ExtentFile(store)
    route = HostRoute(ledger, CudaCopies(), file=file, host_memory=8 * MIB)
    device = torch.device("cpu")
    held = [route.store(storage_of(i, MIB + 5), route.mark(device)) for i in range(20)]
    assert ledger.peak(Tier.HOST) <= 8 * MIB
    assert held[0].spans and not held[-1].spans
    assert ledger.moved(Link.HOST_TO_FILE) >= 12 * MIB
    for value, copy in reversed(list(enumerate(held))):
        storage, shift, token = route.load(copy, device)
        route.settle(token, storage)
        simulated_cuda.current_stream().synchronize()
        assert (content(storage, shift, MIB + 5) == value).all()
        route.discard(copy)
    assert ledger.peak(Tier.HOST) <= 8 * MIB
    assert ledger.moved(Link.FILE_TO_HOST) == ledger.moved(Link.HOST_TO_FILE)
    assert ledger.resident(Tier.FILE) == 0
    route.close()


@pytest.mark.parametrize("with_file", [True, False], ids=["file", "host only"])
def test_training_over_three_tiers_is_bit_equal(store, with_file, simulated_cuda):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 4)
        for _ in range(3):
            model(torch.randn(512, 256)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = run()
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    file = ExtentFile(store) if with_file else None
    route = HostRoute(offload.ledger, CudaCopies(), file=file, host_memory=2 * MIB)
    offload._routes["cpu"].close()
    offload._routes["cpu"] = route
    with offload, simulated_cuda.kernels():
        found = run()
    simulated_cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    report = offload.report()
    assert report.peak_host_bytes <= 2 * MIB
    assert (Link.HOST_TO_FILE.value in report.moved_bytes) == with_file
    offload.close()
