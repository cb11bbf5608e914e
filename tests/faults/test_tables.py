"""Faults of tables, caused for real: the right rows, or an error that says why not.

Errors of the disk come from the kernel: rows are read from and written to `/proc/self/mem`, at
addresses where a file was mapped that has become shorter, which is EIO; RLIMIT_FSIZE stands for a
disk without room.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from penstock.errors import (
    StoreError,
    StoreFullError,
    StoreReadError,
    StoreUnavailableError,
    StoreWriteError,
)
from penstock.unified import UnifiedTensor, unify
from penstock.unified.file import _rows
from penstock.unified.file import writer as file_writer
from penstock.unified.file._rows import RowReader
from penstock.unified.file.layout import RowLayout
from penstock.unified.file.writer import table_file, write_batch
from penstock.unified.optim import Adam

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = pytest.mark.timeout(120)

PAGE_BYTES = mmap.PAGESIZE
NUM_ROWS, WIDTH = 500, 64


@pytest.fixture
def folder(real_disk, tmp_path_factory) -> Path:
    """A directory on a real disk, where direct I/O works."""
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(params=["io_uring", "threads", "python"])
def method(request, monkeypatch) -> str:
    """Ways to read rows of files; io_uring only where the kernel allows it."""
    if request.param == "python":
        monkeypatch.setattr(_rows, "get_library", lambda: None)
    original = RowReader.__init__

    def init(self, *arguments, **options) -> None:
        original(self, *arguments, **{**options, "ring": request.param == "io_uring"})
        if self.method != request.param:
            pytest.skip("this kernel allows no io_uring")

    monkeypatch.setattr(RowReader, "__init__", init)
    return request.param


def saved(path: Path, num_rows: int = NUM_ROWS, value: float | None = None) -> torch.Tensor:
    """A table in a .npy file."""
    table = torch.randn(num_rows, WIDTH) if value is None else torch.full((num_rows, WIDTH), value)
    np.save(path, table.numpy())
    return table


@contextmanager
def child_that(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """A fork that does it, given a pipe to write to; its process id, and where the pipe ends.

    It is killed at the end, if it is still there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            work(writing)
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(writing)
    try:
        yield child, reading
    finally:
        os.kill(child, signal.SIGKILL)  # before the pipe is closed, for it may be writing to it
        os.close(reading)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


# ------------------------------------------------------------------------ processes


class Rows(Dataset):
    """Batches of rows; the worker that is asked for number `deadly` is killed while it gathers."""

    def __init__(self, table: UnifiedTensor, deadly: int = -1) -> None:
        self.table = table
        self.deadly = deadly

    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> torch.Tensor:
        index = torch.arange(at, NUM_ROWS, 20)
        if at == self.deadly:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                self.table.gather_rows(index)
        return self.table[index]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_loader_worker_killed_while_it_gathers(kind, folder):
    content = saved(folder / "x.npy")
    table = unify(content if kind == "memory" else folder / "x.npy")
    loader = DataLoader(Rows(table, deadly=13), num_workers=2, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed|exited unexpectedly)"):
        list(loader)
    everything = torch.arange(NUM_ROWS)
    assert torch.equal(table[everything], content)
    batches = list(DataLoader(Rows(table), num_workers=2, multiprocessing_context="fork"))
    assert torch.equal(torch.cat([batch[0] for batch in batches[:1]]), content[::20])
    assert len(batches) == 20


def test_a_process_killed_while_it_writes_to_shared_memory():
    """There is no journal in memory: a row may be half written, but what is not written is not."""
    table = unify(torch.zeros(NUM_ROWS, WIDTH)).share_memory_()
    plain = table.cpu()
    index = torch.arange(0, NUM_ROWS, 2)

    def write(_: int) -> None:
        for value in range(1, 10**9):
            table[index] = torch.full((len(index), WIDTH), float(value))

    with child_that(write):
        while plain[0, 0] < 5:
            time.sleep(0.001)
    last = plain[::2].unique().tolist()
    assert len(last) <= 2 and last[-1] >= 5 and last[-1] - last[0] <= 1
    assert not plain[1::2].any()
    table[index] = torch.ones(len(index), WIDTH)
    assert torch.equal(table[torch.arange(NUM_ROWS)][:, 0], (torch.arange(NUM_ROWS) % 2 == 0) * 1.0)


