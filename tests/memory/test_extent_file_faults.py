"""Disks that fail, fill up, are slow or of another kind: an error says so, and nothing is lost."""

import contextlib
import errno
import fcntl
import logging
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from _round_trips import BLOCK, LENGTHS, MIB, Memory, assert_comes_back
from penstock.errors import (
    StoreError,
    StoreFullError,
    StoreReadError,
    StoreUnavailableError,
    StoreWarning,
    StoreWriteError,
)
from penstock.memory import ExtentFile, FileStore, _extent_file, _extents, _store, _transfers


def test_short_transfers_are_completed(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    """Also those that stop at an odd byte, after which direct I/O cannot simply go on."""
    cuts = random.Random(0)
    num_short = 0

    def shorten(call: Callable[..., int]) -> Callable[..., int]:
        def short(fd: int, buffers: list[memoryview], offset: int) -> int:
            nonlocal num_short
            num_short += 1
            assert offset % BLOCK == 0
            length = sum(map(len, buffers))
            assert length % BLOCK == 0
            # The kernel moves whole blocks; now and then the caller hears of fewer bytes.
            moved = cuts.choice([length, length // BLOCK // 2 * BLOCK or BLOCK])
            unheard = cuts.choice([1, 511, 4095]) if num_short % 3 == 0 else 0
            return call(fd, [buffers[0][:moved]], offset) - unheard

        return short

    monkeypatch.setattr(_transfers, "_pwritev", shorten(os.pwritev))
    monkeypatch.setattr(_transfers, "_preadv", shorten(os.preadv))
    for num_bytes in LENGTHS[3:]:
        assert_comes_back(file, num_bytes, 64, 64)
    assert num_short > 20


def test_a_write_that_never_moves_anything_ends(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    memory = Memory(2 * BLOCK)
    for stuck in (0, 100):
        monkeypatch.setattr(_transfers, "_pwritev", lambda *_, stuck=stuck: stuck)
        with pytest.raises(StoreWriteError, match=f"moved {stuck} of 8192 bytes"):
            file.store(memory.address, 2 * BLOCK)
    assert file.used_bytes == 0


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EIO, StoreWriteError),
        (errno.EROFS, StoreWriteError),
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EFBIG, StoreFullError),
    ],
)
def test_a_write_that_fails_keeps_nothing(
    file: ExtentFile,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[StoreError],
):
    source = Memory(20 * MIB, 0, 1)
    before = source.whole.copy()

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 8 * MIB:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(_transfers, "_pwritev", write)
        with pytest.raises(expected) as caught:
            file.store(source.address, 20 * MIB)
    error = caught.value
    assert type(error) is expected
    assert (error.errno, error.offset, error.path) == (number, 8 * MIB, file.path)
    assert file.path in str(error) and f"errno {number}" in str(error)
    assert file.used_bytes == 0
    assert np.array_equal(source.whole, before)
    assert_comes_back(file, MIB, 0, 0)  # the file is as good as before


@pytest.mark.parametrize(("num_failures", "succeeds"), [(3, True), (4, False)])
def test_reads_are_tried_again(
    file: ExtentFile, monkeypatch: pytest.MonkeyPatch, num_failures: int, succeeds: bool
):
    source, target = Memory(BLOCK, 0, 1), Memory(BLOCK, 0, 2)
    file.allocate(BLOCK)
    span = file.store(source.address, BLOCK)
    left = num_failures

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    monkeypatch.setattr(_transfers, "_preadv", read)
    if succeeds:
        file.load(span, target.address)
        assert np.array_equal(source.bytes, target.bytes)
    else:
        with pytest.raises(StoreReadError, match="after 3 retries") as caught:
            file.load(span, target.address)
        error = caught.value
        assert (error.errno, error.offset, error.path) == (errno.EIO, BLOCK, file.path)


