"""An `Offload` that sends out everything, and must hold nothing in the end."""

from __future__ import annotations

import gc
import threading

import pytest

import penstock
from _waiting import nothing_is_held, wait_until_written
from penstock.memory import Tier


@pytest.fixture(scope="module")
def shared(real_disk):
    """One Offload for all tests here, so that each finds it as the others have left it."""
    offload = penstock.offload(real_disk, policy="all", min_bytes="0B")
    yield offload
    offload.close()


@pytest.fixture
def everything(shared):
    """An Offload that sends out every eligible byte, and at the end holds none any more."""
    gc.disable()
    yield shared
    try:
        assert nothing_is_held(shared), "storages are held until the next garbage collection"
        wait_until_written(shared)
        if shared.ledger.resident(Tier.DEVICE):  # PyTorch's own cycles may hold a tensor in use
            gc.collect()
            shared._engine.settle()
        assert [shared.ledger.resident(tier) for tier in Tier] == [0, 0, 0]
        assert shared._num_entered == 0
    finally:
        gc.enable()
        for thread in threading.enumerate():
            if thread.name.startswith("penstock"):
                thread.join(10)
