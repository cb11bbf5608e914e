"""Tables in files: the rows that were written, or an error that says why not."""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from penstock.errors import StoreReadError, StoreUnavailableError, WholeTableError
from penstock.unified import UnifiedTensor, empty, unify
from penstock.unified.file import _rows
from penstock.unified.file._rows import RowReader
from penstock.unified.file.layout import create, open_layout


@pytest.fixture
def folder(real_disk, tmp_path_factory) -> Path:
    """A directory on a real disk, where direct I/O works."""
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(params=["io_uring", "threads", "python"])
def reader_of(request, monkeypatch):
    """Makes readers of each kind; io_uring only where the kernel allows it."""
    if request.param == "python":
        monkeypatch.setattr(_rows, "get_library", lambda: None)
    readers = []

    def make(path) -> RowReader:
        reader = RowReader(open_layout(path), ring=request.param == "io_uring")
        readers.append(reader)
        if reader.method != request.param:
            pytest.skip("this kernel allows no io_uring")
        return reader

    yield make
    for reader in readers:
        reader.close()


def saved(path, shape: tuple[int, ...], dtype=np.float32) -> torch.Tensor:
    """A table of noise in a .npy file."""
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    np.save(path, array)
    return torch.from_numpy(array)


def native(path, table: torch.Tensor) -> None:
    """The same in the native format."""
    layout = create(path, tuple(table.shape), table.dtype)
    with open(path, "r+b") as file:
        for row in range(len(table)):
            file.seek(layout.row_offset(row))
            file.write(table[row].contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    "shape", [(1, 1), (1000, 3), (3000, 128), (500, 257), (40, 4000), (9, 50_000)]
)
@pytest.mark.parametrize("kind", ["npy", "native"])
def test_reads_every_row(folder, reader_of, shape, kind):
    table = saved(folder / "x.npy", shape)
    native(folder / "x", table)
    reader = reader_of(folder / ("x.npy" if kind == "npy" else "x"))
    for num_indices in (1, 7, min(5000, 4_000_000 // shape[1])):
        if reader.method == "python":
            num_indices = min(num_indices, 700)  # which takes its time for each
        index = torch.randint(-shape[0], shape[0], (num_indices,))
        out = torch.full((num_indices, shape[1]), -1.0)
        reader.read_rows(index, out, negative=True)
        assert torch.equal(out, table[index])
    everything = torch.randperm(shape[0]).int()
    out = torch.empty(shape)
    reader.read_rows(everything, out)
    assert torch.equal(out, table[everything])


@given(
    num_rows=st.integers(1, 300),
    width=st.integers(1, 3000),
    indices=st.lists(st.integers(-400, 400), max_size=60),
    negative=st.booleans(),
)
def test_any_rows_of_any_width(tmp_path_factory, num_rows, width, indices, negative):
    path = tmp_path_factory.mktemp("any") / "x.npy"
    table = saved(path, (num_rows, width), np.int8)
    reader = RowReader(open_layout(path))
    index, out = torch.tensor(indices, dtype=torch.int64), torch.empty(len(indices), width)
    out = out.to(torch.int8)
    low = -num_rows if negative else 0
    wrong = [at for at, each in enumerate(indices) if not low <= each < num_rows]
    if wrong:
        with pytest.raises(IndexError, match=rf"index\[{wrong[0]}\] is {indices[wrong[0]]}, but"):
            reader.read_rows(index, out, negative=negative)
    else:
        reader.read_rows(index, out, negative=negative)
        assert torch.equal(out, table[index])
    reader.close()


def test_neighbours_are_read_together_and_duplicates_once(folder):
    saved(folder / "x.npy", (100_000, 128))
    reader = RowReader(open_layout(folder / "x.npy"))
    reader.read_rows(torch.arange(1000), torch.empty(1000, 128))
    counters = reader.counters
    assert counters["num_reads"] <= 10
    assert counters["bytes_read"] <= 1000 * 512 + 10 * 8192
    before = counters["num_reads"]
    reader.read_rows(torch.full((1000,), 77), torch.empty(1000, 128))
    assert counters["num_reads"] == before + 1
    reader.read_rows(torch.arange(0, 100_000, 100), torch.empty(1000, 128))
    assert counters["num_reads"] == before + 1001
    reader.close()


def test_a_file_that_becomes_shorter(folder, reader_of):
    saved(folder / "x.npy", (10_000, 128))
    reader = reader_of(folder / "x.npy")
    os.truncate(folder / "x.npy", 2_000_000)
    out = torch.empty(3, 128)
    reader.read_rows(torch.tensor([0, 3000, 17]), out)
    for row in (3906, 9999):
        with pytest.raises(StoreReadError, match=rf"row {row} of .*: the file has become shorter"):
            reader.read_rows(torch.tensor([5, row]), torch.empty(2, 128))
    reader.read_rows(torch.tensor([0, 3000, 17]), out)  # the reader is as good as before


def test_a_disk_error_in_the_middle_of_a_batch(folder, reader_of):
    saved(folder / "x.npy", (10_000, 128))
    reader = reader_of(folder / "x.npy")
    whole, broken = reader.file._fd, os.open(folder, os.O_RDONLY)  # reading a directory fails
    reader.file._fd = broken
    with pytest.raises(StoreReadError, match="Is a directory") as caught:
        reader.read_rows(torch.randint(0, 10_000, (500,)), torch.empty(500, 128))
    assert caught.value.errno == errno.EISDIR and caught.value.path.endswith("x.npy")
    reader.file._fd = whole
    os.close(broken)
    out = torch.empty(2, 128)
    reader.read_rows(torch.tensor([1, 2]), out)
    assert torch.equal(out, torch.from_numpy(np.load(folder / "x.npy"))[[1, 2]])


def test_threads_share_a_reader(folder, reader_of):
    from concurrent.futures import ThreadPoolExecutor

    table = saved(folder / "x.npy", (5000, 64))
    reader = reader_of(folder / "x.npy")

    def gather(seed: int) -> bool:
        index = torch.randint(0, 5000, (700,), generator=torch.Generator().manual_seed(seed))
        out = torch.empty(700, 64)
        reader.read_rows(index, out)
        return torch.equal(out, table[index])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(gather, range(10 if reader.method == "python" else 40)))


def test_a_forked_child_has_a_reader_of_its_own(folder, reader_of):
    table = saved(folder / "x.npy", (5000, 64))
    reader = reader_of(folder / "x.npy")
    index = torch.arange(0, 5000, 7)
    out, expected = torch.empty(len(index), 64), table[index]
    reader.read_rows(index, out)
    child = os.fork()
    if child == 0:  # no operators of torch here: its threads are the parent's
        out.numpy().fill(0)
        reader.read_rows(index, out)
        os._exit(0 if np.array_equal(out.numpy(), expected.numpy()) else 1)
    for _ in range(20):
        reader.read_rows(index, out)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(out, table[index])


# ------------------------------------------------------------------------- cache


def test_what_the_cache_has_is_not_read_again(folder):
    table = saved(folder / "x.npy", (1000, 100))
    os.utime(folder / "x.npy", (0, 0))  # nothing is kept of a file that was just written by others
    u = unify(folder / "x.npy", cache="40KB")  # room for 100 rows
    index = torch.arange(0, 1000, 10).repeat(2)
    for _ in range(3):
        assert torch.equal(u[index], table[index])
    report = u.report()
    assert (report.num_gathers, report.num_rows_gathered) == (3, 600)
    assert report.gathered_bytes == 600 * 400
    assert (report.num_cache_misses, report.num_cache_hits) == (100, 200)
    assert report.num_reads <= 100 and report.cache_bytes == 40_000
    assert "cache hits" in str(report)


@settings(max_examples=50)
@given(
    batches=st.lists(st.lists(st.integers(0, 79), min_size=1, max_size=30), max_size=12),
    capacity=st.integers(1, 90),
)
def test_a_cache_of_any_size_gives_the_same_rows(tmp_path_factory, batches, capacity):
    """Rows come and go, and change in between."""
    path = tmp_path_factory.mktemp("any") / "x.npy"
    table = saved(path, (80, 50), np.int16)
    u = unify(path, cache=capacity * 100)
    for number, rows in enumerate(batches):
        index = torch.tensor(rows)
        assert torch.equal(u[index], table[index])
        changed = torch.full((len(rows), 50), number, dtype=torch.int16)
        u[index[::3]] = changed[::3]
        table[index[::3]] = changed[::3]
    assert torch.equal(u[torch.arange(80)], table)


def test_what_is_popular_stays(folder):
    saved(folder / "x.npy", (10_000, 64))
    os.utime(folder / "x.npy", (0, 0))  # rows of a file that was just written are read again
    u = unify(folder / "x.npy", cache=256 * 200)
    popular = torch.arange(100)
    for _ in range(50):
        u[popular]
        u[torch.randint(100, 10_000, (60,))]
    report = u.report()
    assert report.num_cache_hits > 0.9 * 50 * 100


def test_a_cache_too_small_for_a_row_is_refused(folder):
    saved(folder / "x.npy", (10, 1000))
    with pytest.raises(ValueError, match=r"cache=1000 B: a row of .* has 3\.91 KiB"):
        unify(folder / "x.npy", cache=1000)


# --------------------------------------------------------------------- as tensors


@pytest.fixture(params=["npy", "native", "safetensors"])
def source(request, folder) -> tuple[str, torch.Tensor]:
    """A file that holds a table of 60 rows, and the table."""
    table = torch.randn(60, 5, 2)
    if request.param == "npy":
        np.save(folder / "x.npy", table.numpy())
        return f"{folder}/x.npy", table
    if request.param == "native":
        native(folder / "x", table)
        return f"{folder}/x", table
    from safetensors.torch import save_file

    save_file({"features": table, "other": torch.zeros(3)}, folder / "x.safetensors")
    return f"{folder}/x.safetensors#features", table


def test_rows_of_a_file_as_of_a_tensor(source):
    path, table = source
    u = unify(path)
    assert isinstance(u, UnifiedTensor) and (u.shape, u.dtype) == (table.shape, table.dtype)
    assert len(u) == 60 and u.device.type == "cpu" and u.dim() == 3
    index = torch.randint(0, 60, (4, 6))
    assert torch.equal(u[index], table[index])
    assert torch.equal(u.gather_rows(index), table[index])
    assert torch.equal(functional.embedding(index, u), table[index])
    assert torch.equal(u.index_select(0, index[0]), table[index[0]])
    assert torch.equal(u[-3], table[-3]) and torch.equal(u[3:50:7], table[3:50:7])
    assert torch.equal(u[50:], table[50:]) and u[70:].shape == (0, 5, 2)
    assert torch.equal(u[[1, -1]], table[[1, -1]])
    assert torch.equal(u[torch.arange(60) % 9 == 0], table[::9])
    assert type(u[index]) is torch.Tensor


def test_gradients_of_rows_of_a_file_are_sparse(source):
    path, table = source
    u, dense = unify(path, requires_grad=True), table.clone().requires_grad_()
    index = torch.tensor([3, 59, 3])
    for each in (u, dense):
        each[index].square().sum().backward()
    assert torch.allclose(u.grad.to_dense(), dense.grad)


@pytest.mark.parametrize(
    "read_all",
    [
        lambda u: u + 1,
        lambda u: u.sum(),
        lambda u: u @ torch.ones(2, 2),
        lambda u: u[:],
        lambda u: u[..., 0],
        lambda u: u.cpu(),
        lambda u: u.clone(),
        lambda u: torch.cat([u, u]),
        lambda u: u.view(-1),
        lambda u: u.to(torch.float64),
        lambda u: torch.equal(u, torch.zeros(60, 5, 2)),
    ],
)
def test_what_would_read_the_whole_file_raises(folder, read_all):
    np.save(folder / "x.npy", np.zeros((60, 5, 2), dtype=np.float32))
    with pytest.raises(WholeTableError, match=r"would copy the whole table of 2\.34 KiB: "):
        read_all(unify(folder / "x.npy"))


def test_writes_reach_the_file(source):
    path, table = source
    u = unify(path)
    index, rows = torch.tensor([4, 0, 59, 4]), torch.randn(4, 5, 2)
    u[index] = rows
    table[[4, 0, 59, 4]] = rows
    table[4] = rows[3]
    u.index_add_(0, index, rows, alpha=2)
    table.index_add_(0, index, rows, alpha=2)
    with torch.no_grad():
        u.index_copy_(0, torch.tensor([-1 % 60]), rows[:1])
        table[59] = rows[0]
    everything = torch.arange(60)
    assert torch.equal(u[everything], table)
    assert torch.equal(unify(path)[everything], table)


def test_empty_makes_a_file(folder):
    u = empty((100, 300), torch.float16, path=folder / "table")
    assert not u[torch.arange(100)].any()
    u[torch.tensor([7])] = torch.ones(1, 300, dtype=torch.float16)
    assert unify(folder / "table")[7].sum() == 300
    with pytest.raises(StoreUnavailableError, match="exists"):
        empty((1, 1), path=folder / "table")


def test_a_file_is_saved_by_name_and_shared_by_name(source):
    path, table = source
    stream = io.BytesIO()
    with pytest.warns(UserWarning, match="is the name of the file, not its rows"):
        torch.save(unify(path), stream)
    assert len(stream.getvalue()) < 4096
    stream.seek(0)
    assert torch.equal(torch.load(stream)[5], table[5])


# ------------------------------------------------------------------------- writing


def test_a_forked_child_neither_writes_nor_tidies_up(folder):
    u = empty((10, 4), path=folder / "table")
    u[torch.tensor([1])] = torch.ones(1, 4)
    child = os.fork()
    if child == 0:
        try:
            u[torch.tensor([2])] = torch.ones(1, 4)
        except StoreUnavailableError as error:
            os._exit(0 if "parent of this process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    u[torch.tensor([3])] = torch.ones(1, 4)
    assert u[torch.arange(10)].sum() == 8


def test_a_read_only_file_is_read_and_not_written(folder, monkeypatch):
    np.save(folder / "x.npy", np.ones((4, 4), dtype=np.float32))
    real_open = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, "")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    u = unify(folder / "x.npy")
    assert u[0].sum() == 4
    with pytest.raises(StoreUnavailableError, match="cannot be opened for writing: Read-only"):
        u[torch.tensor([0])] = torch.zeros(1, 4)
    assert u[0].sum() == 4


def test_threads_that_add_to_the_same_rows_lose_nothing(folder):
    from concurrent.futures import ThreadPoolExecutor

    u = empty((20, 3), path=folder / "table")
    index = torch.tensor([4, 7, 4])

    def add(_: int) -> None:
        u.index_add_(0, index, torch.ones(3, 3))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(20)))
    found = unify(folder / "table")[torch.tensor([4, 7, 5])]
    assert found[:, 0].tolist() == [40.0, 20.0, 0.0]


