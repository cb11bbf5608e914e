"""Bytes that go into the extent file come out, or an error is raised: none wrong, none leaked."""

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from _round_trips import BLOCK, LENGTHS, MIB, Memory, assert_comes_back
from penstock.errors import StoreError
from penstock.memory import ExtentFile, FileStore, _transfers


@pytest.mark.parametrize("num_bytes", LENGTHS)
@pytest.mark.parametrize(
    ("source_shift", "target_shift"), [(0, 0), (64, 64), (64, 64 + 512), (1, 0), (0, 4095)]
)
def test_store_and_load(file: ExtentFile, num_bytes: int, source_shift: int, target_shift: int):
    assert_comes_back(file, num_bytes, source_shift, target_shift)


@pytest.mark.parametrize("num_bytes", LENGTHS)
@pytest.mark.parametrize("shift", [0, 64])
def test_write_and_read(file: ExtentFile, num_bytes: int, shift: int):
    source, target = Memory(num_bytes, shift, 1), Memory(num_bytes, 512, 2)
    extent = file.allocate(num_bytes)
    file.write(extent, source.address, num_bytes)
    file.read(extent, target.address, num_bytes)
    assert np.array_equal(target.bytes, source.bytes)
    file.read(extent, target.address, min(num_bytes, 100))
    assert np.array_equal(target.bytes, source.bytes)


def test_only_the_unaligned_ends_stay_in_ram(file: ExtentFile):
    source = Memory(10 * MIB, 64)
    span = file.store(source.address, 10 * MIB)
    assert len(span.head) == 448
    assert span.ram_bytes < 512 + BLOCK
    assert span.extent.num_bytes == 10 * MIB - span.ram_bytes
    short = file.store(source.address, 100)
    assert short.ram_bytes == 0  # its bytes really are in the file


def test_space_is_reused_and_counted(file: ExtentFile):
    source = Memory(MIB)
    first = file.store(source.address, MIB)
    second = file.store(source.address, MIB)
    assert file.used_bytes == 2 * MIB
    file.discard(first)
    third = file.store(source.address, MIB)
    assert third.extent.offset == first.extent.offset == 0
    file_bytes = file.file_bytes
    for _ in range(50):
        file.discard(second)
        second = file.store(source.address, MIB)
    assert file.file_bytes == file_bytes == os.fstat(file._fd).st_size


