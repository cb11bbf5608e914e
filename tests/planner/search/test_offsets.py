"""Intervals get offsets at which none overlap, also where few bytes are left in between."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_cases import chain_step, random_graph
from penstock.graph import Kind, StepGraph, Storage, alignment_bytes
from penstock.planner._request import LinkRates
from penstock.planner.search import _finalists
from penstock.planner.search._finalists import PrioritySearch, improve_offsets
from penstock.planner.search._offsets import assign_offsets, engine_intervals
from penstock.planner.search._place_search import PlaceSearch
from penstock.planner.search._problem import INTERVAL, Problem
from penstock.planner.search._residency import Arena, LowerTiers, ResidencySearch
from penstock.planner.search._sequence import AGAIN, NUM_STRATEGIES, OperatorSequence

BY_SIZE, FULLEST = 3, (4, 5)
TINY = 4096  # parts of the arena of which one at most is tiny
ALWAYS_THERE, FROM_AND_TO_NOWHERE = -2, -1


def sequence_of_about(num_positions):
    graph = chain_step(-(-num_positions // 4), weight_bytes=64, activation_bytes=64)
    num_operators = len(graph.operators)
    return OperatorSequence(Problem(graph, [1.0] * num_operators), np.arange(num_operators))


SEQUENCE = sequence_of_about(40)
NUM_POSITIONS = len(SEQUENCE.order)


def assign(intervals, capacity, strategy, *, step_seconds=1e3):
    return SEQUENCE.assign_offsets(
        intervals, capacity, step_seconds=float(step_seconds), strategy=strategy
    )


def intervals_from(rows):
    """Intervals of (bytes, start, end), an operator a second; none comes early or leaves late."""
    intervals = np.zeros(len(rows), INTERVAL)
    intervals["bytes"], intervals["start"], intervals["end"] = np.array(rows).T
    intervals["from"], intervals["until"] = intervals["start"], intervals["end"]
    intervals["arrives"] = intervals["leaves"] = FROM_AND_TO_NOWHERE
    return intervals


def intervals_of_choice(choice, rates):
    """Intervals as they are before they get addresses."""
    return engine_intervals(choice, rates, choice.parts())


def meetings(intervals):
    """Pairs that are at one address at one position."""
    found = []
    for i, one in enumerate(intervals):
        for other in intervals[i + 1 :]:
            shares_bytes = (
                one["offset"] < other["offset"] + other["bytes"]
                and other["offset"] < one["offset"] + one["bytes"]
            )
            for shift in (-NUM_POSITIONS, 0, NUM_POSITIONS):
                start, end = other["start"] + shift, other["end"] + shift
                if shares_bytes and start < one["end"] and one["start"] < end:
                    found.append((one, other))
    return found


@st.composite
def some_stays(draw):
    rows = []
    for _ in range(draw(st.integers(1, 40))):
        start = draw(st.integers(0, NUM_POSITIONS - 1))
        length = draw(st.integers(1, NUM_POSITIONS - 1))
        rows.append(
            (draw(st.sampled_from([16, 64, 192, 1024, 4096, 16384])), start, start + length)
        )
    return intervals_from(rows)


@pytest.mark.parametrize("strategy", range(NUM_STRATEGIES))
@given(
    intervals=some_stays(),
    capacity=st.sampled_from([4096, 8192, 32768, 131072, TINY * 1024]),
    seed=st.none() | st.integers(0, 9),
)
def test_nobody_meets_anybody_or_somebody_is_missed(strategy, intervals, capacity, seed):
    priority = None if seed is None else np.random.default_rng(seed).random(len(intervals))
    missing = SEQUENCE.assign_offsets(
        intervals, capacity, step_seconds=float(NUM_POSITIONS), strategy=strategy, priority=priority
    )
    assert len(missing) == NUM_POSITIONS
    if missing.any():
        assert 0 < missing.max() <= intervals["bytes"].max()
    else:
        assert not meetings(intervals)
        assert (intervals["offset"] >= 0).all()
        assert (intervals["offset"] + intervals["bytes"] <= capacity).all()


def test_small_stays_do_not_cut_the_places_of_large_ones():
    # Three large ones at a time, and small ones that outlive them: 64 bytes more than the large.
    large = [(4096, k, k + 3) for k in range(1, 30)]
    small = [(16, k, k + 4) for k in range(1, 29)]
    capacity = 3 * 4096 + 64
    intervals = intervals_from(large + small)
    for strategy in range(BY_SIZE):
        assert SEQUENCE.assign_offsets(
            intervals, capacity, step_seconds=1e3, strategy=strategy
        ).any()
    assert not SEQUENCE.assign_offsets(
        intervals, capacity, step_seconds=1e3, strategy=BY_SIZE
    ).any()
    assert not meetings(intervals)


def test_the_fullest_position_is_laid_out_before_anybody_is_in_the_way():
    # Three fill the arena from 9 to 13; who is there before and after is of other sizes.
    full = [(4096, 9, 13), (4096, 9, 14), (4096, 7, 13)]
    intervals = intervals_from([*full, (3584, 7, 8), (5120, 13, 15), (3072, 6, 9)])
    for strategy in range(NUM_STRATEGIES):
        missing = SEQUENCE.assign_offsets(intervals, 3 * 4096, step_seconds=1e3, strategy=strategy)
        assert missing.any() == (strategy not in FULLEST)
        assert strategy not in FULLEST or not meetings(intervals)


@pytest.mark.parametrize("strategy", range(NUM_STRATEGIES))
def test_tiny_stays_share_the_lowest_addresses(strategy):
    # Two at a time, of which one is there whenever a step begins, and one that intervals.
    tiny = [(1024, k, k + 2) for k in range(NUM_POSITIONS)]
    intervals = intervals_from([*tiny, (64, 0, 2 * NUM_POSITIONS), (2**20, 3, 30), (2**20, 5, 33)])
    intervals["until"][len(tiny)] = np.inf
    assert not SEQUENCE.assign_offsets(
        intervals, TINY * 1024, step_seconds=float(NUM_POSITIONS), strategy=strategy
    ).any()
    assert not meetings(intervals)
    is_tiny = intervals["bytes"] <= 1024
    ends = intervals["offset"] + intervals["bytes"]
    assert ends[is_tiny].max() <= intervals["offset"][~is_tiny].min()
    assert ends[is_tiny].max() <= 4 * 1024 + 64


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_in_is_due_as_late_as_its_link_allows(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, 40)
    problem = Problem(graph, [1.0] * 40, alignment=1)
    sequence = OperatorSequence(problem, np.arange(40))
    capacity = int(sequence.working_set.max()) + 1
    rates = (LinkRates(2.0, 3.0),)
    choice = ResidencySearch(sequence, Arena(capacity, LowerTiers(rates))).quick()
    assert choice is not None
    intervals = intervals_of_choice(choice, rates)
    comes = np.flatnonzero(intervals["arrives"] >= 0)
    comes = comes[np.argsort(intervals["start"][comes], kind="stable")]
    assert len(comes) > 1
    due, used = intervals["from"][comes], choice.replay.starts[intervals["start"][comes]]
    ends = due + intervals["bytes"][comes] / 3.0
    following = np.append(due[1:], due[0] + choice.replay.step_seconds)
    assert np.allclose(ends, np.minimum(used, following))
    made = intervals["arrives"] == FROM_AND_TO_NOWHERE
    assert (intervals["from"][made] == choice.replay.starts[intervals["start"][made]]).all()


def test_addresses_are_as_even_as_sizes():
    """Steps that run have sizes of whole vectors, however small they are."""

    def alignment(*sizes, device="cpu"):
        storages = [
            Storage(name=f"s{i}", num_bytes=size, kind=Kind.PARAMETER, initial=i, final=i)
            for i, size in enumerate(sizes)
        ]
        values = tuple(range(len(sizes)))
        return alignment_bytes(
            StepGraph(
                storages=tuple(storages), storage_of_value=values, operators=(), device=device
            )
        )

    assert alignment(64, 192, 0) == 64
    assert alignment(512, 1024) == 512
    assert alignment(8, 1000) == 8
    assert alignment(7, 2048) == 64
    assert alignment(7, 2048, device="cuda") == 512
    assert alignment(7, 2**20) == 512


def test_every_position_without_room_is_told_at_once():
    intervals = intervals_from([(4096, 0, 3), (4096, 1, 3), (4096, 20, 22), (2048, 21, 22)])
    missing = SEQUENCE.assign_offsets(intervals, 4096, step_seconds=1e3, strategy=0)
    assert np.flatnonzero(missing).tolist() == [1, 21]
    assert missing[[1, 21]].tolist() == [4096, 2048]


@pytest.mark.parametrize("seed", range(3, 6))
def test_stays_that_found_no_place_come_earlier_until_all_have_one(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randint(10, 40))
    num_operators = len(graph.operators)
    problem = Problem(graph, [1.0] * num_operators, alignment=1)
    sequence = OperatorSequence(problem, np.arange(num_operators))
    least, most = int(sequence.working_set.max()), int(sequence.base.max())
    lower = LowerTiers((LinkRates(2.0, 2.0),))
    arena = Arena(least + (most - least) * rng.randint(1, 4) // 10, lower)
    choice = ResidencySearch(sequence, arena).quick()
    assert choice is not None
    for strategy in FULLEST:
        search = PrioritySearch(choice, arena, strategy, np.random.default_rng(0))
        found = [search.try_priorities() for _ in range(30)]
        assert found[0] is None
        seconds = [one[0].seconds for one in found if one is not None]
        assert seconds and seconds == sorted(seconds, reverse=True)
        assert search.seconds == seconds[-1] >= search.floor
    best = next(one for one in found if one is not None)
    better = improve_offsets(best, [choice], arena, deadline=time.monotonic() + 0.5, seed=0)
    assert better[0].seconds <= best[0].seconds


@given(
    intervals=some_stays(),
    capacity=st.sampled_from([8192, 32768, 131072]),
    seed=st.integers(0, 99),
)
def test_intervals_that_have_offsets_keep_them(intervals, capacity, seed):
    if assign(intervals, capacity, FULLEST[0], step_seconds=NUM_POSITIONS).any():
        return
    random = np.random.default_rng(seed)
    moved = random.random(len(intervals)) < 0.4
    again = intervals.copy()
    again["offset"][moved] = -1
    priority = random.random(len(intervals))
    missing = SEQUENCE.assign_offsets(
        again, capacity, step_seconds=float(NUM_POSITIONS), strategy=AGAIN, priority=priority
    )
    assert (again["offset"][~moved] == intervals["offset"][~moved]).all()
    placed = again[again["offset"] >= 0]
    assert not meetings(placed)
    assert (placed["offset"] + placed["bytes"] <= capacity).all()
    lacking = again[again["offset"] < 0]
    assert set(np.flatnonzero(missing)) == set(lacking["start"].tolist())


def test_the_highest_priority_chooses_first():
    intervals = intervals_from([(4096, 0, 9), (4096, 1, 8), (4096, 2, 7)])
    intervals["offset"][:] = 0, -1, -1
    for first, other in ((1, 2), (2, 1)):
        again, priority = intervals.copy(), np.zeros(3)
        priority[first] = np.inf
        SEQUENCE.assign_offsets(again, 8192, step_seconds=1e3, strategy=AGAIN, priority=priority)
        assert again["offset"][[0, first, other]].tolist() == [0, 4096, -1]


@pytest.mark.parametrize("seed", [5, 6, 15])
def test_what_waits_for_an_address_gets_another_one(seed):
    rng = random.Random(seed)
    graph = random_graph(rng, 40)
    problem = Problem(graph, [1.0] * 40, alignment=1)
    sequence = OperatorSequence(problem, np.arange(40))
    least, most = int(sequence.working_set.max()), int(sequence.base.max())
    arena = Arena(least + (most - least) // 3, LowerTiers((LinkRates(2.0, 2.0),)))
    choice = ResidencySearch(sequence, arena).quick()
    assert choice is not None
    found = assign_offsets(choice, arena, worth=np.inf, deadline=time.monotonic() + 5, quick=True)
    assert found is not None
    search = PlaceSearch(found, arena, np.random.default_rng(0))
    seconds = [search.seconds]
    for _ in range(300):
        before, failures = search.seconds, search.failures
        assert search.try_places() == (search.seconds < before)
        assert search.failures == (0 if search.seconds < before else failures + 1)
        seconds.append(search.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert search.floor <= seconds[-1] < seconds[0]
    intervals = engine_intervals(search.best[0], (LinkRates(2.0, 2.0),))
    intervals["offset"] = search.best[1]
    replay = sequence.replay(search.best[0].evicted, intervals, (LinkRates(2.0, 2.0),))
    assert replay.step_seconds == pytest.approx(search.seconds)
    ends = intervals["offset"] + intervals["bytes"]
    assert (intervals["offset"] >= 0).all() and ends.max() <= arena.capacity


def test_places_of_other_offsets_are_tried_where_the_first_are_not_improved(monkeypatch):
    class NeverBetter:
        floor, num_intervals = 0.0, 100

        def __init__(self, best, *_):
            self.best, self.seconds, self.failures = best, best[0].seconds, 0

        def try_places(self):
            tries.append(self.best)
            self.failures += 1
            return False

    tries = []
    found = [(SimpleNamespace(seconds=1.0 + 0.1 * each), [each]) for each in range(8)]
    monkeypatch.setattr(_finalists, "PlaceSearch", NeverBetter)
    monkeypatch.setattr(_finalists, "_improve_priorities", lambda *_, **__: found)
    arena = Arena(1, LowerTiers((LinkRates(1.0, 1.0),)))
    best = improve_offsets(found[0], [], arena, deadline=time.monotonic() + 60, seed=0)
    assert best is found[0]
    assert [sum(one is each for one in tries) for each in found] == [600] * 5 + [0] * 3
    tries.clear()
    monkeypatch.setattr(NeverBetter, "num_intervals", 4)  # which have few other places
    improve_offsets(found[0], [], arena, deadline=time.monotonic() + 60, seed=0)
    assert [sum(one is each for one in tries) for each in found] == [80] * 5 + [0] * 3
