"""Host memory that CUDA knows: once, refused without harm, let go of after the last kernel.

The runtime is a simulated one, which records what it is asked.
"""

from __future__ import annotations

import gc
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.memory import pinned
from penstock.unified import unify
from penstock.unified.device import _registration
from penstock.unified.device._registration import MemoryUse, StreamUses
from penstock.unified.device.table import DeviceTable
from penstock.unified.host import memory as host_memory
from penstock.unified.host.memory import TableMemory
from simulated_cuda import SimulatedCuda

GPU = torch.device("cuda", 0)
PAGE = 4096


@pytest.fixture
def runtime(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    forgotten = lambda device: simulated_cuda.calls.append(("clear error", device))  # noqa: E731
    monkeypatch.setattr(pinned, "_clear_last_error", forgotten)
    monkeypatch.setattr(_registration, "find_numa_node", lambda _: None)
    return simulated_cuda


def use_of(memory: TableMemory) -> MemoryUse:
    return MemoryUse(memory.tensor((memory.num_bytes,), torch.uint8), memory)


def test_memory_is_shared_and_registered_once_in_whole_pages(runtime):
    memory = TableMemory(3 * PAGE + 5)
    use = use_of(memory)
    assert use.is_registered is None
    assert use.register(GPU) and use.register(GPU) and use.is_registered
    assert runtime.calls == [("register", memory.address, 4 * PAGE, 1)]
    assert memory.descriptor is not None


def test_tables_over_one_memory_share_its_registration(runtime):
    u = unify(torch.ones(100, 8))
    table = u._table
    views = [table, table.view_from(torch.device("cpu"), None)]
    assert all(view.use.register(GPU) for view in views)
    assert views[0].use is views[1].use
    assert len(runtime.calls) == 1


def test_nothing_is_registered_for_no_bytes(runtime):
    assert use_of(TableMemory(0)).register(GPU)
    gc.collect()
    assert runtime.calls == []


def test_a_refusal_is_said_once_forgotten_by_cuda_and_remembered(runtime, caplog):
    runtime.code = 2
    use = use_of(TableMemory(PAGE))
    with caplog.at_level(logging.INFO, logger="penstock"):
        assert not use.register(GPU)
        assert not use.register(GPU)
    assert [call[0] for call in runtime.calls] == ["register", "clear error"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "refused to register 4.00 KiB of host memory: CUDA error 2." in caplog.text
    assert "ulimit -l" in caplog.text
    del use
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register", "clear error"]


def test_memory_that_cannot_be_moved_is_a_refusal_too(runtime, caplog, monkeypatch):
    monkeypatch.setattr(host_memory, "advise", lambda *_: 28)  # no page can be had
    with caplog.at_level(logging.INFO, logger="penstock"):
        assert not use_of(TableMemory(PAGE)).register(GPU)
    assert "could not be moved into shared memory" in caplog.text
    assert "No space left" in caplog.text and runtime.calls == []


def test_memory_is_unregistered_after_its_last_reader_and_writer(runtime):
    memory = TableMemory(PAGE)
    address, content = memory.address, memory.tensor((PAGE,), torch.uint8)
    use = use_of(memory)
    assert use.register(GPU)
    first, second = (runtime.Stream(name=each) for each in ("first", "second"))
    for stream in (first, first, second):
        use.reads.record(stream)
    use.writes.record(first)
    use.exported.add(GPU)
    del memory, use
    gc.collect()
    assert runtime.calls[1:] == [
        ("wait", ("first", 2)),
        ("wait", ("second", 1)),
        ("wait", ("first", 3)),
        ("synchronize", GPU),
        ("unregister", address),
    ]
    content.fill_(1)  # still mapped


def test_memory_of_a_captured_graph_stays(runtime, monkeypatch):
    monkeypatch.setattr(DeviceTable, "_is_capturing", lambda table: True)
    monkeypatch.setattr(DeviceTable, "_current_stream", lambda table: None)
    u = unify(torch.ones(10, 4))
    table = u._table.device_table(GPU)
    for _ in range(2):
        with table.alias_access(u.detach()):
            pass
    del u, table
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]
    assert len(_registration.captured) == 1
    _registration.captured.clear()
    gc.collect()
    assert runtime.calls[-1][0] == "unregister"


def test_a_forked_child_unregisters_nothing(runtime, monkeypatch):
    memory = TableMemory(PAGE)
    use = use_of(memory)
    assert use.register(GPU)
    use.reads.record(runtime.Stream(name="parent's"))
    with monkeypatch.context() as patch:
        patch.setattr(_registration.os, "getpid", lambda: -1)
        use.reads.wait()
        del memory, use
        gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]


