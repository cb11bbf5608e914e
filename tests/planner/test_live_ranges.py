"""Bytes of intervals by position, and lists as arrays, beside plain loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner._live_ranges import columns_of, occupied_bytes
from penstock.planner._native_calls import flatten


@given(
    num_positions=st.integers(1, 9),
    intervals=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12), st.integers(0, 99))),
)
def test_intervals_across_the_end_of_a_step_go_on_at_its_beginning(num_positions, intervals):
    rows = [(start % num_positions, length, size) for start, length, size in intervals]
    expected = [0] * num_positions
    for start, length, size in rows:
        for position in {p % num_positions for p in range(start, start + length)}:
            expected[position] += size
    columns = columns_of([(start, start + length, size) for start, length, size in rows])
    assert occupied_bytes(*columns, num_positions).tolist() == expected


def test_lists_of_small_numbers_may_be_many():
    rows = [[1, 2], [], [3] * 300]
    first, items = flatten(rows, np.int32)
    assert first.tolist() == [0, 2, 2, 302]
    assert flatten(rows, np.uint8)[1].tolist() == items.tolist() == [1, 2, *[3] * 300]