def test_a_process_killed_while_it_writes_to_a_file(folder):
    """All rows of a batch are of one value, whenever it is killed, and none is torn."""
    path, numbers = folder / "x.npy", random.Random(0)
    saved(path, value=0.0)
    index = torch.arange(0, NUM_ROWS, 2)
    seen = 0.0

    def write(ready: int) -> None:
        u = unify(path)
        for value in range(int(seen) + 1, 10**9):
            u[index] = torch.full((len(index), WIDTH), float(value))
            os.write(ready, b".")

    for _ in range(5):
        with child_that(write) as (_, reading):
            assert os.read(reading, 1) == b"."
            time.sleep(numbers.uniform(0, 0.02))
        found = unify(path)[torch.arange(NUM_ROWS)]
        assert len(found[::2].unique()) == 1 and not found[1::2].any()
        assert found[0, 0] > seen
        seen = found[0, 0].item()


@pytest.mark.parametrize("moment", ["while it writes", "after it was killed"])
def test_a_process_killed_while_it_writes_to_a_file_that_is_renamed(folder, moment):
    """As above, or writing is refused; the journal is found from the new name, and from the old one
    through a link.
    """
    names, numbers = ["x.npy", "y.npy"], random.Random(2)
    saved(folder / "x.npy", value=0.0)
    index = torch.arange(0, NUM_ROWS, 2)
    seen = 0.0

    def write(ready: int) -> None:
        u = unify(folder / names[0])
        try:
            for value in range(int(seen) + 1, 10**9):
                u[index] = torch.full((len(index), WIDTH), float(value))
                os.write(ready, b".")
        except StoreUnavailableError as error:  # where it looks for its journal again
            if "has another name now" in str(error):
                signal.pause()
            raise

    def rename() -> None:
        os.rename(folder / names[0], folder / names[1])
        if numbers.random() < 0.5:
            os.symlink(names[1], folder / names[0])

    for _ in range(5):  # 400 have been tried too
        with child_that(write) as (_, reading):
            assert os.read(reading, 1) == b"."
            time.sleep(numbers.uniform(0, 0.01))
            if moment == "while it writes":
                rename()
                time.sleep(numbers.uniform(0, 0.01))
        if moment == "after it was killed":
            rename()
        is_link = (folder / names[0]).is_symlink()
        found = unify(folder / names[0 if is_link else 1])[torch.arange(NUM_ROWS)]
        assert len(found[::2].unique()) == 1 and not found[1::2].any()
        assert found[0, 0] > seen
        seen = found[0, 0].item()
        if is_link:
            os.unlink(folder / names[0])
        names.reverse()
        assert sorted(os.listdir(folder)) == [names[0]]


def gradient_of(step: int) -> torch.Tensor:
    """The same in every process; with duplicates."""
    random = torch.Generator().manual_seed(step)
    index = torch.randint(0, NUM_ROWS, (100,), generator=random)
    rows = torch.randn(100, WIDTH, generator=random)
    shape = (NUM_ROWS, WIDTH)
    return torch.sparse_coo_tensor(index[None], rows, shape, check_invariants=True)


def test_an_optimizer_killed_in_the_middle_of_a_step(folder):
    """Rows, means and the step count are those of one and the same step, and training goes on."""
    path, numbers = folder / "x.npy", random.Random(1)
    reference = unify(saved(path), requires_grad=True)
    optimizer, done = Adam([reference], lr=0.1), 0

    def train(ready: int) -> None:
        table = unify(path, requires_grad=True)
        twin = Adam([table], lr=0.1)
        for step in range(done, done + 10**6):
            table.grad = gradient_of(step)
            twin.step()
            os.write(ready, b".")

    for number in range(5):
        with child_that(train) as (_, reading):
            assert os.read(reading, 1) == b"."
            time.sleep(numbers.uniform(0, 0.03))
        names = ("", ".exp_avg", ".exp_avg_sq", ".step")
        order = names if number % 2 else names[::-1]  # the first one that is opened mends all
        tables = {name: unify(f"{path}{name}") for name in order}
        count = int(tables[".step"][0])
        assert count > done
        for step in range(done, count):
            reference.grad = gradient_of(step)
            optimizer.step()
        done, state = count, optimizer.state[reference]
        everything = torch.arange(NUM_ROWS)
        assert torch.equal(tables[""][everything], reference.detach().cpu())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tables[f".{name}"][everything], state[name].cpu())


# --------------------------------------------------------------------------- files


