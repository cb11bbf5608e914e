"""The ledger counts right from many threads, in destructors, and in bounded memory."""

import json
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory import Ledger, Link, Span, Tier

MS = 1_000_000  # nanoseconds


@given(st.lists(st.tuples(st.sampled_from(list(Tier)), st.integers(-1000, 1000))))
def test_resident_and_peak_follow_the_changes(changes: list[tuple[Tier, int]]):
    ledger = Ledger()
    resident, peak = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
    for tier, num_bytes in changes:
        ledger.add(tier, num_bytes)
        resident[tier] += num_bytes
        peak[tier] = max(peak[tier], resident[tier])
    assert {tier: ledger.resident(tier) for tier in Tier} == resident
    assert {tier: ledger.peak(tier) for tier in Tier} == peak
    ledger.reset_peaks()
    assert {tier: ledger.peak(tier) for tier in Tier} == resident


def test_moved_bytes_and_stalls():
    ledger = Ledger()
    ledger.record_transfer(Link.DEVICE_TO_FILE, 100, 0, MS)
    ledger.record_transfer(Link.DEVICE_TO_FILE, 50, MS, 2 * MS)
    ledger.record_transfer(Link.FILE_TO_DEVICE, 7, MS, 2 * MS)
    ledger.record_stall("load", 0, 500 * MS)
    ledger.record_stall("store", 0, 250 * MS)
    assert ledger.moved(Link.DEVICE_TO_FILE) == 150
    assert ledger.moved(Link.FILE_TO_DEVICE) == 7
    assert ledger.moved(Link.HOST_TO_FILE) == 0
    assert ledger.stall_seconds == pytest.approx(0.75)


def test_links_join_tiers():
    assert {(link.source, link.destination) for link in Link} == {
        (a, b) for a in Tier for b in Tier if a is not b
    }


def test_bandwidth_is_taken_over_the_union_of_the_intervals():
    ledger = Ledger()
    link = Link.HOST_TO_FILE
    assert ledger.bandwidth(link) is None
    ledger.record_transfer(link, 10, 5 * MS, 5 * MS)
    assert ledger.bandwidth(link) is None
    ledger.record_transfer(link, 1000, 0, 10 * MS)
    ledger.record_transfer(link, 1000, 5 * MS, 15 * MS)  # overlaps: 15 ms busy, not 20
    ledger.record_transfer(link, 990, 2 * MS, 3 * MS)  # within the first
    ledger.record_transfer(link, 1000, 100 * MS, 105 * MS)  # the idle time before does not count
    assert ledger.bandwidth(link) == pytest.approx(4000 / 0.020)
    assert ledger.bandwidth(Link.FILE_TO_HOST) is None


def test_bandwidth_forgets_what_is_long_ago():
    ledger = Ledger()
    for index in range(300):
        rate = 1 if index < 150 else 100
        ledger.record_transfer(Link.HOST_TO_FILE, rate, index * MS, (index + 1) * MS)
    assert ledger.bandwidth(Link.HOST_TO_FILE) == pytest.approx(100 / 0.001)


def test_timeline_of_the_last_step():
    ledger = Ledger()
    ledger.begin_step()  # before the first step: nothing to keep
    assert ledger.timeline().spans == []
    ledger.add(Tier.DEVICE, 100)
    ledger.record_span("compute", "forward", 1, 5)
    ledger.record_transfer(Link.DEVICE_TO_FILE, 100, 2, 4)
    ledger.record_stall("load", 5, 6)
    assert ledger.timeline("last").spans == []
    assert len(ledger.timeline("current").spans) == 3
    ledger.begin_step()
    ledger.add(Tier.DEVICE, -100)
    last, current = ledger.timeline("last"), ledger.timeline("current")
    assert last.spans == [
        Span("compute", "forward", 1, 5, 0),
        Span("device->file", "", 2, 4, 100),
        Span("stall", "load", 5, 6, 0),
    ]
    assert [held for _, held in last.samples[Tier.DEVICE]] == [0, 100]
    assert [held for _, held in current.samples[Tier.DEVICE]] == [100, 0]
    assert last.start_ns <= last.samples[Tier.DEVICE][1][0] <= last.end_ns == current.start_ns
    assert set(last.samples) == set(Tier)


