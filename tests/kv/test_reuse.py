"""ReuseModel: habits and lasting interest told apart, and ages in steps of any number of calls."""

import numpy as np
import pytest

from penstock.kv import _reuse
from penstock.kv._residency import RecordResidency
from penstock.kv._reuse import ReuseModel
from penstock.kv._simulate import simulate


def draw_habits(num_steps=400, num_layers=2, num_records=150, seed=0):
    """Selections of records that are read in most steps for a dozen of steps, else seldom."""
    generator = np.random.default_rng(seed)
    has_habit = np.zeros((num_layers, num_records), dtype=bool)
    calls = []
    for _ in range(num_steps):
        for layer in range(num_layers):
            ends, begins = generator.random((2, num_records)) < [[1 / 12], [1 / 120]]
            has_habit[layer] = has_habit[layer] & ~ends | begins
            chance = np.where(has_habit[layer], 0.7, 0.03)
            read = generator.random(num_records) < chance
            calls.append(layer * num_records + np.flatnonzero(read))
    return calls


def hit_points(calls, num_slots, policy="penstock"):
    return 100 * simulate(calls, slots=num_slots, policy=policy).hit_rate


@pytest.mark.parametrize("seed", range(3))
def test_habits_are_seen_by_their_short_frequency(seed, monkeypatch):
    calls = draw_habits(seed=seed)
    num_slots = sum(map(len, calls)) // 400
    ours, lru, belady = (hit_points(calls, num_slots, p) for p in ("penstock", "lru", "belady"))
    assert ours > lru + 8
    assert belady - ours < 16  # of which chance is the most
    monkeypatch.setattr(_reuse, "_SHORT_CLASSES", 1)
    assert ours > hit_points(calls, num_slots) + 2


@pytest.mark.parametrize("skew", [0.8, 1.2])
def test_independent_reads_have_nearly_the_hits_of_the_best_fixed_set(skew):
    generator = np.random.default_rng(0)
    chance = (1.0 + np.arange(300)) ** -skew
    reads = generator.choice(300, 6000, p=chance / chance.sum())
    best = np.sort(np.bincount(reads))[::-1][:40].sum() / len(reads)
    ours, lru = (hit_points(reads[:, None], 40, policy) for policy in ("penstock", "lru"))
    assert 100 * best - ours < 6
    assert ours > lru + 4


@pytest.mark.parametrize("num_layers", [1, 3, 32])
def test_a_step_is_as_long_as_the_calls_that_repeat(num_layers):
    model = ReuseModel(64)
    model.grow(8 * num_layers)
    generator = np.random.default_rng(0)
    for _ in range(20):
        for layer in range(num_layers):
            others = 1 + generator.choice(7, 3, replace=False)
            model.touch(8 * layer + np.sort(np.append(others, 0)))
    assert model._calls_per_step == num_layers
    assert model._num_steps == 19


def test_layers_do_not_change_what_is_kept():
    """The same selections in every layer, with slots for each: the same hits."""
    walk = draw_habits(num_steps=300, num_layers=1)
    layered = [call + 150 * layer for call in walk for layer in range(4)]
    num_slots = sum(map(len, walk)) // 300
    alone, together = hit_points(walk, num_slots), hit_points(layered, 4 * num_slots)
    assert abs(alone - together) < 3


def test_a_record_of_the_next_layer_outlives_an_equal_one_that_was_just_read():
    residency = RecordResidency(6)
    for _ in range(8):
        for layer in range(2):
            residency.touch(3 * layer + np.arange(3))
    just, soon = residency._worth(np.array([3, 0]))
    assert just < soon <= 2 * just


def test_many_touches_in_a_step_are_fitted_seldom(monkeypatch):
    fits = []
    fit = ReuseModel._fit
    monkeypatch.setattr(ReuseModel, "_fit", lambda self: fits.append(self._num_steps) or fit(self))
    generator = np.random.default_rng(0)
    model = ReuseModel(64, 2 * 8192)
    for _ in range(40):
        for layer in range(2):
            model.touch(layer * 8192 + np.sort(generator.choice(8192, 4096, replace=False)))
    assert fits == [1, 2, 4, 8, 16, 24, 32]
