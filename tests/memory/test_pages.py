"""Pages: rounding, mappings with and without a file, and advice that the kernel takes."""

import ctypes
import errno
import mmap
import os

import pytest
import torch

from penstock.memory import pages
from penstock.memory.pages import HUGE_PAGE_BYTES, PAGE_BYTES, map_anonymous, round_up
from penstock.memory.raw_memory import address_of


@pytest.mark.parametrize(
    ("num_bytes", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)]
)
def test_rounding_up(num_bytes, multiple, expected):
    assert round_up(num_bytes, multiple) == expected


def smaps_of(address: int) -> str:
    """What the kernel says about the mapping that holds an address."""
    found = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            begin, _, rest = line.partition("-")
            if rest[:1] and all(c in "0123456789abcdef" for c in begin):
                end = rest.split()[0]
                found = int(begin, 16) <= address < int(end, 16)
            if found and line.startswith("VmFlags"):
                return line
    raise AssertionError


@pytest.mark.parametrize("private", [False, True])
def test_anonymous_memory_is_zeroed_and_shared_with_a_child_unless_private(private):
    mapping = map_anonymous(3 * PAGE_BYTES + 1, private=private)
    assert len(mapping) == 3 * PAGE_BYTES + 1 and not any(mapping[:])
    assert address_of(mapping) % PAGE_BYTES == 0
    child = os.fork()
    if not child:
        mapping[0] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert mapping[0] == (0 if private else 7)


def test_nothing_can_be_mapped_too():
    assert len(map_anonymous(0)) == 1


def test_huge_pages_are_asked_for():
    mapping = map_anonymous(2 * HUGE_PAGE_BYTES, private=True, huge_pages=True)
    assert " hg" in smaps_of(address_of(mapping))
    mapping = map_anonymous(2 * HUGE_PAGE_BYTES, private=True)
    assert " hg" not in smaps_of(address_of(mapping))


def test_only_huge_pages_within_the_memory_are_asked_for():
    memory = torch.frombuffer(map_anonymous(4 * HUGE_PAGE_BYTES, private=True), dtype=torch.uint8)
    begin = round_up(memory.data_ptr() + 1, HUGE_PAGE_BYTES)
    pages.advise_huge_pages(begin - 1, 1 + 2 * HUGE_PAGE_BYTES - 1)
    assert " hg" in smaps_of(begin)
    assert " hg" not in smaps_of(begin - 1)
    assert " hg" not in smaps_of(begin + HUGE_PAGE_BYTES)
    pages.advise_huge_pages(begin + HUGE_PAGE_BYTES, 100)  # too little for one
    assert " hg" not in smaps_of(begin + HUGE_PAGE_BYTES)


def test_advice_that_is_refused_has_a_number():
    assert pages.advise(address_of(map_anonymous(PAGE_BYTES)), PAGE_BYTES, 12345) == errno.EINVAL


def test_a_file_is_mapped_where_one_says():
    descriptor = os.memfd_create("test")
    try:
        os.truncate(descriptor, PAGE_BYTES)
        os.pwrite(descriptor, b"abc", 0)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = pages.map_at(None, 2 * PAGE_BYTES, flags, -1, 0)
        fixed = mmap.MAP_SHARED | pages.MAP_FIXED
        second = address + PAGE_BYTES
        assert pages.map_at(second, PAGE_BYTES, fixed, descriptor, 0) == second
        assert ctypes.string_at(second, 3) == b"abc" and ctypes.string_at(address, 1) == b"\0"
        pages.unmap(address, 2 * PAGE_BYTES)
        with pytest.raises(OSError, match="Invalid argument"):
            pages.map_at(None, PAGE_BYTES, mmap.MAP_SHARED, descriptor, 1)
    finally:
        os.close(descriptor)
