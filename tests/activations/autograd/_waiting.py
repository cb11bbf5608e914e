"""Waiting until an `Offload` has done what it was asked for."""

from __future__ import annotations

import time

import penstock


def nothing_is_held(offload: penstock.activations.Offload, seconds: float = 5.0) -> bool:
    """Whether every record is gone, as soon as a thread has seen its handles die."""
    deadline = time.monotonic() + seconds
    while True:
        offload._engine.settle()
        if not len(offload._engine._records):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)


def wait_until_written(offload: penstock.activations.Offload) -> None:
    """Block until no transfer is queued or under way."""
    engine, deadline = offload._engine, time.monotonic() + 60
    while engine._backlog_bytes or engine._num_loading:
        assert time.monotonic() < deadline
        time.sleep(1e-4)
