"""Threads that read and write one file, and what all tables of a process share."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.unified import empty, unify
from penstock.unified.file import writer as file_writer
from penstock.unified.file._rows import RowReader
from penstock.unified.optim import Adam


def saved(path: Path, shape: tuple[int, ...]) -> Path:
    np.save(path, np.zeros(shape, dtype=np.float32))
    os.utime(path, (0, 0))
    return path


def test_a_row_that_is_read_while_it_is_written_is_whole_and_not_kept_old(tmp_path, monkeypatch):
    """The reader is about to read the old row, and to keep it, when the writer comes."""
    u = unify(saved(tmp_path / "x.npy", (100, 8)), cache="1MiB")
    index = torch.tensor([5])
    reads, places, has_read = (threading.Event() for _ in range(3))
    overlaps = []
    place, gather = file_writer.write_places, RowReader.read_rows

    def gather_late(self, index, out, *, negative=False):
        reads.set()
        overlaps.append(places.wait(0.3))  # only if nothing keeps the writer from the file
        gather(self, index, out, negative=negative)
        has_read.set()

    def place_late(*arguments) -> None:
        places.set()
        has_read.wait(0.3)
        place(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RowReader, "read_rows", gather_late)
        patch.setattr(file_writer, "write_places", place_late)
        reader = threading.Thread(target=lambda: u[index])
        reader.start()
        assert reads.wait(20)
        u[index] = torch.ones(1, 8)
        reader.join()
    assert u[index].tolist() == [[1.0] * 8]
    assert overlaps == [False]


@pytest.mark.parametrize("through", ["the same table", "another table"])
def test_batches_pulled_ahead_leave_no_old_row_in_the_cache(real_disk, tmp_path_factory, through):
    """Histories of nodes: the next batches are on their way while rows of this one are pushed."""
    path = saved(tmp_path_factory.mktemp("tables") / "x.npy", (20_000, 64))
    u = unify(path, cache="8MiB")
    pushed = u if through == "the same table" else unify(path)
    truth, random = torch.zeros(20_000), torch.Generator().manual_seed(0)
    pending = []
    for step in range(1, 16):
        pending += [u.gather_rows_async(torch.randint(20_000, (2000,), generator=random))] * 2
        index = torch.randint(20_000, (1500,), generator=random).unique()
        pushed[index] = torch.full((len(index), 64), float(step))
        truth[index] = step
        while len(pending) > 6:
            pending.pop(0).wait()
    for each in pending:
        each.wait()
    everything = torch.arange(19_999)
    assert torch.equal(u[everything][:, 0], truth[:-1])
    assert torch.equal(torch.from_numpy(np.load(path))[:-1, 0], truth[:-1])


@pytest.mark.parametrize("folder", ["/dev/shm", "here"])
def test_threads_never_read_a_part_of_a_row(folder, tmp_path):
    """Memory file systems copy rows without a lock of their own."""
    if folder != "here" and not os.access(folder, os.W_OK):
        pytest.skip("there is no such directory")
    path = Path(folder) / f"penstock-rows-{os.getpid()}.npy" if folder != "here" else tmp_path / "x"
    u = empty((4000, 256), path=path) if folder == "here" else unify(saved(path, (4000, 256)))
    torn, is_over = [], threading.Event()

    def read(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        while not is_over.is_set():
            rows = u[torch.randint(0, 4000, (400,), generator=random)]
            torn.extend(rows[(rows != rows[:, :1]).any(1)].tolist())

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    try:
        for reader in readers:
            reader.start()
        for value in range(1, 60):
            index = torch.randint(0, 4000, (300,)).unique()
            u[index] = torch.full((len(index), 256), float(value))
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
        path.unlink()
    assert not torn


def test_rows_that_another_process_writes_leave_the_cache(tmp_path):
    u = unify(saved(tmp_path / "x.npy", (100, 4)), cache="1MiB")
    assert not u[[1, 2]].any()
    child = os.fork()
    if child == 0:
        try:
            array = np.load(tmp_path / "x.npy", mmap_mode="r+")
            array[1] = 5
            array.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.utime(tmp_path / "x.npy")  # what a mapping writes has its time only later
    assert u[[1, 2]][:, 0].tolist() == [5, 0]


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_tables_without_io_uring_share_a_few_threads(tmp_path, monkeypatch):
    original = RowReader.__init__

    def init(self, *arguments, **options) -> None:
        original(self, *arguments, **{**options, "ring": False})

    monkeypatch.setattr(RowReader, "__init__", init)
    before = num_threads()
    tables = [unify(empty((50, 16), path=tmp_path / f"{k}"), requires_grad=True) for k in range(8)]
    optimizer = Adam(tables, lr=0.1)
    sum(table[torch.arange(20)].sum() for table in tables).backward()
    optimizer.step()
    assert tables[0].report().method == "threads"
    assert num_threads() - before <= 16
    assert (tables[3].detach()[torch.arange(20)] != 0).all()


def test_a_process_has_few_handles_for_a_table(tmp_path):
    """One to read and one to write; a queue of reads is shared by all."""
    tables = [empty((50, 16), path=tmp_path / "first")]
    tables[0][[1]] = 1.0
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        tables.append(empty((50, 16), path=tmp_path / f"{number}"))
        tables[-1][[1]] = 1.0
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 20


def test_one_file_is_one_table_by_all_its_names(tmp_path):
    path = saved(tmp_path / "x.npy", (10, 4))
    os.symlink("x.npy", tmp_path / "y.npy")
    os.link(path, tmp_path / "z.npy")
    tables = [unify(tmp_path / name, cache="1MiB") for name in ("x.npy", "y.npy", "z.npy")]
    for number, table in enumerate(tables):
        assert [each[0][0].item() for each in tables] == [float(number)] * 3
        table[[0]] = number + 1.0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.npy", "y.npy", "z.npy"]
    assert file_writer.table_file(tables[0]._table.layout) is tables[2]._table.file


def test_an_optimizer_is_made_again_while_the_first_lives(tmp_path):
    table = unify(saved(tmp_path / "x.npy", (10, 4)), requires_grad=True)
    for _ in range(2):
        optimizers = [Adam([table], lr=0.1) for _ in range(2)]
        for optimizer in optimizers:
            optimizer.zero_grad()
            table[torch.tensor([1])].sum().backward()
            optimizer.step()
    assert unify(f"{table._table.source}.step")[0].item() == 4