class SlowLibrary:
    """The library, with caches that take their time to be made, and are counted."""

    def __init__(self, library) -> None:
        self._library = library
        self.num_caches = 0

    def __getattr__(self, name):
        return getattr(self._library, name)

    def penstock_row_cache(self, *arguments):
        time.sleep(0.1)
        self.num_caches += 1
        return self._library.penstock_row_cache(*arguments)

    def penstock_row_cache_free(self, cache) -> None:
        self.num_caches -= 1
        self._library.penstock_row_cache_free(cache)


def test_threads_of_a_forked_child_share_one_cache(folder):
    table = saved(folder / "x.npy", (5000, 64)).numpy()
    reader = RowReader(open_layout(folder / "x.npy"), cache_bytes=2**20)
    reader._library = library = SlowLibrary(reader._library)
    index = torch.arange(0, 5000, 7)
    outs = [torch.empty(len(index), 64) for _ in range(6)]
    child = os.fork()
    if child == 0:
        threads = [threading.Thread(target=reader.read_rows, args=(index, out)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        right = all(np.array_equal(out.numpy(), table[::7]) for out in outs)
        os._exit(0 if right and library.num_caches == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_module_loads_the_state_that_it_had(tmp_path):
    """Its table is in a file, and the state names that file: there is nothing to copy."""
    embedding = nn.Embedding.from_pretrained(empty((5, 4), path=tmp_path / "table"), freeze=False)
    with pytest.warns(UserWarning, match="is the name of the file, not its rows"):
        torch.save(embedding.state_dict(), tmp_path / "state.pt")
    embedding.load_state_dict(torch.load(tmp_path / "state.pt"))
    other = nn.Embedding.from_pretrained(empty((5, 4), path=tmp_path / "other"))
    with pytest.raises(RuntimeError, match="copy_ would write the whole table"):
        other.load_state_dict(embedding.state_dict())


@pytest.mark.parametrize("operation", ["index_add_", "index_copy_"])
def test_rows_of_another_shape_or_dtype_are_refused(tmp_path, operation):
    u, index = empty((5, 4), path=tmp_path / "table"), torch.tensor([1, 2])
    for wrong in (torch.ones(3, 4), torch.ones(2, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"source: expected torch.float32 of shape \(2, 4\)"):
            getattr(u, operation)(0, index, wrong)
