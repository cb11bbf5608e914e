"""Memory for tables and for the rows that are gathered from them."""

from __future__ import annotations

import os
import re

import pytest
import torch

from penstock.unified import unify
from penstock.unified.host.memory import TableMemory, advise_huge_pages

MIB = 2**20


def flags_at(address: int) -> set[str]:
    """What the kernel notes of the mapping that holds an address; "hg" is for huge pages."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= address < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.fixture(autouse=True)
def _huge_pages_exist():
    with open("/proc/self/smaps") as lines:
        if not any(line.startswith("THPeligible") for line in lines):
            pytest.skip("this kernel has no transparent huge pages")


def test_large_results_ask_for_huge_pages():
    table = unify(torch.rand(1000, 256), device="cpu")
    index = torch.randint(0, 1000, (64 * MIB // 1024,))
    large = table[index]
    assert "hg" in flags_at(large.data_ptr() + large.nbytes // 2)
    assert torch.equal(large, table.cpu()[index])


def test_only_whole_huge_pages_of_the_tensor_itself_are_asked_for():
    memory = TableMemory(64 * MIB).tensor((64 * MIB,), torch.uint8)
    assert "hg" in flags_at(memory.data_ptr())
    plain = torch.empty(128 * MIB, dtype=torch.uint8)
    gap = -plain.data_ptr() % (2 * MIB)
    begin, end = gap + 4 * MIB + 1, gap + 60 * MIB - 1
    advise_huge_pages(plain[begin:end])
    start = plain.data_ptr()
    assert "hg" in flags_at(start + gap + 6 * MIB) and "hg" in flags_at(start + gap + 58 * MIB - 1)
    assert "hg" not in flags_at(start + begin)
    assert "hg" not in flags_at(start + end - 1)


def test_memory_that_is_shared_still_asks_for_huge_pages():
    """Several chunks of it, and a part of a page at the end."""
    num_bytes = 130 * MIB + 5
    memory = TableMemory(num_bytes)
    content = memory.tensor((num_bytes,), torch.uint8)
    content[::4099] = 7
    address = content.data_ptr()
    memory.share()
    assert content.data_ptr() == address and memory.descriptor is not None
    assert {"sh", "hg"} <= flags_at(address) and {"sh", "hg"} <= flags_at(address + 129 * MIB)
    expected = torch.zeros(num_bytes, dtype=torch.uint8)
    expected[::4099] = 7
    assert torch.equal(content, expected)
    other = TableMemory(num_bytes, os.dup(memory.descriptor))
    assert torch.equal(other.tensor((num_bytes,), torch.uint8), expected)
