"""Memory in slots: where huge pages may be, and how much becomes resident."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from penstock.kv._areas import Area, SlotMemory
from penstock.memory.pages import HUGE_PAGE_BYTES


def resident_bytes() -> int:
    """Without pages of files, such as libraries, which the kernel drops and reads again."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def test_parts_are_one_after_the_other_and_keep_the_memory():
    parts = Area(3 * 2**20).cut(3)
    assert parts[0].address % HUGE_PAGE_BYTES == 0
    assert np.diff([part.address for part in parts]).tolist() == [2**20, 2**20]
    for number, part in enumerate(parts):
        part.view(0, part.num_bytes, torch.uint8).fill_(number)
    assert [int(part.view(2**20 - 1, 1, torch.uint8)) for part in parts] == [0, 1, 2]


def test_slots_occupy_little_more_than_what_was_written():
    before = resident_bytes()
    slots = SlotMemory(64 * 2**10)
    for _ in range(80):  # 5 MiB of a slab of 64 MiB
        slots.view(slots.take(), torch.uint8).fill_(1)
    assert resident_bytes() - before <= 5 * 2**20 + 2 * HUGE_PAGE_BYTES


def test_addresses_are_those_of_the_views():
    slots = SlotMemory(48 * 2**20)  # one to a slab
    taken = np.array([slots.take() for _ in range(3)])
    views = [slots.view(int(slot), torch.uint8).data_ptr() for slot in taken]
    assert slots.addresses(taken).tolist() == views
