"""Processes that talk to each other over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch

NUM_RANKS = 2
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch came without gloo",
)


def outputs_of_ranks(program: list[str], *arguments: object, seconds: float = 120) -> list[str]:
    """Run a Python program as `program rank port arguments` for each rank; return what they print.

    Where one fails or time is up all are killed, as the others would wait for it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, *program, str(rank), str(port), *map(str, arguments)],
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
