"""Stores that fail, caused for real: right numbers or a clear error, and nothing left behind."""

from __future__ import annotations

import collections
import contextlib
import errno
import gc
import os
import random
import resource
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import penstock
from _training import (
    ACTIVATION_BYTES,
    KIB,
    MIB,
    NUM_LAYERS,
    all_written,
    equal,
    error_of,
    forward,
    gradients,
    model,
    offloading,
    steps_until_stopped,
    stopped,
)
from _waiting import wait_until
from penstock.errors import (
    CapacityError,
    StoreFullError,
    StoreReadError,
    StoreUnavailableError,
    StoreWarning,
)
from penstock.memory import FileStore, Tier, _transfers

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = pytest.mark.timeout(60)

STOPPED = "Saved activations stay in memory"


# ---------------------------------------------------------------- a full store


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_store_full_in_the_middle_of_a_step(store, policy):
    """What does not fit stays in memory: nothing is lost, and it is said once."""
    limited = FileStore(store, max_bytes=5 * ACTIVATION_BYTES)
    with offloading(limited, policy=policy) as offload:
        with pytest.warns(RuntimeWarning, match=STOPPED) as warned:
            steps_until_stopped(offload)
        assert len(warned) == 1
        assert "max_bytes" in str(warned[0].message)
        assert offload.report().peak_file_bytes <= 5 * ACTIVATION_BYTES


def test_store_full_under_a_budget_is_an_error(store):
    """Neither the budget nor the store gives way, so the forward pass says so."""
    limited = FileStore(store, max_bytes=5 * ACTIVATION_BYTES)
    budget = 4 * ACTIVATION_BYTES
    with offloading(limited, device_memory=budget) as offload:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                error = error_of(CapacityError, forward)
            assert f"device_memory={budget}" in str(error)
        assert offload.report().peak_device_bytes <= budget + ACTIVATION_BYTES