def test_a_file_that_is_truncated_between_two_gathers(folder, method):
    table = saved(folder / "x.npy")
    u = unify(folder / "x.npy")
    index = torch.tensor([3, 499, 3])
    assert torch.equal(u[index], table[index])
    num_bytes = os.path.getsize(folder / "x.npy")
    os.truncate(folder / "x.npy", num_bytes // 2)
    told = rf"changed size since .* it had {num_bytes} bytes, now it has {num_bytes // 2}\. Restore"
    for rows in (index, torch.tensor([0])):
        with pytest.raises(StoreReadError, match=told):
            u[rows]
    with pytest.raises(StoreReadError, match=told):
        u[torch.tensor([0])] = torch.zeros(1, WIDTH)
    with pytest.raises(StoreError, match="shorter than its header says"):
        unify(folder / "x.npy")
    np.save(folder / "x.npy", table.numpy())  # restored
    assert torch.equal(u[index], table[index])


def test_a_file_that_is_truncated_while_rows_are_gathered(folder, method):
    """At some moment of it: the batch is right, or an error."""
    table, numbers = saved(folder / "x.npy", 4000), random.Random(3)
    content = (folder / "x.npy").read_bytes()
    u, index = unify(folder / "x.npy"), torch.randint(0, 4000, (500,))
    start = time.perf_counter()
    assert torch.equal(u[index], table[index])
    spent = time.perf_counter() - start
    outcomes = set()
    for number in range(300):
        if number >= 12 and len(outcomes) == 2:  # a busy machine may take long for either
            break
        delay = numbers.uniform(0, 1.5 * spent) if number else 0.0
        cut = threading.Timer(delay, os.truncate, (folder / "x.npy", len(content) // 2))
        cut.start()
        try:
            while cut.is_alive() or number == 0:
                assert torch.equal(u[index], table[index])
                outcomes.add("right")
        except StoreReadError:
            outcomes.add("error")
        cut.join()
        (folder / "x.npy").write_bytes(content)
    assert outcomes == {"right", "error"}


@pytest.mark.parametrize("how", ["extended", "saved anew with more rows"])
def test_a_file_that_grows_after_it_was_opened(folder, method, how):
    table = saved(folder / "x.npy")
    u = unify(folder / "x.npy")
    assert torch.equal(u[torch.tensor([7])], table[[7]])
    if how == "extended":
        with open(folder / "x.npy", "ab") as file:
            file.write(bytes(99))
    else:
        table = saved(folder / "x.npy", 2 * NUM_ROWS)
    with pytest.raises(StoreReadError, match=r"has changed size .* open the table again"):
        u[torch.tensor([7])]
    again = unify(folder / "x.npy")  # bytes behind the last row do not matter then
    assert torch.equal(again[torch.tensor([7])], table[[7]])


def test_a_file_that_is_replaced_after_it_was_opened(folder, method):
    """Reads go on in the old file, which the open table keeps; writes would go to the new one."""
    old, new = saved(folder / "x.npy"), saved(folder / "y.npy", value=5.0)
    u = unify(folder / "x.npy")
    os.replace(folder / "y.npy", folder / "x.npy")
    index = torch.tensor([1, 2])
    assert torch.equal(u[index], old[index])
    with pytest.raises(StoreUnavailableError, match="has been replaced by another file since"):
        u[index] = torch.zeros(2, WIDTH)
    assert torch.equal(unify(folder / "x.npy")[torch.arange(NUM_ROWS)], new)


def test_a_file_that_is_deleted_after_it_was_opened(folder, method):
    table = saved(folder / "x.npy")
    u = unify(folder / "x.npy")
    os.unlink(folder / "x.npy")
    assert torch.equal(u[torch.tensor([1, 2])], table[[1, 2]])
    with pytest.raises(StoreUnavailableError, match="cannot be opened for writing: No such file"):
        u[torch.tensor([1])] = torch.zeros(1, WIDTH)


# ------------------------------------------------------------------------- no room


@contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to write behind that byte of any file (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_journal_of_a_write(folder):
    table = saved(folder / "x.npy")
    u = unify(folder / "x.npy")
    everything = torch.arange(NUM_ROWS)
    with files_no_longer_than(20_000):
        with pytest.raises(StoreFullError, match="could not be written: File too large"):
            u[everything] = torch.zeros(NUM_ROWS, WIDTH)
        assert torch.equal(u[everything], table)
    assert torch.equal(unify(folder / "x.npy")[everything], table)
    u[everything] = torch.zeros(NUM_ROWS, WIDTH)
    assert not unify(folder / "x.npy")[everything].any()


def test_no_room_in_the_middle_of_the_rows(folder):
    """Some rows are in their places, others are not: nothing is read before all of them are."""
    saved(folder / "x.npy", value=1.0)
    u, index = unify(folder / "x.npy"), torch.tensor([0, 1, 498, 499])
    with files_no_longer_than(64_000):
        with pytest.raises(StoreWriteError, match=r"File too large.*kept in"):
            u[index] = torch.zeros(4, WIDTH)
        with open(folder / "x.npy", "rb") as file:  # the first two were written
            raw = np.load(file)
        assert not raw[:2].any() and raw[2:].all()
        with pytest.raises(StoreWriteError, match=r"File too large.*kept in"):
            u[index]
    assert not u[index].any() and u[torch.arange(2, 498)].all()
    again = unify(folder / "x.npy")
    assert not again[index].any() and again[torch.arange(2, 498)].all()


def test_no_room_for_a_step_of_an_optimizer(folder):
    start = saved(folder / "x.npy")
    table, twin = (unify(each, requires_grad=True) for each in (folder / "x.npy", start))
    optimizers = Adam([table]), Adam([twin])
    for step in range(3):
        for each, optimizer in zip((table, twin), optimizers, strict=True):
            each.grad = gradient_of(step)
            if step == 1 and each is table:
                with files_no_longer_than(20_000):
                    with pytest.raises(StoreFullError):
                        optimizer.step()
            optimizer.step()
    everything = torch.arange(NUM_ROWS)
    assert torch.equal(table.detach()[everything], twin.detach().cpu())
    assert unify(folder / "x.npy.step")[0].item() == 3


# -------------------------------------------------------------------- a broken disk


class BrokenDisk:
    """Rows of a page each, in memory that the kernel reads and writes as `/proc/self/mem`.

    A file is mapped there. Where it has become shorter, every access ends with EIO.
    """

    def __init__(self, folder: Path, num_rows: int) -> None:
        self.num_rows = num_rows
        self.path = folder / "backing"
        self.table = torch.randint(0, 256, (num_rows, PAGE_BYTES), dtype=torch.uint8)
        self.path.write_bytes(self.table.numpy().tobytes())
        with open(self.path, "r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0)
        (folder / "table").touch()
        self.layout = RowLayout(
            path=str(folder / "table"),
            shape=(num_rows, PAGE_BYTES),
            dtype=torch.uint8,
            offset=ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)),
            block_bytes=PAGE_BYTES,
        )

    def breaks(self, first_row: int) -> None:
        os.truncate(self.path, first_row * PAGE_BYTES)

    def is_mended(self) -> None:
        with open(self.path, "r+b") as file:
            file.write(self.table.numpy().tobytes())


@pytest.fixture
def disk(folder) -> BrokenDisk:
    return BrokenDisk(folder, 64)


def test_a_read_error_in_the_middle_of_a_batch(disk, method):
    reader = RowReader(disk.layout)
    os.close(reader.file._fd)
    reader.file._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    out = torch.empty(200, PAGE_BYTES, dtype=torch.uint8)
    index = torch.randint(0, 64, (200,))
    reader.read_rows(index, out)
    assert torch.equal(out, disk.table[index])
    disk.breaks(40)
    with pytest.raises(StoreReadError, match=r"row \d+ of .*: Input/output error") as caught:
        reader.read_rows(index, out)
    assert caught.value.errno == errno.EIO
    assert caught.value.offset >= disk.layout.offset
    sound = index[index < 40]
    reader.read_rows(sound, out[: len(sound)])  # the reader is as good as before
    assert torch.equal(out[: len(sound)], disk.table[sound])
    disk.is_mended()
    reader.read_rows(index, out)
    assert torch.equal(out, disk.table[index])
    reader.close()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_write_error_in_the_middle_of_a_batch(disk, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("penstock.unified.file._rows.get_library", lambda: None)
    writer = SimpleNamespace(layout=disk.layout, file=table_file(disk.layout))
    writer.file.open(disk.layout)
    os.close(writer.file._fd)
    writer.file._fd = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    monkeypatch.setattr(writer.file, "_check_name", lambda layout: None)
    monkeypatch.setattr("penstock.unified.file.writer.os.fdatasync", lambda fd: None)
    real = file_writer.write_places

    def write_to_broken_disk(*arguments) -> None:
        if is_sound:
            is_sound.clear()
            disk.breaks(40)
        real(*arguments)

    is_sound = [True]
    monkeypatch.setattr(file_writer, "write_places", write_to_broken_disk)
    rows = np.array([3, 39, 40, 63])
    content = np.full((4, PAGE_BYTES), 7, dtype=np.uint8)
    with pytest.raises(StoreWriteError, match="Input/output error"):
        write_batch([(writer, rows, content)])
    with pytest.raises(StoreWriteError, match="Input/output error"):
        writer.file.finish()
    disk.is_mended()
    writer.file.finish()
    found = np.frombuffer(disk.path.read_bytes(), dtype=np.uint8).reshape(64, PAGE_BYTES)
    expected = disk.table.numpy().copy()
    expected[rows] = 7
    assert np.array_equal(found, expected)
