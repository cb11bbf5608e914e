"""Rows of files from the disk, the page cache or a copy in memory: the same, and never old ones."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from penstock.errors import StoreReadError
from penstock.unified import empty, unify
from penstock.unified.file import _rows, _source
from penstock.unified.file import table as file_table
from penstock.unified.file import writer as file_writer
from penstock.unified.file._rows import RowReader
from penstock.unified.file.layout import open_layout

NUM_ROWS, WIDTH = 4096, 64  # 16 rows of 256 bytes in a page: 256 pages, of which 32 are an eighth
TABLE_BYTES = NUM_ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch):
    monkeypatch.setattr(_source, "_SECONDS_BETWEEN_CHECKS", 0.0)


@pytest.fixture
def folder(real_disk, tmp_path_factory) -> Path:
    """A directory on a real disk, where direct I/O works."""
    return tmp_path_factory.mktemp("tables")


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(NUM_ROWS * WIDTH, dtype=torch.float32).view(NUM_ROWS, WIDTH)


@pytest.fixture
def path(folder, table) -> Path:
    """The table in a file, which nobody has written to for a long time."""
    np.save(folder / "x.npy", table.numpy())
    os.utime(folder / "x.npy", (0, 0))
    return folder / "x.npy"


def rows_of_pages(num_pages: int, first: int = 0) -> torch.Tensor:
    """A row of each of so many pages, but for the header that moves rows a little."""
    return torch.arange(first, first + num_pages) * 16


def test_a_table_that_is_asked_for_an_eighth_of_its_pages_is_copied(path, table):
    u = unify(path)
    assert torch.equal(u[rows_of_pages(20)], table[rows_of_pages(20)])
    report = u.report()
    assert (report.reads, report.copy_bytes) == ("direct", 0)
    assert torch.equal(u[rows_of_pages(20, 100)], table[rows_of_pages(20, 100)])
    report = u.report()
    assert (report.reads, report.copy_bytes) == ("host copy", TABLE_BYTES)
    assert "host copy" in str(report)
    for index in (torch.randint(NUM_ROWS, (3, 500)), torch.tensor([-1, 0, -NUM_ROWS])):
        assert torch.equal(u[index], table[index])
    assert torch.equal(u[-5], table[-5]) and torch.equal(u[7:900:3], table[7:900:3])
    assert u.report().num_reads == report.num_reads  # nothing more from the disk
    with pytest.raises(IndexError, match=rf"index\[1\] is {NUM_ROWS}, but the table has"):
        u.gather_rows(torch.tensor([0, NUM_ROWS]))


def test_one_batch_that_asks_for_so_much_is_gathered_from_the_copy(path, table):
    u, index = unify(path), torch.randint(NUM_ROWS, (1000,))
    assert torch.equal(u[index], table[index])
    assert u.report().reads == "host copy"
    assert u.report().num_reads < 10  # long ones
    assert u.report().bytes_read < TABLE_BYTES + 10 * 8192  # each page once, but for their ends


@pytest.mark.parametrize("name", ["rows.npy", "rows", "rows.safetensors#b"])
@pytest.mark.parametrize("width", [1, 3, 250, 1024, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_copy_of_any_layout_has_all_rows(name, width, dtype, folder, monkeypatch):
    monkeypatch.setattr(_rows, "_PART_BYTES", 64 * 1024)  # so that there are several
    monkeypatch.setattr(_rows, "_BLOCK_BYTES", 64 * 1024)
    rows = torch.randint(-100, 100, (3001, width), dtype=dtype)
    file = folder / name.partition("#")[0]
    if name == "rows.npy":
        np.save(file, rows.numpy())
    elif name == "rows":
        unify(rows).save_rows(file)
    else:  # rows that begin anywhere
        safetensors.torch.save_file({"a": torch.zeros(7, dtype=torch.int8), "b": rows}, file)
    os.utime(file, (0, 0))
    u = unify(str(folder / name))
    assert torch.equal(u[torch.arange(3001)], rows)
    assert u.report().reads == "host copy"


def test_a_file_that_becomes_shorter_while_it_is_copied_is_an_error(path):
    reader = RowReader(open_layout(path))
    os.truncate(path, path.stat().st_size - 2 * 4096)
    with pytest.raises(StoreReadError, match=r"row 0 of .* the file has become shorter"):
        reader.read_table()


def test_the_same_rows_again_in_a_batch_are_no_reason_for_a_copy(path):
    u = unify(path)
    for _ in range(3):
        u[torch.arange(8).repeat(500)]
    assert u.report().reads == "direct" and u.report().copy_bytes == 0


@pytest.mark.parametrize("shape", [(900, 300), (40, 5000), (5000,), (700, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_of_any_shape_in_the_native_format(folder, shape, dtype):
    """Where there are gaps between the rows of the file."""
    rows = torch.randint(-100, 100, shape).to(dtype)
    u = empty(shape, dtype, path=folder / "table")
    for part in (torch.arange(shape[0] // 2), torch.arange(shape[0] // 2, shape[0])):
        u[part] = rows[part]
    order = torch.randperm(shape[0])
    for _ in range(2):
        assert torch.equal(u[order], rows[order])
    assert u.report().reads == "host copy"
    u[order[:9]] = -rows[order[:9]]
    rows[order[:9]] *= -1
    assert torch.equal(u[order], rows[order])
    assert torch.equal(unify(folder / "table", cache=0)[order], rows[order])


def test_a_tensor_of_several_in_a_file(folder, table):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(77), "x": table, "y": -table}, folder / "x.safetensors")
    index = torch.randint(NUM_ROWS, (2000,))
    x, y = (unify(f"{folder}/x.safetensors#{name}") for name in "xy")
    for _ in range(2):
        assert torch.equal(x[index], table[index]) and torch.equal(y[index], -table[index])
    x[index] = torch.zeros(2000, WIDTH)
    assert not x[index].any() and torch.equal(y[index], -table[index])
    assert x.report().reads == y.report().reads == "host copy"


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("missing", "reads"), [(0, "host copy"), (1, "page cache")])
def test_a_copy_takes_no_more_than_a_quarter_of_what_is_free(
    path, table, monkeypatch, missing, reads
):
    monkeypatch.setattr(_source, "available_ram", lambda: 4 * TABLE_BYTES - missing)
    u, index = unify(path), torch.randint(NUM_ROWS, (3000,))
    for _ in range(3):
        assert torch.equal(u[index], table[index])
    assert u.report().reads == reads


@pytest.fixture
def u_in_page_cache(path, monkeypatch):
    """A table too large for a copy, not for what is free."""
    monkeypatch.setattr(_source, "available_ram", lambda: 2 * TABLE_BYTES)
    u = unify(path)
    u[rows_of_pages(50)]
    assert u.report().reads == "direct"  # a fifth of its pages: too few
    u[rows_of_pages(20, 100)]
    assert u.report().reads == "page cache" and u.report().copy_bytes == 0
    return u


def test_a_larger_table_is_read_through_the_page_cache(u_in_page_cache, table, path):
    u = u_in_page_cache
    for index in (torch.randint(NUM_ROWS, (3, 500)), torch.tensor([-1, 0, -NUM_ROWS])):
        assert torch.equal(u[index], table[index])
    index = torch.randint(NUM_ROWS, (500,))
    u[index] = -table[index]
    table[index] *= -1
    everything = torch.arange(NUM_ROWS)
    assert torch.equal(u[everything[:-1]], table[:-1])
    assert torch.equal(unify(path, cache=0)[everything], table)
    with pytest.raises(IndexError, match=rf"index\[1\] is {NUM_ROWS}, but the table has"):
        u.gather_rows(torch.tensor([0, NUM_ROWS]))
    child = os.fork()
    if child == 0:  # the pages are those of all processes
        number = np.arange(0, NUM_ROWS, 3)
        is_right = np.array_equal(u[torch.from_numpy(number)].numpy(), table.numpy()[number])
        os._exit(0 if is_right and u.report().reads == "page cache" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    array = np.load(path, mmap_mode="r+")
    array[7] = 1234
    assert u[[7, 9]][:, 0].tolist() == [1234, table[9, 0]]


def test_the_page_cache_is_left_alone_when_memory_is_short(u_in_page_cache, table, monkeypatch):
    u, index = u_in_page_cache, torch.randint(NUM_ROWS, (100,))
    monkeypatch.setattr(_source, "available_ram", lambda: TABLE_BYTES // 2 - 1)
    assert torch.equal(u[index], table[index])
    assert u.report().reads == "direct"


def test_a_table_larger_than_what_is_free_stays_on_the_disk(path, table, monkeypatch):
    monkeypatch.setattr(_source, "available_ram", lambda: TABLE_BYTES - 1)
    u, index = unify(path), torch.randint(NUM_ROWS, (3000,))
    for _ in range(3):
        assert torch.equal(u[index], table[index])
    assert u.report().reads == "direct"


def test_processes_that_run_side_by_side_share_what_is_free(path, monkeypatch):
    monkeypatch.setattr(_source, "available_ram", lambda: 7 * TABLE_BYTES)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    u = unify(path)
    u[torch.arange(NUM_ROWS - 1)]
    assert u.report().reads == "page cache"


def test_limits_of_the_process_count(path, monkeypatch):
    """Of the memory that a process may map, a copy takes no more than of the machine's."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    if limit[0] != resource.RLIM_INFINITY:
        pytest.skip("there is a limit already")
    taken = _source._count_used_bytes("VmData")
    assert taken > 2**20
    most = taken + 2**30  # with room for what threads take
    monkeypatch.setattr(_source, "_count_used_bytes", lambda _: most - 3 * TABLE_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, limit[1]))
    try:
        u = unify(path)
        u[torch.arange(NUM_ROWS - 1)]
        found = u.report().reads
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    assert found == "page cache"