def test_file_size_limit_of_the_process(store):
    """`ulimit -f`: the operating system refuses to let the file grow (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with offloading(store) as offload:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * ACTIVATION_BYTES, hard))
        try:
            with pytest.warns(RuntimeWarning, match=STOPPED):
                steps_until_stopped(offload)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "27" in offload.report().reason  # EFBIG


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[Path]:
    """A directory with a file system mounted on it; skips where that is not permitted."""
    # Not below tmp_path: another pytest session tidies that up and would find it busy.
    directory = Path(tempfile.mkdtemp(prefix="penstock-mount-"))
    try:
        command = ["mount", *arguments, str(directory)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if ended.returncode:
            pytest.skip(f"mounting is not permitted here: {ended.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
    finally:
        directory.rmdir()


@pytest.mark.filterwarnings("ignore::penstock.errors.StoreWarning")  # tmpfs is RAM
def test_file_system_full_in_the_middle_of_a_step():
    """Another program fills the disk between two layers."""
    reserve = 64 * MIB  # what Penstock leaves free for everyone else
    with mounted("-t", "tmpfs", "-o", f"size={reserve + 40 * MIB}", "tmpfs") as directory:
        with offloading(directory) as offload:

            def fill(*_: object) -> None:
                if not stopped(offload):
                    all_written(offload, 3 * ACTIVATION_BYTES)
                with (directory / "ballast").open("ab", buffering=0) as ballast:
                    with contextlib.suppress(OSError):  # once it is full
                        while ballast.write(bytes(64 * KIB)):
                            pass

            with model()[6].register_forward_hook(fill):
                with pytest.warns(RuntimeWarning, match=STOPPED):
                    steps_until_stopped(offload)
        assert [path.name for path in directory.iterdir()] == ["ballast"]


# ------------------------------------------------------------------ I/O errors


class Disk:
    """Stands between Penstock and the operating system's reads and writes, and makes some fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_writes = 0
        self.write: Callable[[int, Sequence[memoryview], int], int] = os.pwritev
        self.read: Callable[[int, Sequence[memoryview], int], int] = os.preadv
        monkeypatch.setattr(_transfers, "_pwritev", self._pwritev)
        monkeypatch.setattr(_transfers, "_preadv", self._preadv)

    def _pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.num_writes += 1
        return self.write(fd, buffers, offset)

    def _preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self.read(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def failing(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("num_good", [0, 7])
def test_write_error(store, disk, num_good):
    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if disk.num_writes > num_good:
            failing()
        return os.pwritev(fd, buffers, offset)

    with offloading(store) as offload:
        disk.write = write
        with pytest.warns(RuntimeWarning, match=STOPPED) as warned:
            steps_until_stopped(offload)
        assert len(warned) == 1
        assert "errno 5" in offload.report().reason
        assert disk.num_writes <= num_good + 2  # one for each writer


def test_write_error_where_warnings_are_errors(store, disk):
    """`python -W error`: training is told, once, and the threads' books stay in order."""
    disk.write = failing
    with offloading(store, device_memory=64 * ACTIVATION_BYTES) as offload:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            error = error_of(RuntimeWarning, steps_until_stopped, offload)
            assert "errno 5" in str(error)
            steps_until_stopped(offload)


def test_read_error(store, disk):
    """A clear error out of the backward pass, and the next step is right again."""
    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        disk.read = failing
        error = error_of(StoreReadError, gradients, loss)
        assert (error.errno, error.path) == (errno.EIO, str(store))
        assert str(store) in str(error)
        del loss
        disk.read = os.preadv
        loss = forward()
        all_written(offload)
        assert equal(gradients(loss))
        del loss


def test_backward_again_after_a_read_error(store, disk):
    """Nothing was lost: with `retain_graph` the same graph can be used when the disk is back."""
    weights = list(model().parameters())
    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        disk.read = failing
        error_of(StoreReadError, lambda it: torch.autograd.grad(it, weights, None, True), loss)
        disk.read = os.preadv
        assert equal(gradients(loss))
        del loss


def test_read_error_while_another_graph_is_being_written(store, disk):
    """The account of what is resident stays right, or the budget would no longer hold."""
    go_on = threading.Event()

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        go_on.wait(20)
        return os.pwritev(fd, buffers, offset)

    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        disk.write, disk.read = write, failing
        num_writes = disk.num_writes
        abandoned = forward()
        wait_until(lambda: disk.num_writes > num_writes)
        del abandoned  # with transfers under way
        error_of(StoreReadError, gradients, loss)
        disk.read = os.preadv
        del loss
        offload.report()
        go_on.set()
        assert equal(gradients(forward()))
        gc.collect()
        wait_until(lambda: offload.ledger.resident(Tier.FILE) == 0)
        assert offload.ledger.resident(Tier.DEVICE) == 0


def test_passing_read_errors_are_read_again(store, disk):
    """Each place fails twice before it can be read."""
    num_tries: collections.Counter[int] = collections.Counter()

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_tries[offset] += 1
        if num_tries[offset] <= 2:
            failing()
        return os.preadv(fd, buffers, offset)

    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        disk.read = read
        assert equal(gradients(loss))
        del loss
    assert sum(num_tries.values()) >= 3 * len(num_tries) >= 3 * NUM_LAYERS


@pytest.mark.parametrize("direction", ["write", "read", "both"])
def test_short_transfers(store, disk, direction):
    """The system moves fewer bytes than asked, at any count, as after a signal; never none."""
    numbers = random.Random(1)

    def shorter(buffers: Sequence[memoryview]) -> list[memoryview]:
        length = len(buffers[0])
        keep = numbers.choice([length, max(4096, length // 3), max(4096, length // 2 + 17)])
        return [buffers[0][:keep]]

    def write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        cut = shorter(buffers)
        aligned = cut[0][: len(cut[0]) // 4096 * 4096]  # direct I/O moves whole blocks
        moved = os.pwritev(fd, [aligned], offset)
        return moved if moved <= 4096 or numbers.random() < 0.7 else moved - 100

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        aligned = len(shorter(buffers)[0]) // 4096 * 4096
        moved = os.preadv(fd, [buffers[0][:aligned]], offset)
        return moved if moved <= 4096 or numbers.random() < 0.7 else moved - 100

    disk.write = write if direction != "read" else os.pwritev
    disk.read = read if direction != "write" else os.preadv
    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        assert equal(gradients(loss))
        del loss


def test_file_cut_off_by_somebody_else(store):
    """Reads beyond the end give nothing: an error, never the zeros of fresh memory."""
    with offloading(store) as offload:
        loss = forward()
        all_written(offload)
        os.ftruncate(offload._file._fd, 2 * ACTIVATION_BYTES)
        assert "shorter" in str(error_of(StoreReadError, gradients, loss))
        del loss


def test_directory_removed_while_training(store):
    """The file has no name, so it lives on until it is closed."""
    directory = store / "scratch"
    directory.mkdir()
    with offloading(directory) as offload:
        loss = forward()
        shutil.rmtree(directory)
        all_written(offload)
        assert equal(gradients(loss))
        del loss


# ----------------------------------------------------------- unsuitable stores


def test_store_in_ram():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # other tests have files there
        with pytest.warns(StoreWarning, match="RAM"), offloading(Path(directory)):
            assert equal(gradients(forward()))
        assert not os.listdir(directory)


def test_store_that_is_no_directory(store):
    (store / "file").write_text("")
    with pytest.raises(StoreUnavailableError, match="not a directory"):
        penstock.offload(store / "file")
    (store / "file").unlink()
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        penstock.offload(store / "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_store_without_write_permission(store):
    store.chmod(0o500)
    with pytest.raises(StoreUnavailableError, match=str(store)):
        penstock.offload(store)


def test_store_on_a_read_only_file_system():
    with mounted("-t", "tmpfs", "-o", "ro,size=1m", "tmpfs") as directory:
        with pytest.raises(StoreUnavailableError, match=str(directory)) as caught:
            penstock.offload(directory)
        assert caught.value.errno == errno.EROFS


def test_store_too_small(store):
    """One activation is larger than the whole store: all stays, and the step is right."""
    with offloading(FileStore(store, max_bytes=4 * KIB)) as offload:
        with pytest.warns(RuntimeWarning, match=STOPPED):
            steps_until_stopped(offload)


def test_file_system_too_small():
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs") as directory:
        with pytest.raises(StoreFullError, match=str(directory)):
            penstock.offload(directory)
