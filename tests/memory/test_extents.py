"""First fit against a model that marks every 4096-byte block of the range by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory import ExtentAllocator

BLOCK = 4096


class BlockByBlock:
    """The same allocator, slow and obvious."""

    def __init__(self, num_blocks: int) -> None:
        self.owners: list[int | None] = [None] * num_blocks

    def allocate(self, num_bytes: int) -> int | None:
        length = -(-num_bytes // BLOCK)
        for first in range(len(self.owners) - length + 1):
            if all(owner is None for owner in self.owners[first : first + length]):
                self.owners[first : first + length] = [first] * length
                return first * BLOCK
        return None

    def free(self, offset: int) -> None:
        first = offset // BLOCK
        self.owners = [None if owner == first else owner for owner in self.owners]

    @property
    def used_bytes(self) -> int:
        return sum(owner is not None for owner in self.owners) * BLOCK

    @property
    def largest_free(self) -> int:
        marks = "".join("." if owner is None else "#" for owner in self.owners)
        return max(map(len, marks.split("#"))) * BLOCK


@given(
    capacity_bytes=st.integers(0, 24 * BLOCK),
    steps=st.lists(st.one_of(st.integers(1, 7 * BLOCK), st.floats(0, 1, exclude_max=True))),
)
def test_every_step_agrees_with_the_model(capacity_bytes: int, steps: list[int | float]):
    """An integer step allocates that many bytes; a fraction frees that one of those in use."""
    extents, model = ExtentAllocator(capacity_bytes), BlockByBlock(capacity_bytes // BLOCK)
    in_use: list[int] = []
    for step in steps:
        if isinstance(step, int):
            offset = extents.allocate(step)
            assert offset == model.allocate(step)
            if offset is not None:
                in_use.append(offset)
        elif in_use:
            offset = in_use.pop(int(step * len(in_use)))
            extents.free(offset)
            model.free(offset)
        assert extents.used_bytes == model.used_bytes
        assert max(extents._free_lengths, default=0) == model.largest_free
    for offset in in_use:
        extents.free(offset)
    assert extents.used_bytes == 0
    assert max(extents._free_lengths, default=0) == capacity_bytes // BLOCK * BLOCK


def test_ten_thousand_extents_and_their_holes():
    extents = ExtentAllocator(20_000 * BLOCK)
    offsets = [extents.allocate(BLOCK) for _ in range(10_000)]
    assert offsets == [index * BLOCK for index in range(10_000)]
    for offset in offsets[::2]:
        extents.free(offset)
    assert extents.allocate(2 * BLOCK) == 10_000 * BLOCK  # no hole is long enough
    assert extents.allocate(BLOCK) == 0
    assert extents.used_bytes == 5003 * BLOCK


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_allocate_refuses_nothing_and_less(num_bytes: int):
    with pytest.raises(ValueError, match="num_bytes must be at least 1"):
        ExtentAllocator(BLOCK).allocate(num_bytes)


def test_free_refuses_what_is_not_in_use():
    extents = ExtentAllocator(8 * BLOCK)
    offset = extents.allocate(2 * BLOCK)
    assert offset == 0
    for wrong in (BLOCK, 4 * BLOCK, -BLOCK):
        with pytest.raises(ValueError, match="not the beginning of an extent in use"):
            extents.free(wrong)
    extents.free(offset)
    with pytest.raises(ValueError, match="freed twice"):
        extents.free(offset)


def test_capacity_must_not_be_negative():
    with pytest.raises(ValueError, match="capacity_bytes must be at least 0"):
        ExtentAllocator(-1)
