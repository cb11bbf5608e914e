"""Waiting until an `Offload` has done what it was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import penstock
from penstock.activations._engine import Engine
from penstock.activations._record import Activity
from penstock.memory import Tier


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll `condition`; transfers run in threads."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.001)


def wait_until_nothing_is_resident(offload: penstock.activations.Offload) -> None:
    """Block until no tier holds a saved byte: transfers of what is dead have ended."""
    wait_until(lambda: not any(offload.ledger.resident(tier) for tier in Tier))


def nothing_is_held(offload: penstock.activations.Offload, seconds: float = 20.0) -> bool:
    """Return whether every record is gone, as soon as a thread has seen its handles die."""
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
    while _is_moving(engine):
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def _is_moving(engine: Engine) -> bool:
    with engine._lock:  # so that a transfer that has ended is accounted for
        to_read = any(
            record.activity is not Activity.IDLE for record in engine._reads.workers.queue
        )
        return bool(engine._writes.backlog_bytes or engine._reads.num_loading or to_read)
