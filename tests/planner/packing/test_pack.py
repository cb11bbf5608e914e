"""Packings are legal, as low as brute force finds, and the same from run to run."""

from __future__ import annotations

import csv
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codegen import find_compiler
from penstock.errors import InfeasibleError
from penstock.planner import Buffer, check_packing, pack
from penstock.planner.packing import _pack as pack_module
from penstock.planner.packing._native import live_bytes

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
DATA = Path(os.environ.get("PENSTOCK_DATA", "")) / "minimalloc"
needs_data = pytest.mark.skipif(
    "PENSTOCK_DATA" not in os.environ or not DATA.exists(),
    reason="set PENSTOCK_DATA to the directory that holds minimalloc/*.csv",
)
CAPACITY = 1048576


def instance(name: str) -> list[tuple[int, int, int]]:
    with (DATA / f"{name}.{CAPACITY}.csv").open() as file:
        return [
            (int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)
        ]


def random_buffers(num_buffers: int, seed: int, longest: int = 20) -> list[tuple[int, int, int]]:
    generator = np.random.default_rng(seed)
    lower = generator.integers(0, num_buffers, num_buffers)
    upper = lower + generator.integers(1, longest, num_buffers)
    size = generator.integers(1, 100, num_buffers)
    return list(zip(lower.tolist(), upper.tolist(), size.tolist(), strict=True))


