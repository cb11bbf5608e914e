"""Simulated policies: Belady against every possible choice, and ours against Belady."""

import functools
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv._simulate import simulate

small_traces = st.lists(st.sets(st.integers(0, 4), max_size=3).map(sorted), max_size=7)


def best_hits(trace, num_slots):
    """Most hits of any choice of what is kept after each step, by search."""
    best = {frozenset(): 0}
    for step in trace:
        after: dict[frozenset, int] = {}
        for resident, hits in best.items():
            hits += len(resident & set(step))
            there = resident | set(step)
            for size in range(min(num_slots, len(there)) + 1):
                for kept in map(frozenset, combinations(sorted(there), size)):
                    after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


@given(small_traces, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_belady_is_the_optimum_and_others_stay_below(trace, num_slots):
    optimum = best_hits(trace, num_slots)
    assert simulate(trace, slots=num_slots, policy="belady").num_hits == optimum
    for policy in ("penstock", "lru"):
        assert simulate(trace, slots=num_slots, policy=policy).num_hits <= optimum


@given(small_traces, st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_lru_evicts_the_least_recently_used(trace, num_slots):
    steps = [[record] for step in trace for record in step]
    order, hits = [], 0
    for (record,) in steps:
        hits += record in order
        order = [record, *(other for other in order if other != record)][:num_slots]
    assert simulate(steps, slots=num_slots, policy="lru").num_hits == hits


@functools.cache
def random_walk(num_steps, num_read, num_records, overlap=0.8, skew=0.0):
    """Selections of which a share stays from step to step, as NOSA reports (section 3)."""
    generator = np.random.default_rng(0)
    weights = (1.0 + np.arange(num_records)) ** -skew
    current, steps = np.arange(num_read), []
    for _ in range(num_steps):
        kept = generator.permutation(current)[: round(overlap * num_read)]
        others = weights.copy()
        others[current] = 0
        num_new = num_read - len(kept)
        new = generator.choice(num_records, num_new, replace=False, p=others / others.sum())
        current = np.concatenate([kept, new])
        steps.append(current)
    return steps


@pytest.mark.parametrize(
    ("skew", "num_slots", "points"),
    # A walk whose new records are drawn alike has no past that tells of them: with slots to
    # spare, an optimum that knows the draws is out of reach of any policy.
    [(0.0, 64, 5), (0.0, 128, 6.5), (1.0, 96, 5), (1.0, 128, 5), (1.0, 256, 5)],
)
def test_walks_are_within_points_of_belady(skew, num_slots, points):
    trace = random_walk(500, 64, 1024, skew=skew)
    ours, lru, belady = (
        simulate(trace, slots=num_slots, policy=policy).hit_rate
        for policy in ("penstock", "lru", "belady")
    )
    assert 100 * (belady - ours) <= points
    assert ours > lru - 0.01


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_scans_hit_as_often_as_with_belady(share):
    scan = [[step % 100] for step in range(1500)]
    ours, belady = (
        simulate(scan, slots=round(100 * share), policy=policy).hit_rate
        for policy in ("penstock", "belady")
    )
    assert ours == pytest.approx(share * 14 / 15)  # nothing is there in the first round
    assert belady - ours < 0.01
    assert simulate(scan, slots=75, policy="lru").num_hits == 0


def test_bytes_follow_from_hits_and_misses():
    report = simulate([[0, 1, 1], [1, 2], []], budget="2 KiB", record_bytes=1000)
    assert (report.num_slots, report.num_steps, report.num_records) == (2, 3, 3)
    assert (report.num_hits, report.num_misses) == (1, 3)
    assert (report.hit_bytes, report.fetched_bytes) == (1000, 3000)
    assert report.hit_rate == 0.25
    assert report.to_dict()["policy"] == "penstock"
    assert "hit rate" in str(report)


def test_an_empty_trace_has_no_misses():
    report = simulate([], slots=3, policy="belady")
    assert (report.num_misses, report.hit_rate) == (0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slots": 1, "policy": "fifo"}, "policy must be one of"),
        ({}, "one of slots and budget"),
        ({"slots": 1, "budget": 5}, "one of slots and budget"),
        ({"slots": -1}, "slots"),
        ({"slots": 1, "record_bytes": 0}, "record_bytes"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulate([[1]], **arguments)


def test_negative_records_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        simulate([[-1]], slots=1)
