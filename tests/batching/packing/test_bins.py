"""Bins below a cap: against brute force, against HiGHS, and against lower bounds."""

from __future__ import annotations

import logging
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching import pack_bins
from penstock.batching.packing import FirstFit, _bins, _bound, least_bins
from penstock.batching.packing._completion import complete_bins, find_fillings
from penstock.batching.packing._program import find_patterns, improve
from penstock.solvers import LinearProgram

DISTRIBUTIONS = [(1, 10), (2, 7), (3, 8), (5, 6), (1, 3)]  # of 10


def least_by_force(sizes: list[int], cap: int) -> int:
    """The fewest bins, by trying every bin for every sample (empty ones once)."""
    best = len(sizes)

    def place(number: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if number == len(sizes):
            best = len(loads)
            return
        for index in range(len(loads)):
            if loads[index] + sizes[number] <= cap:
                loads[index] += sizes[number]
                place(number + 1, loads)
                loads[index] -= sizes[number]
        place(number + 1, [*loads, sizes[number]])

    place(0, [])
    return best


def check(sizes, cap: int, packing) -> None:
    """Every sample once, loads as they are and below the cap, descending."""
    assert sorted(chain.from_iterable(packing.bins)) == list(range(len(sizes)))
    assert packing.loads == tuple(sum(int(sizes[i]) for i in each) for each in packing.bins)
    assert all(load <= cap for load in packing.loads)
    assert list(packing.loads) == sorted(packing.loads, reverse=True)
    assert all(list(each) == sorted(each) and each for each in packing.bins)
    assert (packing.num_samples, packing.num_bins) == (len(sizes), len(packing.bins))
    assert packing.lower_bound <= packing.num_bins
    assert packing.optimal == (packing.lower_bound == packing.num_bins)


def triplets(num_bins: int, cap: int, seed: int) -> list[int]:
    """Samples that fill bins exactly, three in each (Falkenauer): the worst for first fit."""
    random = np.random.default_rng(seed)
    sizes = []
    for _ in range(num_bins):
        first = int(random.integers(cap * 38 // 100, cap * 49 // 100))
        second = int(random.integers(cap * 25 // 100, (cap - first) // 2 + 1))
        sizes += [first, second, cap - first - second]
    return sizes


@pytest.mark.parametrize("seed", range(40))
def test_few_samples_are_in_the_fewest_bins(seed: int):
    random = np.random.default_rng(seed)
    low, high = DISTRIBUTIONS[seed % len(DISTRIBUTIONS)]
    sizes = random.integers(low, high + 1, random.integers(1, 11)).tolist()
    fewest = least_by_force(sizes, 10)
    packing = pack_bins(sizes, 10)
    check(sizes, 10, packing)
    assert packing.lower_bound <= fewest == packing.num_bins
    first_fit = pack_bins(sizes, 10, time_limit=0)
    check(sizes, 10, first_fit)
    assert first_fit.num_bins <= fewest + 1


def fewer_bins_by_highs(sizes: list[int], cap: int, num_bins: int) -> bool | None:
    """Whether so many bins are enough: x[i, b] = 1 if sample i is in bin b; None if unknown."""
    program = LinearProgram()
    columns = [[program.column(upper=1.0, integer=True) for _ in range(num_bins)] for _ in sizes]
    for each in columns:
        program.row(each, [1.0] * num_bins, lower=1.0, upper=1.0)
    for number in range(num_bins):
        program.row([each[number] for each in columns], [float(size) for size in sizes], upper=cap)
    program.solve(time_limit=1.0)
    if program.proved_infeasible:
        return False
    return True if program.has_solution else None


@pytest.mark.parametrize("num_samples", [20, 40, 60])
@pytest.mark.parametrize("seed", range(3))
def test_up_to_sixty_samples_are_within_a_bin_of_the_optimum_of_highs(num_samples: int, seed: int):
    random = np.random.default_rng(100 * num_samples + seed)
    low, high = DISTRIBUTIONS[seed]
    sizes = random.integers(10 * low, 10 * high, num_samples).tolist()
    packing = pack_bins(sizes, 100)
    check(sizes, 100, packing)
    # At most one bin above what the bound proves, or two bins fewer are tried.
    if packing.num_bins - packing.lower_bound > 1:
        assert not fewer_bins_by_highs(sizes, 100, packing.num_bins - 2)


@pytest.mark.parametrize(("cap", "seed"), [(1000, 0), (1000, 1), (10**6, 0), (10**6, 1)])
def test_samples_that_fill_their_bins_exactly_are_within_a_bin(cap: int, seed: int):
    sizes = triplets(20, cap, seed)
    packing = pack_bins(sizes, cap, time_limit=0.5)
    check(sizes, cap, packing)
    assert packing.num_bins <= 21 and packing.lower_bound == 20
    # First fit alone is not enough for that.
    row = FirstFit(cap)
    assert max(row.place(size) for size in sorted(sizes, reverse=True)) + 1 > 21


def test_where_first_fit_decreasing_is_worst():
    """Johnson's example: 11 bins for 9."""
    sizes = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    row = FirstFit(100)
    assert max(row.place(size) for size in sizes) + 1 == 11
    assert pack_bins(sizes, 100, time_limit=0).num_bins == 9


def test_a_hundred_thousand_samples_are_close_to_the_bound():
    sizes = np.random.default_rng(0).integers(1, 1500, 100_000)
    packing = pack_bins(sizes, 4096)
    check(sizes.tolist(), 4096, packing)
    assert packing.num_bins <= packing.lower_bound + 1


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(50, 200))
def test_any_samples_are_packed(sizes: list[int], cap: int):
    packing = pack_bins(sizes, cap, time_limit=0)
    check(sizes, cap, packing)
    assert packing == pack_bins(np.array(sizes, dtype=np.int64), cap, time_limit=0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))
def test_the_bound_is_below_the_optimum(sizes: list[int]):
    least, fewest = least_bins(np.array(sizes), 12), least_by_force(sizes, 12)
    assert -(-sum(sizes) // 12) <= least <= fewest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_bound, "_FEW", 0)
        assert least_bins(np.array(sizes), 12) == least


@pytest.mark.parametrize("few", [0, _bound._FEW])
def test_the_bound_counts_samples_that_share_no_bin(monkeypatch, few: int):
    monkeypatch.setattr(_bound, "_FEW", few)
    assert least_bins(np.array([6, 6, 6]), 10) == 3  # the sum alone: 2
    assert least_bins(np.array([7, 7, 4, 4]), 10) == 3  # 4 fits beside no 7
    assert least_bins(np.array([0, 0]), 10) == 1
    assert least_bins(np.array([], dtype=np.int64), 10) == 0
    assert least_bins(np.array([1 << 60, 1 << 60]), 1 << 60) == 2  # within 64 bits


def test_zero_sizes_and_none_at_all():
    assert pack_bins([], 10).bins == ()
    assert pack_bins([0, 0], 10).bins == ((0, 1),)
    packing = pack_bins([5, 0, 5, 4, 4, 0, 2], 10)
    check([5, 0, 5, 4, 4, 0, 2], 10, packing)
    assert packing.num_bins == 2


def test_arrays_tensors_and_strings_are_taken():
    wanted = pack_bins([700, 400, 300], 1024).bins
    assert pack_bins(np.array([700, 400, 300], dtype=np.int32), "1KiB").bins == wanted
    assert pack_bins(torch.tensor([700, 400, 300]), "1 KiB").bins == wanted == ((0, 2), (1,))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=60),
    st.integers(1, 4),
)
def test_first_fit_is_that_of_a_plain_loop(samples: list[tuple[int, int]], num_bins: int):
    row, room = FirstFit(9, num_bins), [9] * 100
    for size, first in samples:
        wanted = next(i for i in range(first, 100) if room[i] >= size)
        room[wanted] -= size
        assert row.place(size, first) == wanted


def test_fillings_leave_no_more_than_they_may():
    sizes = [6, 5, 4, 3, 3, 1]
    assert find_fillings(sizes, 10, 0) == [(0, 2), (0, 3, 5)]
    for waste in range(5):
        for filling in find_fillings(sizes, 10, waste):
            assert filling[0] == 0 and 10 - waste <= sum(sizes[i] for i in filling) <= 10
    assert find_fillings(sizes, 10, -1) == []


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8), st.integers(1, 8))
def test_completed_bins_are_a_packing(sizes: list[int], num_bins: int):
    sizes.sort(reverse=True)
    bins = complete_bins(sizes, 10, num_bins)
    if bins is None:
        return
    assert len(bins) <= num_bins and all(sum(each) <= 10 for each in bins)
    assert sorted(chain.from_iterable(bins), reverse=True) == sizes


