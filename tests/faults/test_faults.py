"""What goes wrong on real machines, caused for real: right numbers or a clear error, and no rest.

Functions named `child_...` run in a process of their own, which has to be killed, interrupted or
forked: this file is also their program.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
import torch
from torch import nn

import penstock
from penstock.activations import Offload
from penstock.errors import (
    CapacityError,
    StoreError,
    StoreFullError,
    StoreReadError,
    StoreUnavailableError,
    StoreWarning,
)
from penstock.memory import FileStore, Tier, _extent_file

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = pytest.mark.timeout(60)

E = TypeVar("E", bound=BaseException)
KIB, MIB = 1024, 1024**2
WIDTH = 256
BATCH = 1024
ACTIVATION_BYTES = BATCH * WIDTH * 4
NUM_LAYERS = 8
SAVED_BYTES = (2 * NUM_LAYERS + 1) * ACTIVATION_BYTES  # the input, and two of each layer
STOPPED = "Saved activations stay in memory"
QUICK_SECONDS = 15  # for a process to end; most of it is a busy machine's


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Operators as small as these gain nothing from a second one, which spins on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@functools.cache
def model() -> nn.Sequential:
    """Eight layers that save seventeen activations of 1 MiB; never trained."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def forward() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return model()(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()


def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model().parameters())))


@functools.cache
def expected() -> list[torch.Tensor]:
    return gradients(forward())


def equal(found: list[torch.Tensor]) -> bool:
    return all(torch.equal(ours, stock) for ours, stock in zip(found, expected(), strict=True))


@contextlib.contextmanager
def offloading(store: str | os.PathLike[str] | FileStore, **options: object) -> Iterator[Offload]:
    """Everything leaves; afterwards nothing may be left of it in any tier, whatever happened."""
    expected()
    offload = penstock.offload(store, **{"policy": "all", "min_bytes": "4KiB", **options})
    try:
        with offload:
            yield offload
    finally:
        gc.collect()
        wait_until(lambda: offload.ledger.resident(Tier.FILE) == 0)
        offload.close()
    assert offload.ledger.resident(Tier.DEVICE) == 0


def all_written(offload: Offload, num_bytes: int = SAVED_BYTES) -> None:
    """Wait until all that one forward pass saves is in the file."""
    wait_until(lambda: offload.ledger.resident(Tier.FILE) >= num_bytes)


def error_of(kind: type[E], call: Callable[..., object], *arguments: object) -> E:
    """The error that `call` must raise, without the frames that would keep a graph alive."""
    try:
        call(*arguments)
    except kind as error:
        link: BaseException | None = error
        while link is not None:
            link.__traceback__ = None
            link = link.__cause__ or link.__context__
        return error
    pytest.fail(f"did not raise {kind.__name__}")


def stopped(offload: Offload) -> bool:
    return offload.report().reason.startswith("offloading stopped")


def steps_until_stopped(offload: Offload) -> None:
    """Right numbers before the store fails, while it does and afterwards."""
    assert equal(gradients(forward()))
    wait_until(lambda: stopped(offload))
    for _ in range(2):
        assert equal(gradients(forward()))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll `condition`; transfers run in threads."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


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
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
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
    """Somebody else fills the disk between two layers."""
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
        monkeypatch.setattr(_extent_file, "_pwritev", self._pwritev)
        monkeypatch.setattr(_extent_file, "_preadv", self._preadv)

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
    directory = Path("/dev/shm")
    if not directory.is_dir():
        pytest.skip("there is no /dev/shm")
    before = set(directory.iterdir())
    with pytest.warns(StoreWarning, match="RAM"), offloading(directory):
        assert equal(gradients(forward()))
    assert not [path for path in set(directory.iterdir()) - before if "penstock" in path.name]


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