def test_other_read_errors_are_not_tried_again(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    memory = Memory(BLOCK)
    span = file.store(memory.address, BLOCK)

    def read(*_: object) -> int:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    monkeypatch.setattr(_transfers, "_preadv", read)
    with pytest.raises(StoreReadError, match="after 0 retries"):
        file.load(span, memory.address)


@pytest.mark.parametrize("left_bytes", [0, BLOCK, BLOCK + 100])
def test_a_file_that_became_shorter_is_an_error(file: ExtentFile, left_bytes: int):
    memory = Memory(MIB)
    span = file.store(memory.address, MIB)
    os.ftruncate(file._fd, left_bytes)
    with pytest.raises(StoreReadError, match="the file is shorter than it was"):
        file.load(span, memory.address)


# --------------------------------------------------------------- full disks


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A file system of its own, gone at the latest when this process is: it is mounted nowhere."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB that really runs full."""
    with mounted_tmpfs(tmp_path, "size=16m") as directory:
        yield directory


def test_a_full_disk_shows_when_space_is_asked_for(small_disk: Path):
    file = ExtentFile(FileStore(small_disk, reserve_bytes="1MiB"))
    memories = [Memory(4 * MIB, 64, seed) for seed in range(4)]
    spans = [file.store(memory.address, 4 * MIB) for memory in memories[:3]]
    with pytest.raises(StoreFullError, match="stay in reserve") as caught:
        file.store(memories[3].address, 4 * MIB)
    assert caught.value.path == str(small_disk)
    status = os.statvfs(small_disk)
    assert status.f_bavail * status.f_frsize >= MIB
    target = Memory(4 * MIB, 64, 99)
    for span, memory in zip(spans, memories, strict=False):
        file.load(span, target.address)
        assert np.array_equal(target.bytes, memory.bytes)
    file.discard(spans[0])
    file.store(memories[3].address, 4 * MIB)  # there is room again
    file.close()


def test_a_disk_that_fills_up_under_a_sparse_file(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without preallocation, and with the space gone after it was looked at."""

    def no_preallocation(*_: object):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(_extents, "_fallocate", no_preallocation)
    monkeypatch.setattr(_extents, "free_bytes", lambda _: 2**40)
    file = ExtentFile(FileStore(small_disk, reserve_bytes=0))
    memory, target = Memory(12 * MIB, 0, 1), Memory(12 * MIB, 0, 2)
    span = file.store(memory.address, 12 * MIB)
    with pytest.raises(StoreFullError, match="ran full while writing") as caught:
        file.store(memory.address, 12 * MIB)
    assert caught.value.errno == errno.ENOSPC
    file.load(span, target.address)
    assert np.array_equal(target.bytes, memory.bytes)
    file.close()


def test_a_failed_growth_is_cut_back(file: ExtentFile, monkeypatch: pytest.MonkeyPatch):
    """posix_fallocate may fail and yet leave the file as long as it was asked to be."""
    memory = Memory(MIB, 0, 1)
    span = file.store(memory.address, MIB)
    file_bytes = file.file_bytes

    def fail_late(fd: int, offset: int, num_bytes: int):
        os.ftruncate(fd, offset + num_bytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_extents, "_fallocate", fail_late)
        with pytest.raises(StoreFullError, match="cannot grow") as caught:
            file.allocate(file_bytes)
    assert caught.value.errno == errno.ENOSPC
    assert os.fstat(file._fd).st_size == file.file_bytes == file_bytes
    assert file.used_bytes == MIB
    target = Memory(MIB, 0, 2)
    file.load(span, target.address)
    assert np.array_equal(target.bytes, memory.bytes)
    file.free(file.allocate(file_bytes))


def test_max_bytes_is_a_hard_limit(store: Path):
    with contextlib.closing(ExtentFile(FileStore(store, max_bytes="1MiB"))) as file:
        memory = Memory(MIB)
        span = file.store(memory.address, MIB)
        with pytest.raises(StoreFullError, match=r"1\.00 MiB of max_bytes=1\.00 MiB are in use"):
            file.store(memory.address, 1)
        assert file.file_bytes == os.fstat(file._fd).st_size == MIB
        file.discard(span)
        file.store(memory.address, 1)


def test_a_file_size_limit_of_the_process(file: ExtentFile):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(StoreFullError) as caught:
            file.allocate(2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.fstat(file._fd).st_size == 0
    file.allocate(2 * MIB)


def test_the_reserve_stays_free(small_disk: Path):
    """On a disk of its own: what is free on the one of all tests changes meanwhile."""
    status = os.statvfs(small_disk)
    free = status.f_bavail * status.f_frsize
    with pytest.raises(
        StoreFullError, match="free space there, pass another directory, or set FileStore"
    ):
        ExtentFile(FileStore(small_disk, reserve_bytes=free + 1))
    # A step of growth would reach into the reserve, what is needed would not.
    limited = FileStore(small_disk, reserve_bytes=free - 8 * MIB)
    with contextlib.closing(ExtentFile(limited)) as file:
        file.allocate(MIB)
        assert file.file_bytes == MIB
        with pytest.raises(StoreFullError, match="stay in reserve"):
            file.allocate(10**9)
        assert file.used_bytes == MIB


# -------------------------------------------------------- kinds of directory


def test_a_directory_in_ram_is_warned_about():
    if _store.filesystem_type("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.warns(StoreWarning, match="is on tmpfs: the slow tier is RAM"):
        file = ExtentFile(FileStore("/dev/shm", reserve_bytes=0))
    assert_comes_back(file, 10_000, 64, 64)
    file.close()


def test_missing_directories_and_files_are_refused(store: Path):
    with pytest.raises(StoreUnavailableError, match="does not exist") as caught:
        ExtentFile(store / "missing")
    assert caught.value.path == str(store / "missing")
    with pytest.raises(StoreUnavailableError, match="is not a directory"):
        ExtentFile(__file__)
    with pytest.raises(StoreUnavailableError, match="cannot be used"):
        ExtentFile("/proc")


def test_an_unwritable_directory_is_refused(store: Path):
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:  # rights do not bind root, a read-only disk does
            store = stack.enter_context(mounted_tmpfs(store, "ro,size=16m"))
        else:
            store.chmod(0o500)
        with pytest.raises(StoreUnavailableError, match="a directory that this user may write"):
            ExtentFile(store)


def refuse(monkeypatch: pytest.MonkeyPatch, flag: int, number: int) -> None:
    """Let opening with a flag fail as it does on a file system that does not know the flag."""
    original = os.open

    def fake_open(path: str, flags: int, mode: int = 0o777, **kwargs: int) -> int:
        if flags & flag == flag:
            if flags & os.O_CREAT:  # Linux creates the file before it refuses O_DIRECT
                os.close(original(path, os.O_CREAT | os.O_WRONLY, mode))
            raise OSError(number, os.strerror(number))
        return original(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", fake_open)


def test_without_nameless_files_the_name_is_removed_at_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
):
    refuse(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    with contextlib.closing(ExtentFile(store)) as file:
        assert list(store.iterdir()) == []
        assert file.direct
        status = os.fstat(file._fd)
        assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)
        assert_comes_back(file, MIB + 7, 64, 64)


@pytest.mark.parametrize("when", ["open", "open without O_TMPFILE", "first write"])
def test_without_direct_io_the_page_cache_is_used_and_said(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
):
    if when == "first write":

        def refuse_write(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return original(fd, buffers, offset)

        original = os.pwritev
        monkeypatch.setattr(os, "pwritev", refuse_write)
    else:
        refuse(monkeypatch, os.O_DIRECT, errno.EINVAL)
    if when == "open without O_TMPFILE":
        refuse(monkeypatch, os.O_TMPFILE, errno.EISDIR)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        file = ExtentFile(store)
    assert not file.direct
    assert [record.message for record in caplog.records if "refuses direct I/O" in record.message]
    assert list(store.iterdir()) == []
    for num_bytes in LENGTHS:
        assert_comes_back(file, num_bytes, 64, 65)
    file.close()


def test_a_disk_that_wants_aligned_pages(store: Path, monkeypatch: pytest.MonkeyPatch):
    original = _extent_file.open_nameless
    monkeypatch.setattr(
        _extent_file, "open_nameless", lambda path: original(path)._replace(address_alignment=4096)
    )

    def write(fd: int, buffers: list[memoryview], offset: int) -> int:
        assert all(np.frombuffer(b, np.uint8).ctypes.data % 4096 == 0 for b in buffers)
        return os.pwritev(fd, buffers, offset)

    monkeypatch.setattr(_transfers, "_pwritev", write)
    with contextlib.closing(ExtentFile(store)) as file:
        for num_bytes in LENGTHS:
            assert_comes_back(file, num_bytes, 64, 576)


# ---------------------------------------------------------------- throttles


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_throttled_store_is_as_slow_as_it_should_be(store: Path, direction: str):
    limits = FileStore(store, **{f"{direction}_bytes_per_second": "100MB/s"})
    with contextlib.closing(ExtentFile(limits)) as file:
        memory = Memory(20_000_000 // BLOCK * BLOCK)
        start = time.monotonic()
        span = file.store(memory.address, memory.bytes.nbytes)
        middle = time.monotonic()
        file.load(span, memory.address)
        end = time.monotonic()
    seconds = middle - start if direction == "write" else end - middle
    assert seconds >= 0.2 - 0.010 - 0.001  # with the credit of 10 ms
