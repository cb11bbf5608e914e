"""One table in several processes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.errors import CapacityError
from penstock.unified import UnifiedTensor, _table, unify
from penstock.unified._devices import gather_threads
from penstock.unified.host import memory as host_memory


class Rows(Dataset):
    """Rows of a table, each with the process that gathered it."""

    def __init__(self, table: UnifiedTensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        return self.table[torch.tensor([at])][0], os.getpid()


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers_read_the_same_table(method, kind, tmp_path):
    rows = torch.arange(40.0).view(20, 2)
    if kind == "file":
        np.save(tmp_path / "x.npy", rows.numpy())
    table = unify(tmp_path / "x.npy" if kind == "file" else rows)
    loader = DataLoader(Rows(table), batch_size=5, num_workers=2, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(torch.cat([found for found, _ in batches]), rows)
    processes = {int(process) for _, owners in batches for process in owners}
    assert len(processes) == 2 and os.getpid() not in processes


def add_one(table: UnifiedTensor) -> None:
    table.index_add_(0, torch.arange(len(table)), torch.ones_like(table.cpu()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_child_writes_its_parent_sees(method):
    context = torch.multiprocessing.get_context(method)
    table = unify(torch.zeros(8, 4))
    if method == "fork":  # nothing is sent that way
        table.share_memory_()
    child = context.Process(target=add_one, args=(table,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(table.cpu(), torch.ones(8, 4))


@pytest.mark.parametrize("num_rows", [0, 1, 1024, 40_000])
def test_a_table_moves_into_shared_memory_where_it_is(num_rows, monkeypatch):
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 1 << 20)  # several chunks
    content = torch.randn(num_rows, 17)
    table = unify(content)
    plain, address = table.cpu(), table.data_ptr()
    assert not table.is_shared()
    assert table.share_memory_() is table and table.share_memory_() is table
    assert table.is_shared() and table.data_ptr() == address
    assert torch.equal(plain, content) and torch.equal(table.cpu(), content)
    table.zero_()
    assert not plain.any()


def test_sharing_without_memory_says_so(monkeypatch):
    advise = host_memory.advise

    def full(address: int, num_bytes: int, advice: int) -> int:
        """Have no pages."""
        populates = advice == host_memory.MADV_POPULATE_WRITE
        return errno.ENOSPC if populates else advise(address, num_bytes, advice)

    table = unify(torch.ones(5, 5))
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "advise", full)
        with pytest.raises(CapacityError, match="No space left"):
            table.share_memory_()
    assert torch.equal(table.cpu(), torch.ones(5, 5))
    assert table.share_memory_().is_shared()


def test_descriptors_and_mappings_end_with_the_table():
    def counted() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), maps.read().count("penstock-table")

    unify(torch.zeros(4, 4)).share_memory_()  # what is opened once stays open
    before = counted()
    for _ in range(20):
        table = unify(torch.zeros(1000, 4)).share_memory_()
        plain = table.cpu()
        del table
        assert not plain.any()  # the memory lives as long as a tensor over it
        del plain
    assert counted() == before


def run_in_fork(work: Callable[[], bool]) -> bool:
    """Return what a function returns in a forked child, which has 20 seconds for it."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        is_right = False
        try:
            is_right = work()
        finally:
            os._exit(0 if is_right else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_child_that_is_forked_while_a_thread_counts_a_batch_does_not_hang(kind, tmp_path):
    rows = np.arange(40, dtype=np.float32).reshape(20, 2)
    np.save(tmp_path / "x.npy", rows)
    table, index = unify(tmp_path / "x.npy" if kind == "file" else rows), torch.tensor([3, 1])
    with _table._counting:
        assert run_in_fork(lambda: table[index].tolist() == [[6, 7], [2, 3]])
    if kind == "memory":
        with host_memory._sharing:
            assert run_in_fork(lambda: table.share_memory_().is_shared())


def test_a_forked_child_copies_rows_without_the_threads_of_its_parent():
    table, index = unify(torch.zeros(1000, 64)), torch.arange(1000)
    ones, threads = torch.ones(1000, 64), torch.get_num_threads()

    def work() -> bool:
        table.index_copy_(0, index, ones)
        table.index_add_(0, index, ones)
        return table.gather_rows(index).numpy().min() == 2

    torch.set_num_threads(2)
    try:
        table.gather_rows(index)
        assert run_in_fork(work)
    finally:
        torch.set_num_threads(threads)


def test_rows_that_a_thread_of_the_parent_gathers_are_gathered_in_a_forked_child():
    table, is_forked = unify(torch.arange(40.0).view(20, 2)), threading.Event()
    held = [gather_threads(os.getpid()).submit(is_forked.wait, 20) for _ in range(2)]
    pending = table.gather_rows_async(torch.tensor([3, 1]))
    assert run_in_fork(lambda: pending.done() and pending.wait().tolist() == [[6, 7], [2, 3]])
    is_forked.set()
    assert all(each.result() for each in held)
    assert pending.wait().tolist() == [[6, 7], [2, 3]]