def test_patterns_are_all_loads_between_two_limits():
    patterns = find_patterns([5, 3, 2], [1, 2, 1], 8, 7)
    assert patterns is not None
    assert sorted(patterns) == [(0, 2, 1), (1, 0, 1), (1, 1, 0)]
    assert find_patterns(list(range(60, 0, -1)), [1] * 60, 900, 0) is None  # too many


@pytest.mark.parametrize("cap", [10, 10_000])
def test_programs_find_fewest_bins_and_a_light_one(cap: int):
    unit = cap // 10
    sizes, counts = [5 * unit, 4 * unit, 3 * unit, 2 * unit], [1, 2, 2, 3]  # 25 units
    found = improve(sizes, counts, cap, (2, 5), 20.0)
    assert found.bins is not None and len(found.bins) == 3 and not found.timed_out
    loads = [
        sum(size * count for size, count in zip(sizes, each, strict=True)) for each in found.bins
    ]
    assert sorted(loads) == [5 * unit, cap, cap]  # 10 and 10 are possible, so 5 remain


def test_a_light_bin_is_found_where_first_fit_has_none():
    sizes = [5, 4, 4, 3, 3]  # first fit: 5 + 4, 4 + 3 + 3; then 9 and 10, and nothing lighter
    assert sorted(pack_bins(sizes, 11, time_limit=0).loads) == [9, 10]
    lighter = pack_bins(sizes, 11)
    check(sizes, 11, lighter)
    assert lighter.loads == (11, 8) and lighter.method == "HiGHS"