def test_a_step_without_events_does_not_replace_the_last_one():
    ledger = Ledger()
    ledger.record_span("compute", "forward", 1, 5)
    ledger.begin_step()
    ledger.begin_step()
    assert [span.name for span in ledger.timeline().spans] == ["forward"]


def test_timeline_is_a_copy_and_plain_data():
    ledger = Ledger()
    ledger.add(Tier.FILE, 5)
    ledger.record_transfer(Link.DEVICE_TO_FILE, 5, 1, 2)
    timeline = ledger.timeline("current")
    ledger.add(Tier.FILE, 5)
    assert len(timeline.samples[Tier.FILE]) == 2
    data = json.loads(json.dumps(timeline.to_dict()))
    assert data["samples"]["file"][-1][1] == 5
    assert data["spans"] == [
        {"lane": "device->file", "name": "", "start_ns": 1, "end_ns": 2, "num_bytes": 5}
    ]


def test_events_of_a_step_are_capped_but_counted():
    ledger = Ledger(max_events_per_step=10)
    for _ in range(8):
        ledger.add(Tier.DEVICE, 1)
        ledger.record_span("compute", "x", 0, 1)
    timeline = ledger.timeline("current")
    assert len(timeline.spans) == 5
    assert len(timeline.samples[Tier.DEVICE]) == 6  # with the one at the beginning
    assert timeline.num_dropped == 6
    assert ledger.resident(Tier.DEVICE) == 8
    ledger.begin_step()
    assert ledger.timeline("current").num_dropped == 0


@pytest.mark.parametrize("record", ["record_transfer", "record_stall", "record_span"])
def test_an_interval_that_ends_before_it_starts_is_refused(record: str):
    ledger = Ledger()
    args = {
        "record_transfer": (Link.HOST_TO_FILE, 1),
        "record_stall": ("load",),
        "record_span": ("compute", "x"),
    }[record]
    with pytest.raises(ValueError, match="start_ns=5, end_ns=4"):
        getattr(ledger, record)(*args, 5, 4)


def test_an_unknown_timeline_is_refused():
    with pytest.raises(ValueError, match='which must be "last" or "current"'):
        Ledger().timeline("first")


def test_many_threads_lose_nothing():
    ledger = Ledger()

    def work():
        for _ in range(2000):
            ledger.add(Tier.DEVICE, 3)
            ledger.record_transfer(Link.DEVICE_TO_FILE, 5, 0, 1)
            ledger.add(Tier.DEVICE, -2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.resident(Tier.DEVICE) == 8000
    assert ledger.moved(Link.DEVICE_TO_FILE) == 40000
    assert ledger.timeline("current").num_dropped == 0


def test_writing_never_waits_for_a_reader():
    """A destructor may run while its own thread, or one that waits for it, holds the lock."""
    ledger = Ledger()
    with ledger._mailbox:
        ledger.add(Tier.DEVICE, 7)  # the same thread: a lock that waited would hang here
        thread = threading.Thread(target=ledger.add, args=(Tier.DEVICE, 5))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert ledger.resident(Tier.DEVICE) == 12


def test_a_call_is_cheap():
    """Under 2 us of processor time here: it calls few functions, however many went before."""
    ledger, events = Ledger(), []
    for _ in range(2000):
        ledger.add(Tier.DEVICE, 1)
    profiled = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        for _ in range(100):
            ledger.add(Tier.DEVICE, 1)
    finally:
        sys.setprofile(profiled)
    assert sum(event.endswith("call") for event in events) < 100 * 20
