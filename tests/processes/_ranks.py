"""Processes that talk to each other over gloo."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import spawn as mp_spawn
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import distributed, multiprocessing

from fork_servers import find_python

NUM_RANKS = 2
PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # for those that ask for any
LOWEST_PORT = 10_000
PRELOADED = ["accelerate", "lightning", "peft", "_sharded_cases", "_rank_cases", "_layer_models"]
PRELOADED += [f"penstock.{name}" for name in ("batching", "lora", "spectral", "unified")]
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch came without gloo",
)


def outputs_of_ranks(program: list[str], *arguments: object, seconds: float = 240) -> list[str]:
    """Run a Python program as `program rank port arguments` for each rank; return what they print.

    Where one fails or time is up all are killed, as the others would wait for it.
    """
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [find_python("dynamo"), *program, str(rank), str(port), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    deadline = time.monotonic() + seconds
    try:
        while any(each.poll() is None for each in ranks) and time.monotonic() < deadline:
            if any(each.poll() for each in ranks):
                break
            time.sleep(0.02)
        codes = [each.poll() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
        outputs = [each.communicate()[0] for each in ranks]
    assert codes == [0] * NUM_RANKS, "exit statuses of the ranks (None: it was still running)"
    return outputs


def spawn(work: Callable[[Path], Any], num_ranks: int, folder: Path) -> list[Any]:
    """Run `work(folder)` on ranks as torchrun would start them; return what each returns."""
    start(work, num_ranks, folder, join=True)
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def start(
    work: Callable[[Path], Any], num_ranks: int, folder: Path, *, join: bool = False
) -> list[Any]:
    """Start `work(folder)` on ranks, each of which saves what it returns; return the processes."""
    # Imports take most of the time: one process does them for all ranks of all tests. It looks for
    # modules where Python does by itself, not where pytest has added folders.
    multiprocessing.set_forkserver_preload(PRELOADED)
    found = {"PYTHONPATH": os.pathsep.join(sys.path)}
    libraries = mock.patch.object(mp_spawn, "_python_exe", os.fsencode(find_python("libraries")))
    arguments = (num_ranks, _free_port(), work, str(folder))
    with mock.patch.dict(os.environ, found), libraries:
        started = multiprocessing.start_processes(
            _one_rank, arguments, nprocs=num_ranks, join=join, start_method="forkserver"
        )
    return [] if started is None else started.processes


def leave() -> NoReturn:
    """End the process of a rank that has done its work, once nothing of Penstock runs in it.

    Python is not finalised: a thread of gloo that lets go of its last tensor meanwhile is unwound
    where it waits for the GIL, and aborts the process (pytorch/pytorch#190489).
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    gc.collect()
    left = [each.name for each in threading.enumerate() if each.name.startswith("penstock")]
    assert not left, f"threads are left: {left}"
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _one_rank(
    rank: int, num_ranks: int, port: int, work: Callable[[Path], Any], folder: str
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    torch.set_num_threads(1)
    gc.freeze()  # collections, and captures, would look at what all these libraries hold
    torch.save(work(Path(folder)), f"{folder}/{rank}.pt")
    leave()


_next_ports = itertools.count(random.Random(os.getpid()).randrange(2**16))


def _free_port() -> int:
    """Return a port that the kernel gives to none who asks for any, as ranks of other tests do.

    Processes of tests that run at the same time count from different numbers.
    """
    given = PORTS.read_text().split() if PORTS.exists() else ["0"]
    num_ports = int(given[0]) - LOWEST_PORT
    for number in _next_ports:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", LOWEST_PORT + number % num_ports if num_ports > 1000 else 0))
            return free.getsockname()[1]
    raise AssertionError("unreachable")