@pytest.mark.parametrize(
    ("sizes", "method"),
    [([0, 5, 4, 0, 4, 3, 3], "HiGHS"), ([0, 4, 4, 3, 3, 3, 0, 3], "bin completion")],
)
def test_searches_keep_samples_of_no_size(sizes: list[int], method: str):
    packing = pack_bins(sizes, 10 if method == "bin completion" else 11)
    check(sizes, packing.cap, packing)
    assert packing.method == method


def test_programs_of_many_patterns_are_solved_too(monkeypatch):
    monkeypatch.setattr("penstock.batching.packing._program._MAX_PATTERNS", 0)
    found = improve([6, 5, 4, 3, 2], [1, 1, 1, 1, 1], 10, (2, 4), 20.0)
    assert found.bins is not None and len(found.bins) == 2


def test_programs_prove_that_more_bins_are_needed():
    found = improve([4], [5], 10, (2, 3), 20.0)
    assert found.lower_bound == 3


def test_a_time_that_is_up_is_said():
    found = improve([5, 4, 3], [2, 2, 2], 10, (2, 4), 0.0)
    assert found.bins is None and found.timed_out


def test_highs_that_is_missing_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(_bins, "can_solve", lambda: False)
    _bins._has_solver.cache_clear()
    with caplog.at_level(logging.INFO, logger="penstock"):
        packings = [pack_bins([5, 4, 4, 3, 3], 11) for _ in range(2)]
    _bins._has_solver.cache_clear()
    assert [packing.method for packing in packings] == ["first fit decreasing"] * 2
    assert len(caplog.records) == 1 and "pip install highspy" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "cap", "time_limit", "error", "message"),
    [
        ([3, 12], 10, 1, ValueError, r"sizes\[1\]=12 is above cap=10; raise the cap"),
        ([3, -1], 10, 1, ValueError, "sample 1 has -1"),
        ([3.5], 10, 1, TypeError, "round them up"),
        (["a"], 10, 1, TypeError, "sizes must be numbers"),
        ([[1]], 10, 1, ValueError, "one axis"),
        ([1 << 60] * 4, 1 << 61, 1, ValueError, "sum to at most"),
        ([3], -1, 1, ValueError, "cap"),
        ([3], 10, -1, ValueError, "time_limit"),
        ([3], 10, float("nan"), ValueError, "time_limit"),
    ],
)
def test_wrong_arguments_are_named(sizes, cap, time_limit, error, message: str):
    with pytest.raises(error, match=message):
        pack_bins(sizes, cap, time_limit=time_limit)


def test_a_packing_prints_and_is_plain_data():
    packing = pack_bins([5, 2, 9, 5], 10)
    assert "lower bound" in str(packing) and "first fit decreasing" in str(packing)
    assert packing.to_dict()["bins"] == ((0, 3), (2,), (1,))
