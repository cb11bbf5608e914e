"""GPU memory straight to the file, on a machine without a GPU: RAM plays the device.

`PlainFile` stands for kvikio's `CuFile`; extents, ledger and errors are the real ones.
"""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
import torch
from torch import nn

import penstock
from penstock.activations._cuda import GdsRoute
from penstock.errors import PenstockError, StoreReadError, StoreWriteError
from penstock.memory import ExtentFile, FileStore, Ledger, Link, Tier

MIB = 1024**2
CPU = torch.device("cpu")


class Done:
    def __init__(self, result: int | Exception) -> None:
        self.result = result

    def get(self) -> int:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class PlainFile:
    """Reads and writes as `kvikio.CuFile`, by buffered I/O; `outcome` replaces what it returns."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR)
        self.outcome: int | Exception | None = None

    def _view(self, buf: torch.Tensor, size: int) -> memoryview:
        return memoryview((ctypes.c_char * size).from_address(buf.data_ptr())).cast("B")

    def pwrite(self, buf, size, file_offset):
        moved = os.pwrite(self.fd, self._view(buf, size), file_offset)
        return Done(moved if self.outcome is None else self.outcome)

    def pread(self, buf, size, file_offset):
        moved = os.preadv(self.fd, [self._view(buf, size)], file_offset)
        return Done(moved if self.outcome is None else self.outcome)

    def close(self):
        os.close(self.fd)


class Ram:
    """Memory of a device that notes what was waited for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def mark(self, device):
        return "computed"

    def mark_again(self, ready):
        return ready

    def mark_part(self, ready, device):
        return ready

    def wait(self, ready, storage):
        self.waited.append(ready)

    def allocate(self, num_bytes, device, ready):
        assert ready == "computed"
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def route_to(store, ledger: Ledger) -> GdsRoute:
    file = ExtentFile(store)
    return GdsRoute(file, ledger, device_file=PlainFile(file.descriptor_path), memory=Ram())


def bytes_in(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def test_round_trip(store):
    ledger = Ledger()
    route = route_to(store, ledger)
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (MIB + 17, 5, 4096)]
    copies = [route.store(source.untyped_storage(), route.mark(CPU)) for source in sources]
    assert route._memory.waited == ["computed"] * 3
    assert ledger.resident(Tier.FILE) == ledger.moved(Link.DEVICE_TO_FILE) == MIB + 17 + 5 + 4096
    assert ledger.resident(Tier.HOST) == 0
    for _ in range(2):  # it stays stored
        for source, copy in zip(sources, copies, strict=True):
            storage, shift, token = route.load(copy, CPU)
            assert (shift, token) == (0, None)
            assert torch.equal(bytes_in(storage), source)
    for copy in copies:
        route.discard(copy)
    assert ledger.resident(Tier.FILE) == route._file.used_bytes == 0
    route.close()


@pytest.mark.parametrize("outcome", [17, RuntimeError("cuFile"), OSError(5, "EIO")])
def test_a_transfer_that_fails_is_an_error(store, outcome):
    ledger = Ledger()
    route = route_to(store, ledger)
    source = torch.zeros(MIB, dtype=torch.uint8).untyped_storage()
    copy = route.store(source, route.mark(CPU))
    route._device_file.outcome = outcome
    with pytest.raises(StoreWriteError, match="gpu_direct"):
        route.store(source, route.mark(CPU))
    assert route._file.used_bytes == ledger.resident(Tier.FILE) == MIB
    with pytest.raises(StoreReadError, match="offset 0"):
        route.load(copy, CPU)
    route.discard(copy)
    route.close()


def test_training_is_bit_equal(store):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        model = nn.Sequential(*layers)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(512, 64)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = run()
    offload = penstock.offload(store, policy="all", min_bytes="0B")
    offload._routes["cpu"].close()
    offload._routes["cpu"] = route_to(store, offload.ledger)
    with offload:
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.report().bytes_read > 0
    offload.close()


def test_without_a_gpu_it_is_refused(store):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="gpu_direct=True"):
        penstock.offload(FileStore(store, gpu_direct=True))


def test_without_kvikio_the_error_names_the_extra(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", None)
    file = ExtentFile(store)
    with pytest.raises(PenstockError, match=r"penstock\[gds\]"):
        GdsRoute.for_cuda(file, Ledger())
    file.close()