@st.composite
def buffer_lists(draw: st.DrawFn, largest: int = 6) -> list[Buffer]:
    """A few buffers; fixed offsets are kept apart from each other, so that there is a packing."""
    buffers, next_fixed = [], 0
    for _ in range(draw(st.integers(1, largest))):
        lower = draw(st.integers(0, 6))
        upper = lower + draw(st.integers(1, 5))
        size, alignment = draw(st.integers(0, 5)), draw(st.sampled_from([1, 1, 1, 2, 3]))
        gaps = ()
        if upper - lower >= 3 and draw(st.booleans()):
            gaps = ((lower + 1, draw(st.integers(lower + 2, upper - 1))),)
        offset = None
        if draw(st.integers(0, 5)) == 0:
            offset = -(-(next_fixed + draw(st.integers(0, 2))) // alignment) * alignment
            next_fixed = offset + size
        buffers.append(Buffer(lower, upper, size, alignment, offset, gaps))
    return buffers


def least_height(buffers: list[Buffer]) -> int:
    """By placing the buffers in every order, each at the lowest place above zero that is free.

    Some order gives an optimum: that in which an optimal packing's buffers lie above each other.
    """
    solid = [buffer for buffer in buffers if buffer.size]
    fixed = [(buffer, buffer.offset) for buffer in solid if buffer.offset is not None]
    free = [buffer for buffer in solid if buffer.offset is None]
    best = None
    for order in itertools.permutations(free):
        placed = list(fixed)
        for buffer in order:
            offset = 0
            while any(
                share_a_moment(buffer, other)
                and offset < other_offset + other.size
                and other_offset < offset + buffer.size
                for other, other_offset in placed
            ):
                offset += buffer.alignment
            placed.append((buffer, offset))
        height = max((offset + buffer.size for buffer, offset in placed), default=0)
        best = height if best is None else min(best, height)
    return best or 0


def share_a_moment(one: Buffer, other: Buffer) -> bool:
    def moments(buffer: Buffer) -> set[int]:
        away = {time for start, end in buffer.gaps for time in range(start, end)}
        return set(range(buffer.lower, buffer.upper)) - away

    return bool(moments(one) & moments(other))


@needs_compiler
@given(buffer_lists())
@settings(max_examples=300)
def test_the_height_is_that_of_brute_force(buffers: list[Buffer]):
    packing = pack(buffers, time_limit=20)
    check_packing(buffers, packing)
    assert packing.height == least_height(buffers)
    assert packing.optimal
    assert packing.engine == "c++"


def cut_rectangle(seed: int, num_buffers: int) -> tuple[list[tuple[int, int, int]], int]:
    """A rectangle of time and addresses, cut into buffers, which therefore pack without waste."""
    generator = np.random.default_rng(seed)
    pieces, height = [(0, 60, 0, 60)], 60  # time from, to, address from, to
    while len(pieces) < num_buffers:
        left, right, low, high = pieces.pop(int(generator.integers(len(pieces))))
        if generator.integers(2) and right - left > 3:
            cut = int(generator.integers(left + 1, right))
            pieces += [(left, cut, low, high), (cut, right, low, high)]
        elif high - low > 3:
            cut = int(generator.integers(low + 1, high))
            pieces += [(left, right, low, cut), (left, right, cut, high)]
        else:
            pieces.append((left, right, low, high))
    order = generator.permutation(len(pieces))
    shuffled = [pieces[index] for index in order]
    return [(left, right, high - low) for left, right, low, high in shuffled], height


@needs_compiler
def test_what_was_cut_from_a_rectangle_fits_back_without_waste():
    num_searched = 0
    for seed in range(40):
        buffers, height = cut_rectangle(seed, 90)
        packing = pack(buffers, height, time_limit=60)
        check_packing(buffers, packing, height)
        num_searched += packing.num_nodes > 0
    assert num_searched > 5


@needs_compiler
@given(buffer_lists(), st.integers(0, 3))
@settings(max_examples=150)
def test_a_capacity_is_kept_or_refused_with_proof(buffers: list[Buffer], below: int):
    least = least_height(buffers)
    capacity = max(least - below, 0)
    if capacity == least:
        check_packing(buffers, pack(buffers, capacity), capacity)
        return
    with pytest.raises(InfeasibleError, match="proved") as caught:
        pack(buffers, capacity, time_limit=20)
    assert caught.value.proved
    assert caught.value.minimum_device_bytes is not None
    check_packing(buffers, pack(buffers, caught.value.minimum_device_bytes))


@given(buffer_lists(largest=12))
@settings(max_examples=200)
def test_without_a_compiler_best_fit_packs(buffers: list[Buffer]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_module, "library", lambda: None)
        packing = pack(buffers)
    check_packing(buffers, packing)
    assert packing.engine == "python"
    assert packing.method == "best fit"


def test_a_missing_compiler_is_said_when_the_capacity_is_missed(monkeypatch):
    monkeypatch.setattr(pack_module, "library", lambda: None)
    buffers = random_buffers(60, 1)
    height = pack(buffers).height
    with pytest.raises(InfeasibleError, match="without a C\\+\\+ compiler") as caught:
        pack(buffers, max(live_bytes(map_buffers(buffers)), height - 1))
    assert not caught.value.proved
    assert caught.value.minimum_device_bytes == height


def map_buffers(buffers: list[tuple[int, int, int]]) -> list[Buffer]:
    return [Buffer(*buffer) for buffer in buffers]


@needs_compiler
@needs_data
@pytest.mark.parametrize("name", "ABCDEF")
def test_the_hard_instances_are_packed_at_their_capacity(name: str):
    buffers = instance(name)
    packing = pack(buffers, CAPACITY, time_limit=60)
    check_packing(buffers, packing, CAPACITY)


@needs_compiler
def test_a_hard_packing_is_the_same_again():
    buffers = random_buffers(60, 1)
    first, second = (pack(buffers, time_limit=60, seed=3) for _ in range(2))
    assert first.optimal
    assert first.method == "search"
    assert (first.offsets, first.num_nodes > 0) == (second.offsets, True)


@needs_compiler
def test_parts_that_share_no_moment_are_packed_apart():
    part = random_buffers(30, 2)
    end = max(upper for _, upper, _ in part)
    both = part + [(lower + end, upper + end, size) for lower, upper, size in part]
    packing = pack(both, time_limit=20)
    assert packing.num_parts == 2 * pack(part, time_limit=20).num_parts
    assert packing.height == pack(part, time_limit=20).height


@needs_compiler
def test_many_buffers_are_packed_by_better_orders():
    buffers = random_buffers(6000, 0, longest=40)
    first = pack(buffers, time_limit=0)
    better = pack(buffers, time_limit=20)
    check_packing(buffers, better)
    assert better.optimal
    assert better.height < first.height


@needs_compiler
def test_a_time_limit_of_zero_still_packs():
    buffers = random_buffers(300, 4, longest=100)
    packing = pack(buffers, time_limit=0)
    check_packing(buffers, packing)
    assert packing.method == "best fit"
    with pytest.raises(InfeasibleError, match="time_limit=0") as caught:
        pack(buffers, packing.lower_bound, time_limit=0)
    assert not caught.value.proved
    assert caught.value.minimum_device_bytes == packing.height


def test_a_buffer_that_leaves_and_comes_back_has_room_for_another_between():
    buffers = [Buffer(0, 10, 8, gaps=((3, 7),)), Buffer(3, 7, 8)]
    assert pack(buffers, 8).height == 8
    assert pack([Buffer(0, 10, 8), Buffer(3, 7, 8)]).height == 16


def test_nothing_and_buffers_without_bytes_are_packed():
    assert pack([]).height == 0
    packing = pack([Buffer(0, 1, 0, alignment=4, offset=8), Buffer(0, 1, 0), Buffer(0, 1, 3)])
    check_packing([Buffer(0, 1, 0, offset=8), Buffer(0, 1, 0), Buffer(0, 1, 3)], packing)
    assert packing.offsets == (8, 0, 0)


def test_a_result_prints_and_becomes_json():
    packing = pack([(0, 2, 4), (1, 3, 4)])
    assert packing.to_dict()["offsets"] == [0, 4]
    assert "lower bound" in str(packing)
    assert "offsets" not in str(packing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([(0, 0, 4)],), r"buffers\[0\]: lower=0, upper=0"),
        (([(0, 1, -4)],), "size=-4"),
        (([Buffer(0, 2, 4, offset=0), Buffer(1, 2, 4, offset=3)],), "collide: at time 1"),
        (([(0, 1, 4)], -1), "capacity is -1"),
        (([(0, 1, 4)], 8, -1), "time_limit=-1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message: str):
    with pytest.raises(ValueError, match=message):
        pack(*arguments)


@pytest.mark.parametrize("size", [4.5, "4"])
def test_sizes_that_are_not_whole_are_named(size):
    with pytest.raises(TypeError, match=r"buffers\[1\]: size is"):
        pack([(0, 1, 2), (0, 1, size)])
    with pytest.raises(TypeError, match="size is"):
        Buffer(0, 1, size)


def test_what_is_no_buffer_is_named():
    with pytest.raises(TypeError, match=r"buffers\[1\]='ab'"):
        pack([(0, 1, 2), "ab"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment": 0}, "alignment=0"),
        ({"alignment": 4, "offset": 6}, "offset=6"),
        ({"gaps": ((3, 3),)}, "gaps="),
        ({"gaps": ((0, 9),)}, "leave nothing"),
    ],
)
def test_impossible_buffers_are_refused(fields, message: str):
    with pytest.raises(ValueError, match=message):
        Buffer(0, 9, 4, **fields)
