"""The checker of packings finds every kind of fault by its name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planner import Buffer, Packing, check_packing, pack

BUFFERS = [
    Buffer(0, 4, 8, alignment=4),
    Buffer(2, 6, 8, offset=8),
    Buffer(4, 8, 8, gaps=((5, 7),)),
    Buffer(5, 7, 4),
]
GOOD = Packing(
    offsets=(0, 8, 0, 0),
    height=16,
    lower_bound=16,
    optimal=True,
    method="best fit",
    engine="python",
    num_buffers=4,
    num_parts=1,
    num_nodes=0,
    pack_seconds=0.0,
)


def test_a_good_packing_passes():
    check_packing(BUFFERS, GOOD, capacity=16)
    check_packing(BUFFERS, pack(BUFFERS))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("count", {"offsets": (0, 8, 0)}),
        ("offset", {"offsets": (0, 8, -4, 0)}),
        ("alignment", {"offsets": (2, 8, 0, 0)}),
        ("fixed offset", {"offsets": (0, 9, 0, 0)}),
        ("overlap", {"offsets": (0, 8, 7, 0)}),
        ("overlap", {"offsets": (4, 8, 0, 0)}),
        ("overlap", {"offsets": (0, 8, 0, 6)}),
        ("height", {"height": 15}),
        ("lower bound", {"lower_bound": 17}),
        ("lower bound", {"lower_bound": 12}),
        ("lower bound", {"optimal": False}),
    ],
)
def test_a_fault_is_named(rule: str, changes):
    with pytest.raises(PlanError) as caught:
        check_packing(BUFFERS, dataclasses.replace(GOOD, **changes))
    assert caught.value.rule == rule


def test_a_capacity_that_is_exceeded_is_named():
    with pytest.raises(PlanError) as caught:
        check_packing(BUFFERS, GOOD, capacity=15)
    assert caught.value.rule == "capacity"


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 6)),
        min_size=2,
        max_size=8,
    )
)
@settings(max_examples=200)
def test_overlaps_are_those_of_every_pair_at_every_moment(cases):
    """Random offsets, mostly wrong: the sweep agrees with looking at all pairs."""
    buffers = [Buffer(lower, lower + length, size) for lower, length, size, _ in cases]
    offsets = tuple(offset for *_, offset in cases)
    wrong = any(
        one.lower < other.upper
        and other.lower < one.upper
        and offsets[i] < offsets[j] + other.size
        and offsets[j] < offsets[i] + one.size
        for i, one in enumerate(buffers)
        for j, other in enumerate(buffers[:i])
    )
    height = max(offset + buffer.size for offset, buffer in zip(offsets, buffers, strict=True))
    packing = dataclasses.replace(
        GOOD, offsets=offsets, height=height, lower_bound=height, optimal=True
    )
    if not wrong:
        check_packing(buffers, packing)
        return
    with pytest.raises(PlanError) as caught:
        check_packing(buffers, packing)
    assert caught.value.rule == "overlap"