def test_the_copy_is_given_back_when_memory_is_short(path, table, monkeypatch):
    u, index = unify(path), torch.randint(NUM_ROWS, (1000,))
    u[index]
    assert u.report().reads == "host copy"
    monkeypatch.setattr(_source, "available_ram", lambda: TABLE_BYTES - 1)
    assert torch.equal(u[index], table[index])
    assert (u.report().reads, u.report().copy_bytes) == ("direct", 0)


def test_a_budget_for_rows_is_all_that_is_taken(path):
    everything = torch.arange(NUM_ROWS - 1)
    for cache in (0, "64KiB"):
        u = unify(path, cache=cache)
        with pytest.warns(UserWarning, match="is the name of the file, not its rows"):
            loaded = pickle.loads(pickle.dumps(u))
        for each in (u, unify(u), unify(u, device="cpu"), loaded):
            for _ in range(3):
                each[everything]
            assert each.report().reads == "direct" and each.report().copy_bytes == 0


def test_a_table_that_is_saved_is_not_kept(path, table, monkeypatch):
    """Each row is read once."""
    monkeypatch.setattr(file_table, "_BLOCK_BYTES", TABLE_BYTES // 16)
    made = []
    monkeypatch.setattr(_source.RowSource, "_make_copy", made.append)
    unify(path).save_rows(path.with_name("y"))
    assert not made and torch.equal(unify(path.with_name("y"), cache=0)[: NUM_ROWS - 1], table[:-1])


def test_a_copy_that_cannot_be_read_is_left_alone(path, table, monkeypatch):
    """A bad place of the disk is an error of the batches that ask for it, and of no other."""

    def fail(self):
        raise StoreReadError("bad", path=str(path), offset=0, errno=5)

    monkeypatch.setattr(RowReader, "read_table", fail)
    u, index = unify(path), torch.randint(NUM_ROWS, (1000,))
    for _ in range(3):
        assert torch.equal(u[index], table[index])
    assert u.report().reads == "direct"


# --------------------------------------------------------------------------- writers


@pytest.mark.parametrize("through", ["the same table", "another table"])
def test_what_this_process_writes_is_in_the_copy(path, table, through):
    u = unify(path)
    u[torch.arange(1000)]
    assert u.report().reads == "host copy"
    before = u.report().num_reads
    writer = u if through == "the same table" else unify(path)
    index = torch.randint(NUM_ROWS, (300,)).unique()
    writer[index] = -table[index]
    table[index] *= -1
    writer.index_add_(0, index[:5], torch.ones(5, WIDTH))
    table[index[:5]] += 1
    assert torch.equal(u[torch.arange(NUM_ROWS)[:-1]], table[:-1])
    assert torch.equal(torch.from_numpy(np.load(path)), table)
    if through == "another table":
        assert u.report().num_reads == before


def test_what_another_process_writes_ends_the_copy(path):
    u = unify(path)
    u[torch.arange(1000)]
    assert u.report().reads == "host copy"
    child = os.fork()
    if child == 0:
        try:
            array = np.load(path, mmap_mode="r+")
            array[1] = 5
            array.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.utime(path, (1, 1))  # what a mapping writes has its time only later
    assert u[[1, 2]][:, 0].tolist() == [5, 2 * WIDTH]
    assert u.report().reads == "direct"


def test_a_table_that_others_write_to_is_copied_ever_more_seldom(path):
    u, num_copies = unify(path), 0
    for number in range(1, 25):
        os.utime(path, (number, number))
        u[torch.arange(600)]
        num_copies += u.report().copy_bytes > 0
    assert 1 <= num_copies <= 5


def test_threads_read_whole_and_new_rows_beside_a_writer(path):
    """Rows have one value each, and never an older one than at the reader's last look."""
    u = unify(path)
    u[torch.arange(NUM_ROWS - 1)] = torch.zeros(NUM_ROWS - 1, WIDTH)
    wrong, is_over = [], threading.Event()

    def read(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        last = torch.zeros(NUM_ROWS)
        while not is_over.is_set():
            index = torch.randint(0, NUM_ROWS - 1, (700,), generator=random)
            rows = u[index]
            if (rows != rows[:, :1]).any() or (rows[:, 0] < last[index]).any():
                wrong.append(index)
            last[index] = rows[:, 0]

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    try:
        for value in range(1, 40):
            index = torch.randint(0, NUM_ROWS - 1, (300,)).unique()
            u[index] = torch.full((len(index), WIDTH), float(value))
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    assert not wrong and u.report().reads == "host copy"


# ------------------------------------------------------------------------- processes


def report_of_worker(path, queue) -> None:
    u = unify(path)
    u[torch.arange(NUM_ROWS - 1)]
    queue.put(u.report().reads)


def test_workers_make_no_copy_and_have_that_of_their_parent(path, table):
    """Each of many would have one; the page cache they share."""
    u, index = unify(path), np.arange(0, NUM_ROWS, 3)
    torch.arange(10**6).unique()  # has torch start its threads, which a child lacks
    child = os.fork()
    if child == 0:  # no operators of torch here: its threads are the parent's
        u[torch.from_numpy(index)]
        os._exit(0 if u.report().reads == "page cache" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    u[torch.arange(1000)]
    child = os.fork()
    if child == 0:
        rows = u[torch.from_numpy(index)].numpy()
        before = u.report().num_reads
        is_copy = u.report().reads == "host copy" and u.report().num_reads == before
        os._exit(0 if is_copy and np.array_equal(rows, table.numpy()[index]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=report_of_worker, args=(str(path), queue))
    worker.start()
    assert queue.get() == "page cache"
    worker.join()


def test_a_forked_child_sees_what_its_parent_writes_in_the_same_tick(path, monkeypatch):
    """Two writes that the file's time does not tell apart, one on each side of the fork."""
    u = unify(path)
    u[torch.arange(1000)]
    assert u.report().reads == "host copy"
    index, reader, writer = torch.tensor([5]), *os.pipe()
    u[index] = torch.ones(1, WIDTH)
    modified = os.stat(path).st_mtime_ns
    monkeypatch.setattr(file_writer, "TICK_NANOSECONDS", 60 * 10**9)  # a busy disk takes its time
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0 if (u[index].numpy() == 2).all() else 1)
    u[index] = torch.full((1, WIDTH), 2.0)
    os.utime(path, ns=(modified, modified))
    os.write(writer, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


def test_a_forked_child_has_no_copy_that_was_being_changed(path, table):
    u = unify(path)
    u[torch.arange(1000)]
    is_held, is_forked = threading.Event(), threading.Event()

    def change() -> None:
        with u._table.file.lock:
            u._table._source._copy[5, : WIDTH // 2] = -1.0
            is_held.set()
            is_forked.wait(20)
            u._table._source._copy[5] = table[5]

    other = threading.Thread(target=change)
    other.start()
    assert is_held.wait(20)
    child = os.fork()
    if child == 0:
        is_right = np.array_equal(u[torch.tensor([5])].numpy()[0], table.numpy()[5])
        os._exit(0 if is_right else 1)
    is_forked.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(u[5], table[5]) and u.report().reads == "host copy"
