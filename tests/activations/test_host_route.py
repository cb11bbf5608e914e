"""Device, host and file on a machine without a GPU: RAM plays the device.

`MemoryCopies` stands for the CUDA streams; arena, budgets, spilling and reading by way of the
bounce slab are the real ones.
"""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from torch import nn

import penstock
from penstock.activations._host_route import HostRoute
from penstock.activations._routes import Declined
from penstock.memory import ExtentFile, Ledger, Link, Tier

MIB = 1024**2


class MemoryCopies:
    """`DeviceCopies` by memmove, which checks that its host memory is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.settled = 0

    def register(self, address, num_bytes):
        self.registered[address] = num_bytes

    def unregister(self, address):
        del self.registered[address]

    def mark(self, device):
        return threading.get_ident()

    def _check(self, address, num_bytes):
        assert any(
            start <= address and address + num_bytes <= start + size
            for start, size in self.registered.items()
        )

    def to_host(self, storage, address, ready):
        assert ready is not None
        self._check(address, storage.nbytes())
        ctypes.memmove(address, storage.data_ptr(), storage.nbytes())

    def allocate(self, num_bytes, device, ready):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def to_device(self, address, storage, start, end, ready):
        self._check(address, end - start)
        ctypes.memmove(storage.data_ptr() + start, address, end - start)
        return "copied"

    def finish(self, token):
        assert token == "copied"

    def settle(self, token):
        self.settled += 1


def storage_of(value: int, num_bytes: int) -> torch.UntypedStorage:
    return torch.full((num_bytes,), value, dtype=torch.uint8).untyped_storage()


def content(storage: torch.UntypedStorage, shift: int, num_bytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, shift, (num_bytes,), (1,))


def test_round_trip_through_the_host():
    ledger, copies = Ledger(), MemoryCopies()
    route = HostRoute(ledger, copies, file=None, host_memory=4 * MIB)
    device = torch.device("cpu")
    source = torch.randint(0, 256, (MIB + 17,), dtype=torch.uint8)
    copy = route.store(source.untyped_storage(), route.mark(device))
    storage, shift, token = route.load(copy, device)
    route.settle(token)
    assert torch.equal(content(storage, shift, MIB + 17), source)
    assert ledger.moved(Link.DEVICE_TO_HOST) == ledger.moved(Link.HOST_TO_DEVICE) == MIB + 17
    route.discard(copy)
    route.close()
    assert copies.registered == {}
    assert ledger.resident(Tier.HOST) == 0


def test_without_a_file_a_full_host_declines():
    route = HostRoute(Ledger(), MemoryCopies(), file=None, host_memory=4 * MIB)
    device = torch.device("cpu")
    held = [route.store(storage_of(i, MIB), route.mark(device)) for i in range(4)]
    with pytest.raises(Declined):
        route.store(storage_of(9, MIB), route.mark(device))
    route.discard(held.pop())
    held.append(route.store(storage_of(9, MIB), route.mark(device)))
    for copy in held:
        route.discard(copy)
    route.close()


def test_a_full_host_moves_its_oldest_to_the_file(store):
    ledger = Ledger()
    file = ExtentFile(store)
    route = HostRoute(ledger, MemoryCopies(), file=file, host_memory=8 * MIB)
    device = torch.device("cpu")
    held = [route.store(storage_of(i, MIB + 5), route.mark(device)) for i in range(20)]
    assert ledger.peak(Tier.HOST) <= 8 * MIB
    assert held[0].spans and not held[-1].spans
    assert ledger.moved(Link.HOST_TO_FILE) >= 12 * MIB
    for value, copy in reversed(list(enumerate(held))):
        storage, shift, token = route.load(copy, device)
        route.settle(token)
        assert (content(storage, shift, MIB + 5) == value).all()
        route.discard(copy)
    assert ledger.peak(Tier.HOST) <= 8 * MIB
    assert ledger.moved(Link.FILE_TO_HOST) == ledger.moved(Link.HOST_TO_FILE)
    assert ledger.resident(Tier.FILE) == 0
    route.close()


@pytest.mark.parametrize("with_file", [True, False], ids=["file", "host only"])
def test_training_over_three_tiers_is_bit_equal(store, with_file):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 4)
        for _ in range(3):
            model(torch.randn(512, 256)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = run()
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    file = ExtentFile(store) if with_file else None
    copies = MemoryCopies()
    route = HostRoute(offload.ledger, copies, file=file, host_memory=2 * MIB)
    offload._routes["cpu"].close()
    offload._routes["cpu"] = route
    with offload:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    report = offload.report()
    assert report.peak_host_bytes <= 2 * MIB
    assert (Link.HOST_TO_FILE.value in report.moved_bytes) == with_file
    assert copies.settled > 0
    offload.close()