def test_at_the_interpreters_end_nothing_is_unregistered(runtime):
    memory = TableMemory(PAGE)
    assert use_of(memory).register(GPU)
    finalizers = [each for each in registration_finalizers(memory) if not each.atexit]
    assert len(finalizers) == 1


def registration_finalizers(memory: TableMemory) -> list:
    import weakref

    return [each for each in weakref.finalize._registry if each.peek()[0] is memory]


def test_a_stream_comes_after_what_others_have_launched(runtime):
    uses, reader, writer = (
        StreamUses(),
        runtime.Stream(name="reader"),
        runtime.Stream(name="writer"),
    )
    uses.record(reader)
    uses.record(writer)
    uses.make_wait(writer)  # not after itself: a stream is in order
    assert runtime.calls == [("writer after", ("reader", 1))]


def test_the_cpu_waits_for_those_that_it_would_disturb(runtime):
    u, index = unify(torch.zeros(10, 4)), torch.tensor([1, 2])
    use = u._table.use
    assert use.register(GPU)
    use.reads.record(runtime.Stream(name="reader"))
    use.writes.record(runtime.Stream(name="writer"))
    after_reader, after_writer = ("wait", ("reader", 1)), ("wait", ("writer", 1))
    reads = (lambda: u[index], lambda: u.cpu(), lambda: pickle.dumps(u))
    writes = (
        lambda: u.index_add_(0, index, torch.ones(2, 4)),
        lambda: u.__setitem__(index, torch.ones(2, 4)),
    )
    for operations, expected in ((reads, {after_writer}), (writes, {after_reader, after_writer})):
        for operation in operations:
            runtime.calls.clear()
            operation()
            assert set(runtime.calls) == expected


def test_an_alias_without_an_owner_keeps_the_memory(runtime):
    memory = TableMemory(2 * PAGE)
    content = memory.tensor((2 * PAGE,), torch.uint8)
    content.copy_(torch.randint(0, 256, (2 * PAGE,), dtype=torch.uint8))
    assert use_of(memory).register(GPU)
    alias = _registration.make_alias(memory, torch.device("cpu"))
    assert alias.data_ptr() == memory.address and torch.equal(alias, content)
    view = alias.view(torch.bfloat16).view(64, -1)[3:]
    del memory, alias
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register"]
    del view
    gc.collect()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]


@pytest.mark.parametrize(("content", "node"), [("1\n", 1), ("-1\n", None), ("?", None)])
def test_the_node_of_a_gpu_is_what_sys_says(content, node, tmp_path: Path, monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xAB, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device = tmp_path / "0000:ab:03.0"
    device.mkdir()
    (device / "numa_node").write_text(content)
    assert _registration.find_numa_node(GPU, tmp_path) == node
    properties.pci_bus_id = 1
    assert _registration.find_numa_node(GPU, tmp_path) is None


def test_pages_come_from_the_gpus_node_or_it_is_said_that_they_do_not(monkeypatch, caplog):
    monkeypatch.setattr(_registration, "find_numa_node", lambda _: 0)
    with caplog.at_level(logging.INFO, logger="penstock"):
        with _registration._prefer_node_of(GPU):
            torch.zeros(1000)
    assert "NUMA node 0, next to cuda:0" in caplog.text