# ---------------------------------------------------------- signals, processes


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which would also stop pytest."""


def test_interrupts_at_any_moment(store, monkeypatch):
    """An exception out of nowhere between two byte codes reaches the caller; the next step is
    right, and what was saved is freed.
    """
    numbers = random.Random(2)
    lost: list[str] = []  # in destructors, which cannot raise
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: object) -> NoReturn:
        raise Interrupted

    monkeypatch.setattr(sys, "unraisablehook", lambda problem: lost.append(repr(problem.object)))
    previous = signal.signal(signal.SIGUSR1, interrupt)
    num_interrupted = 0
    try:
        with offloading(store, device_memory=4 * ACTIVATION_BYTES) as offload:
            for _ in range(30):
                timer = threading.Timer(
                    numbers.uniform(0.0, 0.05), signal.pthread_kill, (main, signal.SIGUSR1)
                )
                try:
                    timer.start()
                    while timer.is_alive():
                        assert equal(gradients(forward()))
                except Interrupted:
                    num_interrupted += 1
                timer.join()
                assert equal(gradients(forward()))
            assert offload.report().bytes_read > 0
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not lost
    assert num_interrupted == 30


def search_path() -> str:
    """PYTHONPATH with which a child imports this very Penstock."""
    source = str(Path(penstock.__file__).parent.parent)
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def child(name: str, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the function `name` of this file; returns when it says that it is ready.

    It is killed at the end, if it is still there.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, name, str(store)],
        env={**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        assert said == "ready\n", said + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def child_that_never_ends(store: str) -> NoReturn:
    """Trains for ever; says that it is ready when a step is under way and bytes have left."""
    with penstock.offload(store, policy="all", min_bytes="4KiB") as offload:
        kept = forward()
        all_written(offload)
        say_ready()
        while True:
            gradients(forward())
        del kept


def child_that_waits_for_its_store(store: str) -> NoReturn:
    """Its store is so slow that the computation stands still."""
    slow = FileStore(store, write_bytes_per_second="1MB/s")
    offload = penstock.offload(slow, device_memory=2 * MIB, policy="all", min_bytes="4KiB")
    with offload:
        threading.Timer(0.5, say_ready).start()
        while True:
            gradients(forward())


def test_sigkill_in_the_middle_of_a_step(store):
    """The kernel takes the nameless file back, and its space."""
    with child("child_that_never_ends", store) as process:
        assert not list(store.iterdir())  # no name, even while it is in use
        used = os.statvfs(store)
        process.kill()
        assert process.wait(QUICK_SECONDS) == -signal.SIGKILL
        assert not list(store.iterdir())
        # The file is preallocated by 64 MiB; the disk is shared, hence half of it.
        wait_until(lambda: (os.statvfs(store).f_bfree - used.f_bfree) * used.f_frsize > 32 * MIB)


@pytest.mark.parametrize("name", ["child_that_never_ends", "child_that_waits_for_its_store"])
def test_sigint(store, name):
    with child(name, store) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=QUICK_SECONDS)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in said
    assert not list(store.iterdir())


def child_that_forks(store: str) -> None:
    """Forks with saved tensors in memory, in the file and on their way; both sides go on."""
    torch.set_num_threads(1)
    slow = FileStore(store, write_bytes_per_second="20MB/s")
    offload = penstock.offload(store, policy="all", min_bytes="4KiB")
    slow_offload = penstock.offload(slow, policy="all", min_bytes="4KiB")
    with offload:
        in_file = forward()
        all_written(offload)
        with slow_offload:
            on_its_way = forward()
        with penstock.offload(store, min_bytes="1GiB") as idle:
            in_memory = forward()
        # PyTorch forbids a backward pass in the child if the parent has run one before the fork.
        pid = os.fork()
        if pid == 0:
            in_the_child(store, offload, in_file, on_its_way, in_memory)
    say_ready()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for loss in (in_file, on_its_way, in_memory):
        assert equal(gradients(loss))
    with offload:
        loss = forward()
        all_written(offload)
        assert equal(gradients(loss))
    del in_file, on_its_way, in_memory, loss
    gc.collect()
    with offload:  # and with nothing saved that is alive
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for each in (offload, slow_offload, idle):
        each.close()


def in_the_child(
    store: str,
    offload: Offload,
    in_file: torch.Tensor,
    on_its_way: torch.Tensor,
    in_memory: torch.Tensor,
) -> NoReturn:
    """What a forked process may do: use what is in memory, be told about the rest, start anew."""
    signal.alarm(30)  # a hang ends the child, and the parent sees how
    assert equal(gradients(in_memory))
    for loss in (in_file, on_its_way):
        with contextlib.suppress(StoreError):
            assert equal(gradients(loss))
    assert "forked" in str(error_of(StoreError, gradients, in_file))
    assert offload.report().saved_bytes > 0
    offload.timeline()
    assert equal(gradients(forward()))  # inside the parent's block: everything stays
    with offload:
        assert equal(gradients(forward()))
    del in_file, on_its_way, in_memory, loss
    gc.collect()
    with penstock.offload(store, policy="all", min_bytes="4KiB") as own:
        loss = forward()
        all_written(own)
        assert equal(gradients(loss))
    del loss
    own.close()
    offload.close()
    sys.exit(0)  # through the parent's `with` block and all exit handlers


def test_fork_while_offloading(store):
    with child("child_that_forks", store) as process:
        _, said = process.communicate(timeout=50)
        assert process.returncode == 0, said
    assert not list(store.iterdir())


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
