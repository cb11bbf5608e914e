"""RecordResidency against a dictionary, and what it keeps of scans, hot records and walks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.kv._residency import RecordResidency

NUM_RECORDS = 12
ids_lists = st.lists(st.integers(0, NUM_RECORDS - 1), unique=True, max_size=6)


class AgainstDictionary(RuleBasedStateMachine):
    """Any order of calls; the dictionary follows what is returned and says what is allowed."""

    def __init__(self):
        super().__init__()
        self.slot_of: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.num_slots = 4
        # A table that must grow, and a half-life so short that classes change.
        self.residency = RecordResidency(self.num_slots, half_life=3, num_records=2)

    @rule(ids=ids_lists, cost=st.sampled_from([0.5, 1.0, 8.0]))
    def touch(self, ids, cost):
        self.residency.touch(ids, cost)

    @rule(ids=ids_lists, most_free=st.sampled_from([None, 0, 1]))
    def admit(self, ids, most_free):
        missing = [i for i in ids if i not in self.slot_of]
        worth = {i: float(self.residency._worth(np.array([i]))[0]) for i in range(NUM_RECORDS)}
        free = set(range(self.num_slots)) - set(self.slot_of.values())
        usable = len(free) if most_free is None else min(most_free, len(free))
        admitted, slots, evicted = self.residency.admit(missing, most_free)
        assert set(admitted) <= set(missing)
        assert len(admitted) == len(slots) == min(usable, len(missing)) + len(evicted)
        assert all(record in self.slot_of for record in evicted)
        assert not any(self.pins.get(record) for record in evicted)
        unpinned = [i for i in self.slot_of if not self.pins.get(i)]
        # The evicted ones are worth least, and everything that took a used slot is worth more.
        kept = [worth[i] for i in unpinned if i not in set(evicted)]
        assert all(worth[i] <= least for i in evicted for least in [min(kept, default=np.inf)])
        gain = worth_sum(worth, admitted) - worth_sum(worth, evicted)
        assert gain >= 0
        if len(evicted):
            assert min(worth[i] for i in admitted) > 0
            assert gain > 0
        for record in evicted:
            free.add(self.slot_of.pop(record))
        assert set(slots) <= free
        assert len(set(slots)) == len(slots)
        self.slot_of |= dict(zip(admitted.tolist(), slots.tolist(), strict=True))

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data())
    def pin(self, data):
        record = data.draw(st.sampled_from(sorted(self.slot_of)))
        self.residency.pin([record])
        self.pins[record] = self.pins.get(record, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def release(self, data):
        record = data.draw(st.sampled_from(sorted(r for r, n in self.pins.items() if n)))
        self.residency.release([record])
        self.pins[record] -= 1

    @rule(ids=ids_lists)
    def drop(self, ids):
        ids = [i for i in ids if not self.pins.get(i)]
        self.residency.drop(ids)
        for record in ids:
            self.slot_of.pop(record, None)

    @invariant()
    def slots_are_those_of_the_dictionary(self):
        expected = [self.slot_of.get(i, -1) for i in range(NUM_RECORDS)]
        assert self.residency.look_up(range(NUM_RECORDS)).tolist() == expected
        assert self.residency.num_resident == len(self.slot_of) <= self.num_slots


def worth_sum(worth, ids):
    return sum(worth[i] for i in ids)


AgainstDictionary.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestAgainstDictionary = AgainstDictionary.TestCase


def count_hits(residency, steps):
    hits = []
    for ids in steps:
        slots = residency.look_up(ids)
        residency.touch(ids)
        residency.admit(np.asarray(ids)[slots < 0])
        hits.append(int((slots >= 0).sum()))
    return hits


@pytest.mark.parametrize("num_at_once", [1, 8])
def test_a_scan_of_more_records_than_slots_keeps_a_fixed_set(num_at_once):
    steps = [(i * num_at_once + np.arange(num_at_once)) % 80 for i in range(1600 // num_at_once)]
    residency = RecordResidency(20)
    assert sum(count_hits(residency, steps)) == 19 * 20  # all rounds but the first
    assert sorted(np.flatnonzero(residency.look_up(range(80)) >= 0)) == list(range(20))


def test_records_read_often_displace_those_read_once():
    once = [[i] for i in range(100, 104)]
    often = [[1], [2], [3], [4]] * 20
    hits = count_hits(RecordResidency(4), once + often)
    assert sum(hits[-16:]) == 16


def test_an_expensive_miss_is_worth_more_than_a_cheap_one():
    residency = RecordResidency(2)
    for _ in range(20):  # four records read by turns, two of them from a slow tier
        for record in range(4):
            residency.touch([record], [100.0 if record >= 2 else 1.0])
            if residency.look_up([record])[0] < 0:
                residency.admit([record])
    assert (residency.look_up(range(4)) >= 0).tolist() == [False, False, True, True]


@given(st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_habits_that_change_are_learned_again(seed):
    generator = np.random.default_rng(seed)
    first = [generator.choice(20, 5, replace=False) for _ in range(300)]
    second = [step + 100 for step in first]
    hits = count_hits(RecordResidency(20, half_life=16), first + second)
    assert sum(hits[-50:]) == 250


def test_many_records_and_few_slots_are_sampled_not_searched(monkeypatch):
    residency = RecordResidency(20_000, num_records=100_000)
    generator = np.random.default_rng(0)
    count_hits(residency, [generator.choice(100_000, 512, replace=False) for _ in range(60)])
    assert residency.num_resident == 20_000
    seen = []
    worth = residency._worth
    monkeypatch.setattr(residency, "_worth", lambda ids: seen.append(len(ids)) or worth(ids))
    count_hits(residency, [generator.choice(100_000, 512, replace=False) for _ in range(10)])
    assert 0 < max(seen) <= 8 * 512


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.touch([1, 1]), "distinct"),
        (lambda r: r.touch([[1]]), "one-dimensional"),
        (lambda r: r.look_up([-1]), "at least 0"),
        (lambda r: r.admit([0]), "have one"),
        (lambda r: r.pin([5]), "have none"),
        (lambda r: r.release([0]), "only pinned"),
        (lambda r: (r.pin([0]), r.drop([0])), "release"),
        (lambda r: RecordResidency(-1), "num_slots"),
        (lambda r: RecordResidency(1, half_life=0), "half_life"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    residency = RecordResidency(2)
    residency.admit([0])
    with pytest.raises(ValueError, match=message):
        call(residency)


def test_without_slots_nothing_is_admitted():
    assert count_hits(RecordResidency(0), [[1], [1], [1]]) == [0, 0, 0]


@pytest.mark.parametrize("number", range(7))
def test_an_interrupt_while_tables_grow_leaves_them_whole(monkeypatch, number):
    residency, pad = RecordResidency(4), np.pad
    residency.touch(np.arange(3))
    calls = []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return pad(*arguments, **options)

    monkeypatch.setattr(np, "pad", interrupted)
    with pytest.raises(KeyboardInterrupt):
        residency.touch(np.arange(40))
    monkeypatch.undo()
    residency.drop(np.arange(30))
    residency.touch(np.arange(50))
    assert len(residency.admit(np.arange(50))[0]) == 4
