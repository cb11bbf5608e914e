"""Offloading from a device whose kernels and copies are as late as CUDA allows."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
from torch import nn

import penstock
from _waiting import wait_until_written
from penstock.activations._cuda import CudaCopies
from penstock.activations._host_route import HostRoute
from penstock.activations._policy import SavedEntry
from penstock.activations._record import Record
from penstock.errors import StoreReadError
from penstock.memory import ExtentFile, Ledger, Tier

pytestmark = pytest.mark.usefixtures("one_thread")
MIB = 2**20
CPU = torch.device("cpu")


@contextlib.contextmanager
def offloading(store, *, host_memory=64 * MIB, file=None, min_bytes="0B", **options):
    """An `Offload` that takes this thread's tensors for the device's."""
    offload = penstock.offload(store, min_bytes=min_bytes, **{"policy": "all", **options})
    offload._routes["cpu"].close()
    offload._routes["cpu"] = HostRoute(
        offload.ledger, CudaCopies(), file=file, host_memory=host_memory
    )
    with offload:
        yield offload
    offload.close()


def with_noise() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(4096, requires_grad=True)
    y = nn.functional.rrelu(x * 2, training=True).sum()
    for _ in range(8):
        y = y.sin()
    return torch.autograd.grad(y, x)[0]


@pytest.mark.parametrize("budget", [None, "4KiB"])
def test_what_its_operator_fills_leaves_after_it(store, simulated_cuda, budget):
    """`rrelu` fills its noise, which it has saved before."""
    expected = with_noise()
    with (
        offloading(store, device_memory=budget, min_bytes="4KiB") as offload,
        simulated_cuda.kernels(),
    ):
        found = with_noise()  # the copies of small tensors would have the noise computed
        simulated_cuda.synchronize()
        assert torch.equal(found, expected)
        assert offload.report().offloaded_bytes > 4096 * 4


def test_what_its_operator_fills_leaves_after_it_on_the_cpu_too(store):
    expected = with_noise()
    with penstock.offload(store, device_memory=1, min_bytes=0) as offload:
        for _ in range(5):
            assert torch.equal(with_noise(), expected)
    offload.close()


def test_parts_of_one_storage_leave_after_the_last_of_them(simulated_cuda):
    """A token orders a transfer with what one stream has computed until then."""
    route = HostRoute(Ledger(), CudaCopies(), file=None, host_memory=MIB)
    first, second, third = torch.zeros(96).unsafe_chunk(3)
    record = Record(first, first.untyped_storage(), route, True, SavedEntry(384, 0.0, True))
    record.ready = before = route.mark(CPU)
    assert record.take(second)
    assert record.ready[0] is before[0] and record.ready[1] is not before[1]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[arg-type]
        assert not record.take(third)
    assert record.describes(first) and record.describes(second) and not record.describes(third)
    route.close()


def test_memory_of_another_stream_is_not_given_out_before_its_kernels_have_run(
    store, simulated_cuda
):
    side = torch.cuda.Stream()
    with offloading(store) as offload, simulated_cuda.kernels():
        x = torch.full((4096,), 0.5, requires_grad=True)
        y = x * 1  # on the first stream
        side.wait_stream(torch.cuda.current_stream())  # type: ignore[arg-type]
        with torch.cuda.stream(side):  # type: ignore[arg-type]
            z = y.sin()  # saves y
        del y
        wait_until_written(offload)  # it has left, and is free
        others = [torch.zeros(4096) + 7 for _ in range(4)]
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert torch.equal(z.detach(), x.detach().sin())
        del others, z


def test_after_a_read_that_failed_no_copy_is_under_way(store, simulated_cuda, monkeypatch):
    file = ExtentFile(store)
    route = HostRoute(Ledger(), CudaCopies(), file=file, host_memory=2 * MIB)
    content = torch.randint(0, 256, (MIB,), dtype=torch.uint8)
    copy = route.store(content.untyped_storage(), route.mark(CPU))
    assert route._next_victim() is copy
    route._spill(copy)
    assert len(copy.spans) > 2
    load, num_loads = file.load, iter(range(100))

    def fail(*args):
        if next(num_loads) == 2:
            raise StoreReadError("gone", path="", offset=0)
        load(*args)

    monkeypatch.setattr(file, "load", fail)
    with pytest.raises(StoreReadError, match="gone"):
        route.load(copy, CPU)
    copying = route._copies._stream(CPU, "in")  # type: ignore[attr-defined]
    assert not copying.operations
    storage, _, token = route.load(copy, CPU)
    route.settle(token, storage)
    simulated_cuda.current_stream().synchronize()
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(storage), content)
    route.discard(copy)
    route.close()


def test_with_a_file_a_storage_waits_for_those_that_are_arriving(store, simulated_cuda):
    """All host memory is in copies under way: that is no reason to keep the next storage."""
    route = HostRoute(Ledger(), CudaCopies(), file=ExtentFile(store), host_memory=2 * MIB)
    arriving, go = threading.Event(), threading.Event()

    def hold() -> None:
        arriving.set()
        assert go.wait(20)

    kept = []

    def save(value: int) -> None:
        storage = torch.full((MIB,), value, dtype=torch.uint8).untyped_storage()
        kept.append(route.store(storage, route.mark(CPU)))

    simulated_cuda.default_stream.launch(hold)
    threads = [threading.Thread(target=save, args=(value,)) for value in range(2)]
    threads[0].start()
    assert arriving.wait(20)
    threads[1].start()
    time.sleep(0.05)
    go.set()
    for thread in threads:
        thread.join(20)
    assert len(kept) == 2
    for copy in kept:
        route.discard(copy)
    route.close()


def test_discarding_waits_neither_for_the_file_nor_for_the_device(
    store, simulated_cuda, monkeypatch
):
    """It is called with the lock that all threads need."""
    ledger, file = Ledger(), ExtentFile(store)
    route = HostRoute(ledger, CudaCopies(), file=file, host_memory=8 * MIB)
    storages = [torch.full((MIB,), n, dtype=torch.uint8).untyped_storage() for n in range(2)]
    moving, reading = (route.store(each, route.mark(CPU)) for each in storages)
    writing, go = threading.Event(), threading.Event()
    write = file.store

    def slow(*args):
        writing.set()
        assert go.wait(20)
        return write(*args)

    monkeypatch.setattr(file, "store", slow)
    assert route._next_victim() is moving
    thread = threading.Thread(target=route._spill, args=(moving,))
    thread.start()
    assert writing.wait(20)
    route.discard(moving)  # while it is written
    held = threading.Event()
    simulated_cuda.default_stream.launch(lambda: held.wait(20))  # the device is busy
    storage, _, token = route.load(reading, CPU)
    route.discard(reading)  # while the device reads it
    assert thread.is_alive() and not token[1].query()
    assert reading.buffer is not None
    go.set()
    held.set()
    thread.join(20)
    route.settle(token, storage)
    simulated_cuda.synchronize()
    assert (torch.empty(0, dtype=torch.uint8).set_(storage) == 1).all()
    assert ledger.resident(Tier.FILE) == file.used_bytes == 0
    route.close()
    assert ledger.resident(Tier.HOST) == 0