def test_requests_are_at_most_8_mib(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    requests: list[int] = []

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        requests.append(sum(map(len, buffers)))
        return os.pwritev(fd, buffers, offset)

    monkeypatch.setattr(_transfers, "_pwritev", write)
    source = Memory(20 * MIB)
    file.store(source.address, 20 * MIB)
    assert requests == [8 * MIB, 8 * MIB, 4 * MIB]


@pytest.mark.parametrize("num_threads", [8])
def test_many_threads_at_once(file: ExtentFile, num_threads: int):
    wrong: list[object] = []

    def work(seed: int):
        choose = random.Random(seed)
        try:
            for index in range(15):
                num_bytes = choose.choice([100, 5000, MIB // 2 + choose.randrange(BLOCK)])
                source = Memory(num_bytes, choose.randrange(BLOCK), seed * 100 + index)
                target = Memory(num_bytes, source.address % 512, 0)
                span = file.store(source.address, num_bytes)
                time.sleep(0)
                file.load(span, target.address)
                if not np.array_equal(source.bytes, target.bytes):
                    wrong.append(span)
                file.discard(span)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert file.used_bytes == 0


# ------------------------------------------------------------------ misuse


def test_an_extent_is_refused_after_it_was_freed(file: ExtentFile, store: Path):
    memory = Memory(BLOCK)
    extent = file.allocate(BLOCK)
    file.free(extent)
    again = file.allocate(BLOCK)
    assert again.offset == extent.offset
    for use in (file.write, file.read):
        with pytest.raises(ValueError, match="is not in use in this file"):
            use(extent, memory.address, BLOCK)
    with pytest.raises(ValueError, match="freed"):
        file.free(extent)
    with contextlib.closing(ExtentFile(store)) as other:
        with pytest.raises(ValueError, match="belongs to another file"):
            other.free(again)


@pytest.mark.parametrize("num_bytes", [-1, BLOCK + 1])
def test_transfers_stay_within_the_extent(file: ExtentFile, num_bytes: int):
    memory = Memory(2 * BLOCK)
    extent = file.allocate(BLOCK)
    for use in (file.write, file.read):
        with pytest.raises(ValueError, match=r"num_bytes must be in \[0, 4096\]"):
            use(extent, memory.address, num_bytes)


def test_nothing_cannot_be_stored(file: ExtentFile):
    with pytest.raises(ValueError, match="num_bytes must be at least 1"):
        file.store(Memory(1).address, 0)


@pytest.mark.parametrize("wrong", [None, 5, b"/tmp", "", object()])
def test_a_store_is_a_path(wrong: object):
    with pytest.raises(TypeError, match="store must be the path of a directory or a FileStore"):
        ExtentFile(wrong)


def test_file_store_reads_limits_as_users_write_them(store: Path):
    limits = FileStore(store, "1MiB", "200MB/s", read_bytes_per_second=5)
    assert limits == FileStore(str(store), 2**20, 2e8, 5.0)
    assert FileStore.of(limits) is limits
    assert FileStore.of(store) == FileStore(os.fspath(store))
    with pytest.raises(ValueError, match="max_bytes must be at least 4096"):
        FileStore(store, max_bytes="1KB")
    with pytest.raises(ValueError, match="read_bytes_per_second must be"):
        FileStore(store, read_bytes_per_second=0)


# --------------------------------------------------------------- life cycle


def test_close_is_final_and_idempotent(store: Path):
    file = ExtentFile(store)
    memory = Memory(BLOCK)
    span = file.store(memory.address, BLOCK)
    fd = file._fd
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for call in (
        lambda: file.store(memory.address, BLOCK),
        lambda: file.load(span, memory.address),
        lambda: file.allocate(1),
    ):
        with pytest.raises(StoreError, match="is closed"):
            call()
    file.discard(span)  # a destructor may come late
    assert file.used_bytes == 0


def test_close_lets_a_transfer_end(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    memory, target = Memory(BLOCK, seed=1), Memory(BLOCK, seed=2)
    span = file.store(memory.address, BLOCK)
    reading, go_on = threading.Event(), threading.Event()

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(10)
        return os.preadv(fd, buffers, offset)

    monkeypatch.setattr(_transfers, "_preadv", read)
    thread = threading.Thread(target=file.load, args=(span, target.address))
    thread.start()
    assert reading.wait(10)
    file.close()
    os.fstat(file._fd)  # still open: the number must not go to another file meanwhile
    go_on.set()
    thread.join()
    assert np.array_equal(memory.bytes, target.bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


def test_files_close_when_they_die(store: Path):
    def num_open() -> int:
        links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sum(link.is_relative_to(store) for link in links)

    files = [ExtentFile(store) for _ in range(20)]
    for file in files:
        file.store(Memory(BLOCK).address, BLOCK)
    assert num_open() == 20
    files.clear()
    del file
    gc.collect()
    assert num_open() == 0


def test_freeing_never_waits(file: ExtentFile):
    """A destructor may run while its own thread is in the middle of an allocation."""
    span = file.store(Memory(BLOCK).address, BLOCK)
    with file._space._mailbox:
        file.discard(span)  # a lock that waited would hang here
    assert file.used_bytes == 0


def test_the_file_has_no_name_and_is_private(file: ExtentFile, store: Path):
    status = os.fstat(file._fd)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
    assert not os.get_inheritable(file._fd)
    assert list(store.iterdir()) == []


def test_sigkill_leaves_nothing(store: Path):
    script = (
        "import ctypes, sys, time\n"
        "from penstock.memory import ExtentFile\n"
        "file = ExtentFile(sys.argv[1])\n"
        "memory = ctypes.create_string_buffer(2**20)\n"
        "file.store(ctypes.addressof(memory), 2**20)\n"
        "print('stored', flush=True)\n"
        "time.sleep(60)\n"
    )
    source = str(Path(__file__).resolve().parents[2] / "src")
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(store)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    with process:
        assert process.stdout.readline() == b"stored\n"
        process.send_signal(signal.SIGKILL)
    assert list(store.iterdir()) == []


# -------------------------------------------------------------------- forks


def run_in_child(work: Callable[[], None]) -> int:
    """Fork, let the child do `work`, and return its exit code: 0 if nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads, Python >= 3.12
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_has_no_say(store: Path):
    file = ExtentFile(store)
    source, target = Memory(MIB, 64, 1), Memory(MIB, 64, 2)
    span = file.store(source.address, MIB)
    spans = [span]

    def child():
        for call in (
            lambda: file.store(target.address, MIB),
            lambda: file.load(span, target.address),
            lambda: file.write(span.extent, target.address, BLOCK),
            lambda: file.read(span.extent, target.address, BLOCK),
            lambda: file.allocate(1),
        ):
            with pytest.raises(StoreError, match="belongs to another process"):
                call()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file._fd)  # a child that outlives its parent must not keep the space
        file.discard(span)
        spans.clear()
        gc.collect()
        file.close()
        with contextlib.closing(ExtentFile(store)) as own:
            own.load(own.store(source.address, MIB), target.address)
            assert np.array_equal(source.bytes, target.bytes)

    assert run_in_child(child) == 0
    assert file.used_bytes > 0
    file.load(span, target.address)
    assert np.array_equal(source.bytes, target.bytes)
    file.close()


def test_a_fork_waits_for_reads(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    memory = Memory(BLOCK)
    span = file.store(memory.address, BLOCK)
    reading, ended = threading.Event(), []

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        time.sleep(0.2)
        ended.append(time.monotonic())
        return os.preadv(fd, buffers, offset)

    monkeypatch.setattr(_transfers, "_preadv", read)
    thread = threading.Thread(target=file.load, args=(span, memory.address))
    thread.start()
    assert reading.wait(10)
    assert run_in_child(lambda: None) == 0
    assert ended, "the fork came in the middle of a read"
    thread.join()
    file.load(span, memory.address)  # and reads go on afterwards
