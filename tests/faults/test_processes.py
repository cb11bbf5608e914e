"""Interrupts, SIGKILL, SIGINT and forks, caused for real.

Functions named `child_...` run in a process of their own, which has to be killed, interrupted or
forked: this file is also their program.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import penstock
from _training import (
    ACTIVATION_BYTES,
    MIB,
    all_written,
    equal,
    error_of,
    forward,
    gradients,
    offloading,
)
from _waiting import wait_until
from penstock.activations import Offload
from penstock.errors import StoreError
from penstock.memory import FileStore

pytest.importorskip("pytest_timeout", reason="a hang would not end")
pytestmark = pytest.mark.timeout(60)

QUICK_SECONDS = 45  # for a process to end; most of it is a busy machine's


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
                    numbers.uniform(0.0, 0.02), signal.pthread_kill, (main, signal.SIGUSR1)
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
    from fork_servers import WHOLE_END, find_python  # the program has no such module

    process = subprocess.Popen(
        [find_python("torch"), __file__, name, str(store)],
        env=os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"} | WHOLE_END,
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
    slow = FileStore(store, write_bytes_per_second="250kB/s")
    budget = 2 * ACTIVATION_BYTES
    offload = penstock.offload(slow, device_memory=budget, policy="all", min_bytes="4KiB")
    with offload:
        threading.Timer(0.5, say_ready).start()
        while True:
            gradients(forward())


def bytes_in_nameless_files(store: Path) -> int:
    """What open files of a directory, which have no name there, take of the disk."""
    taken = {}
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if os.readlink(path).startswith(f"{store}/"):
                status = path.stat()
                assert status.st_nlink == 0
                taken[status.st_ino] = status.st_blocks * 512
    return sum(taken.values())


def test_sigkill_in_the_middle_of_a_step(store):
    """The kernel takes the nameless file back, and its space: no process has it any more."""
    with child("child_that_never_ends", store) as process:
        assert not list(store.iterdir())  # no name, even while it is in use
        assert bytes_in_nameless_files(store) >= 64 * MIB  # for which there is space in advance
        process.kill()
        assert process.wait(QUICK_SECONDS) == -signal.SIGKILL
        assert not list(store.iterdir())
        wait_until(lambda: bytes_in_nameless_files(store) == 0)


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
    slow = FileStore(store, write_bytes_per_second="5MB/s")
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
