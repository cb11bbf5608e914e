"""The plan against a step-by-step model of the two links."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.activations._policy import (
    AutoPolicy,
    Limits,
    MeasuredRates,
    SavedEntry,
    count_hidden,
    simulate_delay,
)

MIB = 1024**2


def step(sizes: list[int], forward_seconds: float, backward_seconds: float) -> list[SavedEntry]:
    """A step that saves at even intervals and uses in reverse."""
    count = len(sizes)
    return [
        SavedEntry(
            num_bytes=size,
            packed_seconds=forward_seconds * (index + 1) / count,
            offloadable=True,
            used_seconds=forward_seconds + backward_seconds * (count - index) / count,
        )
        for index, size in enumerate(sizes)
    ]


def rates(write: float, read: float) -> MeasuredRates:
    return MeasuredRates(write_bytes_per_second=write, read_bytes_per_second=read)


def test_everything_is_hidden_behind_fast_links():
    entries = step([MIB] * 20, 1.0, 2.0)
    assert count_hidden(entries, rates(1e12, 1e12), window_bytes=64 * MIB) == 20


def test_nothing_is_hidden_behind_dead_slow_links():
    entries = step([MIB] * 20, 1.0, 2.0)
    assert count_hidden(entries, rates(1e3, 1e3), window_bytes=64 * MIB) == 0


@pytest.mark.parametrize("slow", ["write", "read"])
def test_half_the_needed_rate_keeps_a_tail(slow):
    entries = step([MIB] * 40, 1.0, 1.0)
    half = 20 * MIB
    link = rates(half, 1e12) if slow == "write" else rates(1e12, half)
    count = count_hidden(entries, link, window_bytes=1024 * MIB)
    assert 10 <= count < 40
    delay = simulate_delay(entries, count, link, window_bytes=1024 * MIB)
    assert delay is not None and delay <= 0.04


def test_a_faster_link_never_hides_less():
    entries = step([MIB * (1 + index % 5) for index in range(30)], 1.0, 2.0)
    counts = [
        count_hidden(entries, rates(rate * MIB, rate * MIB), window_bytes=32 * MIB)
        for rate in (10, 20, 40, 80, 160)
    ]
    assert counts == sorted(counts)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    write=st.integers(5, 200),
    read=st.integers(5, 200),
)
def test_the_chosen_prefix_is_the_longest_that_is_hidden(sizes, write, read):
    """Against all prefixes: no longer one is hidden while the chosen one is."""
    entries = step([size * MIB for size in sizes], 1.0, 2.0)
    link = rates(write * MIB, read * MIB)
    duration = max(entry.used_seconds or 0.0 for entry in entries) - entries[0].packed_seconds
    count = count_hidden(entries, link, window_bytes=64 * MIB)

    def hidden(length: int) -> bool:
        delay = simulate_delay(entries, length, link, window_bytes=64 * MIB)
        return delay is not None and delay <= 0.02 * duration

    assert hidden(count)
    monotone = all(hidden(a) or not hidden(a + 1) for a in range(len(entries)))
    if monotone:
        assert count == max(length for length in range(len(entries) + 1) if hidden(length))


def test_delay_of_one_storage_is_exact():
    """Written from 1 s to 1.5 s; needed at 3 s; read from 2 s at half speed until 3 1/3 s."""
    entry = SavedEntry(90 * MIB, packed_seconds=1.0, offloadable=True, used_seconds=3.0)
    last = SavedEntry(0, packed_seconds=1.5, offloadable=True, used_seconds=2.0)
    delay = simulate_delay([entry, last], 1, rates(200 * MIB, 75 * MIB), window_bytes=MIB)
    assert delay == pytest.approx(2.0 + 90 / (75 * 0.9) - 3.0)


def test_the_window_holds_reads_back():
    entries = step([10 * MIB] * 10, 1.0, 1.0)
    for entry in entries[:-1]:
        entry.used_seconds = 2.0  # all at once, a second after the backward pass has begun
    link = rates(1e12, 150 * MIB)
    wide = simulate_delay(entries, 10, link, window_bytes=1000 * MIB)
    narrow = simulate_delay(entries, 10, link, window_bytes=10 * MIB)
    assert wide is not None and narrow is not None
    assert narrow > wide


def test_reads_run_ahead_into_the_room_of_what_was_kept():
    """Ten storages return while ten kept ones are used up, one by one: the window is their sum."""
    entries = step([10 * MIB] * 20, 1.0, 1.0)
    for entry in entries[:10]:
        entry.used_seconds = 1.9
    link = rates(1e12, 300 * MIB)
    with_room = simulate_delay(entries, 10, link, window_bytes=10 * MIB)
    without = simulate_delay(entries[:10], 10, link, window_bytes=10 * MIB)
    assert with_room == 0.0
    assert without is not None and without > 0.2


def auto(device_memory: int | None = None) -> AutoPolicy:
    return AutoPolicy(
        Limits(
            device_memory=device_memory,
            min_bytes=MIB,
            ahead_bytes=64 * MIB,
        )
    )


def offloaded(policy: AutoPolicy, entries: list[SavedEntry]) -> int:
    policy.begin_step()
    return sum(
        entry.num_bytes for entry in entries if policy.should_offload(entry.num_bytes, False)
    )


def test_auto_learns_from_the_first_step():
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    assert offloaded(policy, entries) == 40 * MIB
    assert policy.limits_backlog
    policy.learn(entries, rates(20 * MIB, 20 * MIB))
    second = offloaded(policy, entries)
    assert not policy.limits_backlog
    assert 0 < second < 40 * MIB
    assert "leave" in policy.reason


def test_auto_with_a_budget_sends_what_does_not_fit():
    policy, entries = auto(device_memory=30 * MIB), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    policy.learn(entries, rates(None, None))
    assert offloaded(policy, entries) == 25 * MIB  # 40 - (30 - half of it for writes in flight)
    roomy = auto(device_memory=64 * MIB)
    offloaded(roomy, entries)
    roomy.learn(entries, rates(None, None))
    assert offloaded(roomy, entries) == 0
    assert "fits" in roomy.reason


def test_auto_plans_each_kind_of_step_by_itself():
    policy = auto()
    large, small = step([8 * MIB] * 10, 1.0, 1.0), step([MIB] * 10, 1.0, 1.0)
    for entries in (large, small):
        offloaded(policy, entries)
        policy.learn(entries, rates(20 * MIB, 20 * MIB))
    amounts = [offloaded(policy, entries) for entries in (large, small, large, small)]
    assert amounts[0] == amounts[2] != amounts[1] == amounts[3]


def test_auto_keeps_what_a_backward_pass_saves():
    policy = auto()
    policy.begin_step()
    assert policy.should_offload(MIB, False)
    assert not policy.should_offload(MIB, True)


def test_a_prefix_has_no_holes():
    policy, entries = auto(), step([MIB, 30 * MIB, MIB, MIB], 1.0, 1.0)
    offloaded(policy, entries)
    policy.learn(entries, rates(10 * MIB, 10 * MIB))
    policy.begin_step()
    choices = [policy.should_offload(entry.num_bytes, False) for entry in entries]
    assert not any(later and not sooner for sooner, later in itertools.pairwise(choices))


def learn(policy: AutoPolicy, entries: list[SavedEntry], link: MeasuredRates, **rest: float) -> int:
    """Bytes that the step after this one offloads."""
    policy.learn(entries, link, **rest)
    return offloaded(policy, entries)


def test_what_left_without_waiting_may_leave_again():
    """The links looked slow, but no step waited for them: what left keeps leaving."""
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    for entry in entries[:37]:
        entry.left = True
    assert learn(policy, entries, rates(5 * MIB, 5 * MIB)) == 37 * MIB


def test_what_was_handed_back_is_no_evidence():
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    for entry in entries[:2] + entries[3:]:
        entry.left = True
    assert learn(policy, entries, rates(5 * MIB, 5 * MIB)) < 10 * MIB


def test_one_disturbed_step_changes_no_plan():
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    assert learn(policy, entries, rates(1e9, 1e9)) == 40 * MIB
    assert learn(policy, entries, rates(5 * MIB, 5 * MIB), stall_seconds=0.5) == 40 * MIB
    assert learn(policy, entries, rates(1e9, 1e9)) == 40 * MIB


def test_steps_that_write_nothing_forget_no_rates():
    """All storages of several steps are handed back before they leave."""
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    amount = learn(policy, entries, rates(20 * MIB, 20 * MIB))
    assert 0 < amount < 40 * MIB
    for _ in range(5):
        assert learn(policy, entries, rates(None, None)) == amount


def test_steps_that_go_on_waiting_offload_less():
    """The simulation says that all is hidden, and the steps wait all the same."""
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    link = rates(100 * MIB, 100 * MIB)
    offloaded(policy, entries)
    for entry in entries:
        entry.left = True
    assert learn(policy, entries, link, stall_seconds=0.1) == 40 * MIB
    assert learn(policy, entries, link, stall_seconds=0.1) == 30 * MIB  # 10 MiB in 0.1 s
    amounts = [learn(policy, entries, link) for _ in range(15)]
    assert amounts == sorted(amounts)
    assert amounts[0] == 30 * MIB  # 2 % of 40 MiB is less than a storage
    assert amounts[-1] == 40 * MIB


def test_a_slower_link_is_believed_after_some_steps():
    policy, entries = auto(), step([MIB] * 40, 1.0, 1.0)
    offloaded(policy, entries)
    assert learn(policy, entries, rates(1e9, 1e9)) == 40 * MIB
    slow = rates(20 * MIB, 20 * MIB)
    amounts = [learn(policy, entries, slow, stall_seconds=0.5) for _ in range(6)]
    assert amounts[-1] < 25 * MIB
    assert "20.00 MiB/s" in policy.reason
