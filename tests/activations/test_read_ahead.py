"""Distance that reads run ahead of a backward pass, in bytes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from _waiting import wait_until_written
from penstock.activations import Offload
from penstock.activations._policy import Policy
from penstock.activations._record import RecordTable
from penstock.memory import Tier

MIB = 1024**2
NUM_SAVED = 40
WINDOW_BYTES = 3 * MIB


class KeepsTail(Policy):
    """Of a step's storages the last `num_kept`, a MiB each, stay."""

    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self.kept_bytes = num_kept * MIB
        self._num_leaving = NUM_SAVED - num_kept
        self._num_asked = 0

    def should_offload(self, num_bytes: int, in_backward: bool) -> bool:
        self._num_asked += 1
        return self._num_asked <= self._num_leaving


def resident_in_backward(offload: Offload) -> list[int]:
    """Saved bytes in memory at every node of a backward pass that leaves the reads all the time."""
    resident = []

    def look(gradient: torch.Tensor) -> None:
        wait_until_written(offload)
        resident.append(offload.ledger.resident(Tier.DEVICE))

    with offload:
        hidden = torch.randn(MIB // 4, requires_grad=True) * 1
        for _ in range(NUM_SAVED):
            hidden.register_hook(look)
            hidden = hidden.sin()
        total = hidden.sum()
        del hidden
        wait_until_written(offload)
        total.backward()
    return resident


@pytest.mark.parametrize("num_kept", [0, 2, 10])
def test_reads_fill_the_window_and_the_room_of_what_was_kept(store, num_kept):
    offload = penstock.offload(store, policy="all", min_bytes="1MiB")
    engine = offload._engine
    engine._reads._limits = dataclasses.replace(engine.limits, ahead_bytes=WINDOW_BYTES)
    engine.policy = engine.steps.policy = KeepsTail(num_kept)
    resident = resident_in_backward(offload)
    allowed = num_kept * MIB + WINDOW_BYTES
    assert offload.report().bytes_read == (NUM_SAVED - num_kept) * MIB
    # One more: the storage that the node at work holds belongs to no budget of reads.
    assert max(resident) <= allowed + MIB
    middle = resident[NUM_SAVED // 2]
    assert middle >= allowed - MIB, "the room that kept storages left is not used"
    assert resident[-1] <= MIB
    offload.close()


@pytest.mark.parametrize("num_living", [3, 40])
def test_what_was_saved_before_is_the_newest_first(num_living):
    table = RecordTable()
    records: list[Any] = [SimpleNamespace(number=n, key=n) for n in range(100)]
    table._by_number.update((each.number, each) for each in records[:num_living:2])
    for number, at_most in ((20, 10), (20, 300), (2, 1), (99, 70)):
        older = [each.number for each in table.older_than(records[number], at_most)]
        living = range(0, num_living, 2)
        assert older == [n for n in reversed(living) if number - at_most <= n < number]
